"""Tune: the best plan of one pass by measurement: compile candidates, check that they agree, time them in turn, record the winner.

Trial (a pass with its tensors) -> Measured. Example: ``tune(trial).winner``.

A power-limited chip ranks plans differently hot and cool: each candidate is timed in short bursts with pauses, then the close ones in turn under load, and
of these the closest each at the clock that it lets the chip run at. The hot times decide; within CLOSE of the fastest the tiler's own choice stays.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import families, pipeline, records, settings
from .bound import Bound
from .errors import CompileError, FlashgenError
from .families import Sizes
from .form import Form
from .launch import load
from .measured import Measured, Row, best
from .pipeline import Executable
from .problem import Problem
from .progress import Bars
from .target import Target
from .turns import in_turn, run_for
from .workers import Pool

MOST_CANDIDATES = 24  # of a pass
CONTENDING = 1.35  # times the fastest, cool: slower plans are not timed hot
# In turns of some milliseconds a plan runs at the clock that the one before it left: those within this of the fastest, and no more, are timed each at its own.
CLOSEST, FINALISTS = 1.08, 4
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}  # of a row, relative to its norm: plans round differently
Progress = Callable[[str, int, int], None]  # what is done, how many of how many


@dataclass(frozen=True)
class Effort:
    """How long is measured. Seconds."""

    load: float = 0.5  # before the hot measurement
    swing: float = 1.0  # more of it on a GPU: from rest, the clock of a chip at its power limit falls too far, and then swings
    burst: float = 0.006  # one timing of one plan
    pause: float = 0.01  # before each cool burst
    rounds: int = 7
    settling: float = 0.12  # on a GPU, of one plan before its final timing, which takes settled_burst
    settled_burst: float = 0.02
    settled_rounds: int = 2


@dataclass(frozen=True)
class Trial:
    """One pass of one call: all that its kernels are run with. ``results`` of all candidates are to agree."""

    form: Form
    problem: Problem
    target: Target
    device: torch.device
    family: str | None  # forced by the user, as are the plan fields
    forced: Mapping[str, int] | None
    sizes: Sizes
    numbers: Mapping[str, Any]
    addresses: Mapping[str, int]
    written: Mapping[str, Tensor]  # overwritten by a run
    results: Callable[[], Mapping[str, Tensor]]
    sums: tuple[Tensor, ...]  # a run adds to these
    pairs: Callable[[], float]  # visible (query, key) pairs of all heads
    tensors: tuple[Any, ...]  # keeps alive what the addresses point to

    @property
    def key(self) -> str:
        return records.key(self.form, self.problem, self.target, self.family, self.forced)

    def runner(self, executable: Executable) -> Callable[[], None]:
        bound = Bound(load(executable, self.device), self.numbers, self.sizes)
        return lambda: bound.start(self.addresses)


def candidate_rows(trial: Trial) -> list[Row]:
    """The plans to try: the tiler's ranking of the family that serves the problem, then of the other families that accept it."""
    forced = dict(trial.forced) if trial.forced else None
    clocks_to_ms = trial.pairs() / (trial.target.sms * trial.target.clock_mhz * 1e3)  # all SMs, or cores, at work
    first, _ = families.choose(trial.problem, trial.target, trial.family, forced or {})
    others = [n for n in families.ORDER[trial.target.kind] if n != first and not trial.family and not families.get(n).refuse(trial.problem, trial.target)]
    found = []
    for name in (first, *others):
        try:
            ranked = pipeline.ranked(trial.form, trial.problem, trial.target, name, forced)
        except FlashgenError:
            if name == first:
                raise
            continue  # the forced fields are not this family's
        scale = clocks_to_ms if _predicts(trial, name) else None
        found += [Row(name, c.plan.as_dict(), None if scale is None else c.cost * scale) for c in ranked if not c.rejected]
    return found[:MOST_CANDIDATES]


def _predicts(trial: Trial, family: str) -> bool:
    """Whether the family's cost depends on the plan: one that is the same for all ranks nothing and is no time."""
    import sympy

    from .analysis import analyze

    cost = families.get(family).cost(trial.problem, analyze(trial.form), trial.target)
    return bool(sympy.sympify(cost).free_symbols)


