"""Measure: times of a case for every peer in turn, several rounds, medians.

Case, device -> a row of JSON-able figures. Random data, warm-up first, inputs rotated through more than the last-level cache on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import flashgen

from ..passes import forward_pass
from ..turns import in_turn, run_for
from .cases import Case
from .peers import PLAIN, peers

ROTATE_BYTES = 128 << 20  # inputs in turn exceed the L2 of every GPU in the table
TARGET_SECONDS = {"cpu": 0.4, "cuda": 0.03}  # time spent on one peer in one round
# Before it, on a GPU: a chip at its power limit needs about 0.1 s to find the clock that a kernel lets it run at, and until then has that of the kernel before.
SETTLING_SECONDS = {"cpu": 0.0, "cuda": 0.15}
# Before all rounds: from rest, its clock first falls too far and then swings (an H200's: 1550 MHz for 0.4 s, 1830, 1650, and 1720 after two seconds).
LOAD_SECONDS = {"cpu": 0.0, "cuda": 1.5}
COLD_SECONDS = {"cpu": 0.0, "cuda": 4.0}  # the same for the first case of a process: one bound by L2 was 8 to 15% slower as the first than as the second
FORWARDS = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # cost of a pass, by the usual convention
TRAFFIC = {"forward": 1.0, "backward": 2.0, "both": 3.0}  # compulsory bytes, likewise: a backward reads q, k, v, out, dout and writes three gradients

COPIES = 20  # of a preparation in the graph that is timed

_loaded: set[str] = set()  # devices on which a case has been timed

Step = Callable[[], Any]


def _inputs(case: Case, device: str, grad: bool) -> list[list[torch.Tensor]]:
    dtype = getattr(torch, case.dtype)
    q_shape, kv_shape = ((case.batch, h, case.length, case.head_dim) for h in (case.heads, case.kv_heads))
    generator = torch.Generator(device).manual_seed(0)
    size = torch.empty((), dtype=dtype).element_size() * (case.batch * case.length * case.head_dim) * (case.heads + 2 * case.kv_heads)
    copies = 1 if device == "cpu" else max(1, min(8, ROTATE_BYTES // size))
    make = lambda shape: torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(grad)  # noqa: E731
    return [[make(q_shape), make(kv_shape), make(kv_shape), make(q_shape).detach()] for _ in range(copies)]


def _steps(call: Callable[..., Any], sets: list[list[torch.Tensor]], what: str, learned: Sequence[torch.Tensor] = ()) -> list[Step]:
    """One step per input set: the forward alone, the backward alone (its graph kept), or both. learned: what else has a gradient."""
    return [_step(call, what, (q, k, v), dout, learned) for q, k, v, dout in sets]


def _step(call: Callable[..., Any], what: str, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor, learned: Sequence[torch.Tensor]) -> Step:
    if what == "forward":
        return lambda: call(*inputs)
    if what == "both":
        return lambda: torch.autograd.grad(call(*inputs), (*inputs, *learned), dout)
    out = call(*inputs)
    return lambda: torch.autograd.grad(out, (*inputs, *learned), dout, retain_graph=True)


def _time_ms(steps: list[Step], device: str, calls: int) -> float:
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for n in range(calls):
            steps[n % len(steps)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls
    best = float("inf")
    for n in range(calls):
        started = time.perf_counter()
        steps[n % len(steps)]()
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def _settle(steps: list[Step], device: str, calls: int) -> None:
    """Run without timing until the clock is the kernel's own."""
    run_for(SETTLING_SECONDS[device], lambda: _time_ms(steps, device, calls))


def _load(ready: Sequence[tuple[list[Step], int]], device: str) -> None:
    """Run all in turn until a chip that comes from rest has got used to the load."""
    seconds = LOAD_SECONDS if device in _loaded else COLD_SECONDS
    run_for(seconds[device], lambda: [_time_ms(steps, device, calls) for steps, calls in ready])
    _loaded.add(device)


def _preparation(case: Case, device: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """What a call makes of the mask's tensors before its kernel starts: milliseconds on the device and bytes; nothing where it makes nothing."""
    text, call, *_ = flashgen.compile(case.made(device).variant).tunable(q.detach(), k.detach(), v.detach(), {})
    make = forward_pass(text, call).tables
    tables = make()
    if not tables:
        return {}
    step: Step = make
    if device == "cuda":  # a graph of them: some microseconds each, less than their launches take
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(COPIES):
                make()
        step = graph.replay
    ms = statistics.median(_time_ms([step], device, 10) for _ in range(3))
    return {"ms": ms / COPIES if device == "cuda" else ms, "bytes": sum(t.numel() * t.element_size() for t in tables.values())}


def measure(case: Case, device: str, what: str = "forward", *, rounds: int = 3, family: str | None = None, only: Sequence[str] = ()) -> dict[str, Any]:
    """``what``: "forward" (no grad), "backward" or "both". Milliseconds per peer (the median of the rounds) and TFLOP/s by the case's exact pairs."""
    sets = _inputs(case, device, grad=what != "forward")
    ready: dict[str, tuple[list[Step], int]] = {}
    failed: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    with torch.no_grad() if what == "forward" else torch.enable_grad():
        for name, call in peers(case, device, family, only).items():
            try:
                steps = _steps(call, sets, what, () if name == PLAIN else case.made(device).learned)
                steps[0]()
                once = _time_ms(steps, device, 2)
            except Exception as error:
                if name == "flashgen":
                    raise
                failed[name] = f"{type(error).__name__}: {str(error)[:120]}"
                continue
            ready[name] = (steps, max(3, min(200, int(TARGET_SECONDS[device] * 1e3 / max(once, 1e-3)))))
        _load(list(ready.values()), device)
        for name in in_turn(list(ready), rounds):  # what comes first is slow if any swing is left
            steps, calls = ready[name]
            _settle(steps, device, calls)
            times.setdefault(name, []).append(_time_ms(steps, device, calls))
    medians = {name: statistics.median(t) for name, t in times.items()}
    flops = case.flops() * FORWARDS[what]
    return {
        "case": case.name, "what": what, "ms": {n: round(t, 4) for n, t in medians.items()}, "spread": {n: round(max(t) / min(t), 3) for n, t in times.items()},
        "tflops": {n: round(flops / t / 1e9, 3) for n, t in medians.items()}, "failed": failed,
        "flops": flops, "bytes": case.bytes() * TRAFFIC[what], "preparation": _preparation(case, device, *sets[0][:3]),
    }  # fmt: skip


def speedup(row: dict[str, Any], over: str) -> float:
    """How many times faster this project is than a peer in a row."""
    return row["ms"][over] / row["ms"]["flashgen"]
