"""Runs: the passes of a call, built, loaded and launched. What was built, and the arguments of each shape, are remembered.

Handle's text + Call -> outputs. Example: ``run_forward(text, call)``. No autograd here; see ``ops``.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from . import tune
from .bound import Bound
from .calls import Backward, Call, sizes_of, target_of
from .errors import VariantError
from .families import Workspace
from .launch import Loaded, load
from .passes import Pass, backward_pass, finished, forward_pass
from .pipeline import prepare

_executables: dict[Any, Loaded] = {}
_locks: dict[Any, threading.Lock] = {}
_lock = threading.Lock()
_bound: dict[Any, Bound] = {}
MAX_BOUND = 4096  # shapes remembered before the memo starts anew


def forget() -> None:
    """Drop the passes that calls have loaded, so that the next call of each looks for a record again."""
    _executables.clear()
    _bound.clear()


def run_forward(text: str, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, max_scores, out_low; those not wanted are empty."""
    work = forward_pass(text, call)
    out, lse = work.written["out"], work.lse
    if out.numel() or lse.numel():
        bound = bind(work)
        if work.handle.layout == "varlen" and not bound.clears:  # rows that belong to no sequence
            for name, t in work.written.items():
                t.zero_() if name in ("out", "out_low") else t.fill_(float("-inf"))
        start(bound, work)
    return out, lse, work.written.get("max_scores", lse.new_empty(0)), work.written.get("out_low", out.new_empty(0))


def run_backward(text: str, call: Call, b: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv, delta and the captured gradients; those not wanted are empty."""
    work = backward_pass(text, call, b)
    bound = bind(work) if work.lse.numel() else None
    if bound is None or (work.handle.layout == "varlen" and not bound.clears):  # no rows, or rows and keys that belong to no sequence
        for t in work.written.values():
            t.zero_()
    if bound is not None:
        start(bound, work)
    dq, dk, dv = (work.written[n] if n in work.written else t.new_empty(0) for n, t in zip(("dq", "dk", "dv"), (work.call.q, work.call.k, work.call.v)))
    return dq, dk, dv, work.written["delta"], [finished(t, work.lse) for t in work.sums.values()]


def start(bound: Bound, work: Pass) -> None:
    """Launch a pass."""
    addresses, held = work.addresses()
    bound.start(addresses)
    del held


def bind(work: Pass) -> Bound:
    """The arguments of a pass, its addresses aside. A delta that the pass lacks is allocated by each launch."""
    key = work.key()
    found = _bound.get(key)
    if found is None:
        if len(_bound) >= MAX_BOUND:
            _bound.clear()
        delta = Workspace("delta", str(work.lse.dtype)[6:], work.lse.numel(), zeroed=False)
        scratch = [delta] if work.given is not None and "delta" not in work.others else []
        found = _bound[key] = Bound(_loaded(work), work.numbers(), sizes_of(work.packed_call), scratch)
    return found


def _loaded(work: Pass) -> Loaded:
    """The loaded pass, prepared once per device; threads that ask at once wait for one build."""
    handle, form, problem, device = work.handle, work.form, work.problem(), work.call.q.device
    key = (form.text, handle.target, handle.family, handle.plan, handle.tune, problem, device)
    found = _executables.get(key)
    if found is None:
        with _lock:
            lock = _locks.setdefault(key, threading.Lock())
        with lock:
            found = _executables.get(key)
            if found is None:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise VariantError(
                        "this kernel is not built yet and a CUDA graph is being captured: make one warm-up call of the same kind before capturing."
                    )
                if handle.tune:
                    tune.ensure(trial(_own(work)))
                forced = dict(handle.plan) if handle.plan else None
                chip = target_of(handle.target, device)
                executable = prepare(form, problem, chip, family=handle.family, forced=forced, use_records=handle.tune is not False)
                found = _executables[key] = load(executable, device)
    return found


def _own(work: Pass) -> Pass:
    """The same pass with outputs of its own, which a tuner may overwrite."""
    return forward_pass(work.text, work.call) if work.given is None else backward_pass(work.text, work.call, work.given)


def trial(work: Pass) -> tune.Trial:
    """A pass as the tuner runs it, again and again."""
    handle, device = work.handle, work.call.q.device
    addresses, held = work.addresses()
    return tune.Trial(
        work.form, work.problem(), target_of(handle.target, device), device, handle.family, dict(handle.plan) if handle.plan else None,
        sizes_of(work.packed_call), work.numbers(), addresses, work.written, work.results, tuple(work.sums.values()), work.pairs, (work, *held),
    )  # fmt: skip
