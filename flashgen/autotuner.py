"""The autotuner's front: a Kernel and the tensors of a call -> measured passes, recorded for later processes.

Example: ``print(flashgen.autotune(kernel, q, k, v))``.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import repeat, runs, tune
from .calls import Backward
from .errors import ShapeError, VariantError
from .measured import Measured
from .passes import backward_pass, forward_pass
from .progress import Bars
from .workers import Pool

if TYPE_CHECKING:
    from .kernel import Kernel


@dataclass(frozen=True)
class TuneReport:
    """What was measured; ``print`` it for the tables. ``passes``: one Measured for the forward and, if asked for, one for the backward."""

    passes: tuple[Measured, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.passes))


def autotune(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, backward: bool = True, progress: bool = True, **call: Any) -> TuneReport:
    """Measure the best plans on this device for a call, and record the winners per device and size class; later processes pick them up.

    q, k, v and ``call`` are the arguments of ``kernel(...)``, or of ``kernel.varlen(...)`` where ``cu_seqlens_q`` is among them. ``backward`` measures the
    gradients of those of q, k, v that require grad (of all three if none does). ``progress`` shows bars on a terminal's stderr, elsewhere a line for each pass.
    Takes seconds on a GPU, a minute or two on a CPU: up to 24 candidates of a pass are compiled by worker processes, checked against the tiler's choice and
    timed in turn.
    Raises what the call raises, and VariantError while a CUDA graph is captured.
    """
    if not hasattr(kernel, "tunable"):
        raise VariantError(f"flashgen.autotune takes a kernel, not {type(kernel).__name__}: kernel = flashgen.compile(variant).")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise VariantError("a CUDA graph is being captured: call flashgen.autotune before capturing.")
    with ExitStack() as stack, torch.no_grad():
        pool = stack.enter_context(Pool(tune.workers()))

        def measure(trial: tune.Trial) -> Measured:
            with Bars(trial.problem.which, shown=progress) as shown:
                return tune.tune(trial, pool=pool, progress=shown)

        text, made, wanted, slots = kernel.tunable(q, k, v, call)
        if not made.q.numel() or not made.k.numel():
            raise ShapeError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: there is nothing to measure. Tune with tensors of the size that is used.")
        passes = [measure(runs.trial(forward_pass(text, made)))]
        repeat.forget()
        if backward:
            out, lse, _, low = runs.run_forward(text, made)
            given = Backward(torch.randn_like(out), None, out, low, lse, wanted, slots, kernel.is_deterministic())
            passes.append(measure(runs.trial(backward_pass(text, made, given))))
            repeat.forget()
    return TuneReport(tuple(passes))