def tune(trial: Trial, *, effort: Effort | None = None, pool: Pool | None = None, progress: Progress = lambda what, done, total: None) -> Measured:
    """Measure the candidates of a pass and record the winner."""
    if trial.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise FlashgenError("a CUDA graph is being captured: tune before capturing, flashgen.autotune(kernel, q, k, v).")
    if settings.override() is not None:
        raise FlashgenError("FLASHGEN_OVERRIDE is set: edited sources would be measured as what they replace. Unset it to tune.")
    if trial.device.type == "cuda" and torch.cuda.current_device() != (trial.device.index or 0):
        with torch.cuda.device(trial.device):  # events are those of the current device
            return tune(trial, effort=effort, pool=pool, progress=progress)
    started = time.perf_counter()
    rows = candidate_rows(trial)
    progress("compiling", 0, len(rows))
    executables = _compile(trial, rows, pool, progress)
    _first_to_front(trial, rows, executables)
    runners = _agreeing(trial, rows, executables)
    _time(trial, rows, runners, effort or Effort(), progress)
    device = torch.cuda.get_device_name(trial.device) if trial.device.type == "cuda" else trial.target.chip
    measured = Measured(
        trial.problem.which, device, f"{trial.problem.dtype}, head dims {trial.problem.head_dim_qk}/{trial.problem.head_dim_v}, {trial.problem.size}",
        _shape(trial.sizes), rows, best(rows), round(time.perf_counter() - started, 2),
    )  # fmt: skip
    records.append(trial.key, {**measured.record(), "variant": _variant(trial.form), "version": records.version(trial.target)})
    pipeline.prepare(trial.form, trial.problem, trial.target, family=trial.family, forced=trial.forced)  # later processes find it in the index
    if settings.debug() >= 3:
        print(f"flashgen: {measured}", file=sys.stderr)
    return measured


def _variant(form: Form) -> str:
    """What a reader of the records may know a form by."""
    from .analysis import analyze

    facts = analyze(form)
    keys = "no mask" if not facts.has_mask else facts.kv_text if facts.kv_bounded else f"a mask of {facts.mask_ops} operations"
    return f"{keys}; {f'a score of {facts.score_ops} operations' if facts.has_score else 'no score'}"


def ensure(trial: Trial) -> None:
    """Tune unless a record exists; of several processes that ask at once one measures, the others wait for it."""
    with records.lock(trial.key):
        if records.winner(trial.key) is None:
            with Bars(trial.problem.which) as progress:
                tune(trial, progress=progress)


def _shape(sizes: Sizes) -> str:
    return f"batch {sizes.batch}, heads {sizes.heads}/{sizes.kv_heads}, lengths {sizes.q_len}/{sizes.kv_len}"


# ---- compiling -------------------------------------------------------------------------------------------------------------------------------


def _compile(trial: Trial, rows: list[Row], pool: Pool | None, progress: Progress) -> dict[int, Executable]:
    """The candidates that compile, by number; the verdict of the others says why they do not."""
    if pool is None:
        with Pool(workers()) as own:
            return _compile(trial, rows, own, progress)
    store, found = pipeline.cache.current(), {}
    plans = [row.plan(trial.problem.which) for row in rows]
    for done, (number, built) in enumerate(pool.compile(trial.form, trial.problem, trial.target, plans)):
        if built.binary is None:
            rows[number].verdict = built.failure
        else:
            if store.get_binary(built.key) is None:
                store.put_binary(built.key, built.binary)
            found[number] = pipeline.executable(trial.form, trial.problem, trial.target, plans[number], built.binary)
        progress("compiling", done + 1, len(rows))
    if not found:
        raise CompileError(f"none of {len(rows)} candidates compiled. The first: {rows[0].verdict}.")
    return found


def workers() -> int:
    """Compilers at once: one per core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_to_front(trial: Trial, rows: list[Row], executables: dict[int, Executable]) -> None:
    """Number 0 is the plan that an untuned call runs (the first choice, unless its build spilled); what spills more than it falls out."""
    chosen = pipeline.prepare(trial.form, trial.problem, trial.target, family=trial.family, forced=trial.forced, use_records=False)
    number = next((n for n, row in enumerate(rows) if row.plan(trial.problem.which) == chosen.plan), None)
    if number is None:  # beyond the candidates, or not of the ranking any more
        rows.insert(0, Row(chosen.plan.family, chosen.plan.as_dict(), None))
    else:
        rows.insert(0, rows.pop(number))
    by_plan = {executable.plan: executable for executable in executables.values()}
    executables.clear()
    most = pipeline.spilled_bytes(chosen.binary)
    for n, row in enumerate(rows):
        found = chosen if n == 0 else by_plan.get(row.plan(trial.problem.which))
        if found is not None and n and trial.target.kind == "cuda" and pipeline.spilled_bytes(found.binary) > most:
            row.verdict = "; ".join(found.binary.report.faults)
        elif found is not None:
            executables[n] = found


# ---- checking --------------------------------------------------------------------------------------------------------------------------------


def _poisoned_run(trial: Trial, run: Callable[[], None]) -> dict[str, Tensor]:
    """Results of one run into memory full of NaN."""
    for tensor in trial.sums:
        tensor.zero_()
    for tensor in trial.written.values():
        tensor.fill_(float("nan"))
    run()
    return {name: tensor.clone() for name, tensor in trial.results().items()}


def _agreeing(trial: Trial, rows: list[Row], executables: dict[int, Executable]) -> dict[int, Callable[[], None]]:
    """Launchers of the candidates whose outputs are those of number 0."""
    runners: dict[int, Callable[[], None]] = {}
    expected: dict[str, Tensor] = {}
    for number, executable in executables.items():
        try:
            run = trial.runner(executable)
            found = _poisoned_run(trial, run)
            if trial.device.type == "cuda":
                torch.cuda.synchronize(trial.device)
        except Exception as error:
            if number == 0:
                raise
            rows[number].verdict = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        expected = expected or found
        worst = {name: disagreement(found[name], expected[name]) for name in found}
        name = max(worst, key=lambda n: worst[n])
        if worst[name] > TOLERANCES[trial.problem.dtype]:
            rows[number].verdict = f"{name} differs from the tiler's choice by {worst[name]:.1e} of a row's norm"
        else:
            runners[number] = run
    return runners


def disagreement(found: Tensor, expected: Tensor) -> float:
    """The largest error of a row (last dimension) over its norm and the mean row's; infinity where one is NaN or infinite and the other is not."""
    if found.numel() == 0:
        return 0.0
    real = torch.float64 if expected.dtype == torch.float64 else torch.float32
    found, expected = (t.to(real).reshape(-1, t.shape[-1] if t.dim() else 1) for t in (found, expected))
    finite = torch.isfinite(expected)
    if not torch.equal(found.nan_to_num(1.0)[~finite], expected.nan_to_num(1.0)[~finite]) or not torch.equal(torch.isfinite(found), finite):
        return float("inf")
    found, expected = (t.where(finite, torch.zeros_like(t)) for t in (found, expected))
    norms = expected.norm(dim=-1)
    error = (found - expected).norm(dim=-1) / (norms + norms.mean()).clamp_min(torch.finfo(real).tiny)
    return float(error.max())


# ---- timing ----------------------------------------------------------------------------------------------------------------------------------


def _burst_ms(device: torch.device, run: Callable[[], None], calls: int) -> float:
    """Milliseconds of one call out of ``calls`` in a row: their mean on a GPU; on a CPU the best, since other processes only ever add to it."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / calls
    best_ms = float("inf")
    for _ in range(calls):
        started = time.perf_counter()
        run()
        best_ms = min(best_ms, (time.perf_counter() - started) * 1e3)
    return best_ms


def _time(trial: Trial, rows: list[Row], runners: dict[int, Callable[[], None]], effort: Effort, progress: Progress) -> None:
    """Fill in the cool times of all, and the hot ones of those that contend, on a GPU of the closest of them."""
    burst = lambda number, calls: _burst_ms(trial.device, runners[number], calls)  # noqa: E731
    fewest, bursts, typical = (1, 2, statistics.median) if trial.device.type == "cuda" else (3, 5, min)
    calls, cool = {}, {}
    for done, number in enumerate(runners):
        progress("timing", done, len(runners))
        once = min(burst(number, 1) for _ in range(3))  # the first loads code and wakes threads
        calls[number] = max(fewest, min(100, int(effort.burst * 1e3 / max(once, 1e-3))))
        times = []
        for _ in range(bursts):
            time.sleep(effort.pause)
            burst(number, 1)  # wakes threads again
            times.append(burst(number, calls[number]))
        rows[number].cool_ms = cool[number] = min(times)
    progress("timing", len(runners), len(runners))
    contending = [number for number in runners if number == 0 or cool[number] <= CONTENDING * min(cool.values())]
    until = time.perf_counter() + effort.load + (effort.swing if trial.device.type == "cuda" else 0.0)
    while time.perf_counter() < until:
        for number in contending:
            burst(number, calls[number])
    hot = _rounds(burst, contending, calls, effort.rounds)
    if trial.device.type == "cuda":
        hot = _settled(burst, hot, calls, effort)
    else:
        fastest = min(hot, key=lambda number: typical(hot[number]))
        more = _rounds(burst, [0, fastest] if fastest else [], calls, 2 * effort.rounds)
        hot = {number: times + more.get(number, []) for number, times in hot.items()}
    for number, times in hot.items():
        rows[number].hot_ms = typical(times)


Burst = Callable[[int, int], float]  # number of a plan, how many calls -> milliseconds of one


def _rounds(burst: Burst, numbers: list[int], calls: Mapping[int, int], rounds: int) -> dict[int, list[float]]:
    """Times of every plan in turn, from another one on in each round."""
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for number in in_turn(numbers, rounds):
        times[number].append(burst(number, calls[number]))
    return times


def _settled(burst: Burst, hot: Mapping[int, list[float]], calls: Mapping[int, int], effort: Effort) -> dict[int, list[float]]:
    """Times of number 0 and the closest of the others, each after it has run for a while; the fastest and number 0 twice as often."""
    typical = {number: statistics.median(times) for number, times in hot.items()}
    close = [number for number in sorted(typical, key=lambda n: typical[n]) if number and typical[number] <= CLOSEST * min(typical.values())]
    longer = {number: max(1, int(calls[number] * effort.settled_burst / effort.burst)) for number in (0, *close[: FINALISTS - 1])}

    def settled(number: int, calls: int) -> float:
        run_for(effort.settling, lambda: burst(number, calls))
        return burst(number, calls)

    times = _rounds(settled, list(longer), longer, effort.settled_rounds)
    fastest = min(times, key=lambda number: statistics.median(times[number]))
    more = _rounds(settled, [0, fastest] if fastest else [], longer, effort.settled_rounds)
    return {number: found + more.get(number, []) for number, found in times.items()}
