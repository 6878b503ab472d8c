"""Kernel: what ``flashgen.compile`` returns, a differentiable callable that plans, emits, builds and launches on demand.

Example: ``kernel = flashgen.compile(Variant(mask=causal)); out = kernel(q, k, v)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import calls, checks, dynamo, explain, families, ops, pipeline, settings
from . import target as targets
from .calls import Backward, Call, Handle
from .capture import resolve
from .errors import ShapeError, VariantError
from .form import Form, Traced
from .language import dtype_name
from .plan import Plan, size_class
from .problem import Problem
from .repeat import Repeats
from .score_bounds import static_bounds
from .source import Binary
from .target import Target
from .traffic import Shape, Traffic, forecast
from .variant import Variant

DEFAULT_LENGTH = 4096  # of the bfloat16 problem that source(), plan(), explain() and build() describe when no tensors are given
DEFAULT_HEAD_DIM = 128


class Aux(NamedTuple):
    """Statistics of each query row, float32 (float64 for float64 inputs), natural log: ``(B, Hq, Lq)``, packed ``(Hq, Tq)``.

    lse: log-sum-exp of the visible scores and the sink, -inf for a row without either; differentiable.
    max_scores: the largest visible score, without the sink; not differentiable. None when not asked for.
    """

    lse: Tensor | None
    max_scores: Tensor | None


def compile(
    variant: Variant, *, target: str | None = None, family: str | None = None, deterministic: bool | None = None, tune: bool | None = None,
    plan: Mapping[str, int] | None = None,
) -> Kernel:  # fmt: skip
    """A Kernel for a variant.

    target: None (the device of the tensors it is called with), "cpu", "sm80", "sm86", "sm89", "sm90a", "sm100", "sm120".
    family: force a kernel family ("cpu", "sm80", "sm90"). deterministic: None follows ``torch.use_deterministic_algorithms``.
    tune: None uses the winner that ``flashgen.autotune`` recorded on this chip, else the tiler's first choice; True measures at the first call of a problem
    that has no record (never while a CUDA graph is captured); False ignores records. FLASHGEN_TUNE is the default.
    plan: Plan fields to force, e.g. ``{"block_q": 64}``.
    Raises VariantError, DeviceError (unknown target).
    """
    return Kernel(variant, target=target, family=family, deterministic=deterministic, tune=tune, plan=plan)


class Kernel:
    """A compiled variant. Holds the captured tensors; compiled passes are shared by all kernels of equal form."""

    def __init__(
        self, variant: Variant, *, target: str | None, family: str | None, deterministic: bool | None, tune: bool | None, plan: Mapping[str, int] | None
    ):
        if not isinstance(variant, Variant):
            raise VariantError(
                f"flashgen.compile takes a flashgen.Variant, not {type(variant).__name__}: flashgen.compile(flashgen.Variant(mask=..., score=...))."
            )
        target = target if target is not None else settings.target()
        if target is not None:
            targets.parse(target if isinstance(target, str) else repr(target))
        known = [name for names in families.ORDER.values() for name in names]
        if family is not None and family not in known:
            raise VariantError(f"family={family!r}: the families are {', '.join(known)}.")
        if tune is not None and not isinstance(tune, bool):
            raise VariantError(f"tune={tune!r}: True tunes at the first call, None uses a recorded winner, False ignores records.")
        integers = plan is None or (isinstance(plan, Mapping) and all(isinstance(n, str) and type(v) is int for n, v in plan.items()))
        if not integers:
            raise VariantError(f"plan={plan!r}: a dict from Plan field names to integers.")
        self.variant, self.target, self.family, self.deterministic = variant, target, family, deterministic
        self.forced = None if plan is None else tuple(sorted(plan.items()))
        self.tune = settings.tune() if tune is None else tune
        self._handles: dict[Any, str] = {}
        # Nothing that changes from call to call, and gradients for q, k and v alone: calls of known shapes can be repeated.
        self._plain = not (variant.inputs or variant.volatile or variant.sink) and not variant.plain.captures
        self._repeats = Repeats()
        if not variant.inputs:
            for max_scores in (False, True):  # made ahead, so that a traced call only looks them up
                for layout in ("dense", "varlen"):
                    for out_low in (False, True):
                        self._handle(variant.plain.form.text, layout, max_scores, out_low)

    # ---- calls

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, seqlens_k: Tensor | None = None, sink: Tensor | None = None, inputs: Mapping[str, Tensor] | None = None,
        dropout_p: float = 0.0, seed: int | None = None, return_aux: bool | tuple = False, layout: str = "bhld",
    ) -> Any:  # fmt: skip
        """Attention. q ``(B, Hq, Lq, D)``, k ``(B or 1, Hkv, Lk, D)``, v ``(B or 1, Hkv, Lk, Dv)`` -> ``(B, Hq, Lq, Dv)`` in q's dtype.

        layout="blhd" takes and gives ``(B, L, H, D)``. seqlens_k: int32 ``(B,)``, keys in use per batch item. sink: float ``(Hq,)``.
        inputs: tensors for the names of ``flashgen.input``. dropout_p in 0..1: entries of P are dropped by a counter-based rule of position and seed
        (0..2^64 - 1; None: drawn from torch's generator of the device), the same on every device; lse is that without dropout.
        return_aux: True, or names of statistics -> ``(out, Aux)``.
        Raises ShapeError, DtypeError, DeviceError or VariantError before any launch.
        """
        plain = self._plain and seqlens_k is sink is inputs is seed is None and return_aux is False and layout == "bhld"
        plain = plain and type(dropout_p) is float and not dropout_p
        if plain and (found := self._repeats(q, k, v, self.deterministic)) is not None:
            return found
        if layout not in ("bhld", "blhd"):
            raise VariantError(f"layout={layout!r}: 'bhld' or 'blhd'.")
        wanted = checks.aux(return_aux)
        call, traced = self._dense(q, k, v, seqlens_k, sink, inputs, dropout_p, seed, layout=layout)
        out, lse, top = self._attend(call, traced, "dense", "max_scores" in wanted)
        if plain:
            self._repeats.remember(q, k, v, self._handle(self.variant.plain.form.text, "dense", False, False), call, out)
        out = out.transpose(1, 2) if layout == "blhd" else out
        return (out, Aux(lse if "lse" in wanted else None, top if "max_scores" in wanted else None)) if wanted or return_aux != False else out  # noqa: E712

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        sink: Tensor | None = None, inputs: Mapping[str, Tensor] | None = None, dropout_p: float = 0.0, seed: int | None = None,
        return_aux: bool | tuple = False,
    ) -> Any:  # fmt: skip
        """Attention on packed sequences: q ``(Tq, Hq, D)``, k ``(Tk, Hkv, D)``, v ``(Tk, Hkv, Dv)``, int32 offsets ``(N + 1,)`` -> ``(Tq, Hq, Dv)``.

        b is the sequence number; indices, q_len and kv_len count within each sequence. Rows past the last offset: out 0, lse -inf.
        dropout_p and seed as in a dense call. ``aux.lse`` is ``(Hq, Tq)``. max_seqlen None is bounded by Tq and Tk, without a synchronisation.
        """
        wanted = checks.aux(return_aux)
        call, traced = self._packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sink, inputs, dropout_p, seed)
        out, lse, top = self._attend(call, traced, "varlen", "max_scores" in wanted)
        return (out, Aux(lse if "lse" in wanted else None, top if "max_scores" in wanted else None)) if wanted else out

    def paged(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, *, block_table: Tensor, seqlens_k: Tensor, **_: Any) -> Any:
        """Attention on a paged KV cache; not available in this version."""
        raise VariantError("kernel.paged is not available in this version: gather the pages and pass them to kernel(q, k, v, seqlens_k=...).")

    # ---- inspection: all take any arguments of the call, and which="forward" | "backward"

    def source(self, q: Any = None, k: Any = None, v: Any = None, *, which: str = "forward", **call: Any) -> str:
        """The emitted text."""
        form, problem, target = self._describe(which, q, k, v, call)
        return pipeline.emit_source(form, problem, target, self._choose(form, problem, target)).text

    def plan(self, q: Any = None, k: Any = None, v: Any = None, *, which: str = "forward", **call: Any) -> Plan:
        """The Plan that the pass is built with."""
        form, problem, target = self._describe(which, q, k, v, call)
        return self._choose(form, problem, target)

    def explain(self, q: Any = None, k: Any = None, v: Any = None, *, which: str = "forward", **call: Any) -> str:
        """What was proved, what bounds the tile, predicted traffic and time."""
        form, problem, target = self._describe(which, q, k, v, dict(call))
        shapes, numbers = self._shapes(q, k, problem, call), self._traced(call.get("inputs") or {})
        forced, use_records = dict(self.forced or ()), self.tune is not False
        return explain.explain(form, problem, target, shapes, family=self.family, forced=forced, use_records=use_records, numbers=numbers)

    def traffic(self, q: Any = None, k: Any = None, v: Any = None, *, which: str = "forward", **call: Any) -> Traffic:
        """The predicted bytes and operations that ``explain`` prints, as numbers."""
        form, problem, target = self._describe(which, q, k, v, dict(call))
        shapes, plan = self._shapes(q, k, problem, call), self._choose(form, problem, target)
        return forecast(form, problem, target, shapes, plan, self._traced(call.get("inputs") or {}))[1]

    def build(self, q: Any = None, k: Any = None, v: Any = None, *, which: str = "forward", **call: Any) -> Binary:
        """Compile now, without a call and without a GPU; the Binary carries the resource report."""
        form, problem, target = self._describe(which, q, k, v, call)
        forced = dict(self.forced) if self.forced else None
        return pipeline.prepare(form, problem, target, family=self.family, forced=forced, use_records=self.tune is not False).binary

    # ---- inside

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_repeats": Repeats()}

    def _traced(self, inputs: Mapping[str, Tensor]) -> Traced:
        variant = self.variant
        return variant.trace(dict(inputs)) if variant.inputs or variant.volatile else variant.plain

    def _handle(self, form: str, layout: str, max_scores: bool, out_low: bool) -> str:
        found = self._handles.get((form, layout, max_scores, out_low))
        if found is None:
            found = _handle_text(form, layout, max_scores, out_low, self.target, self.family, self.forced, self.tune)
            self._handles[(form, layout, max_scores, out_low)] = found
        return found

    def _captured(self, traced: Traced, given: Mapping[str, Tensor], device: torch.device) -> tuple[Traced, list[Tensor]]:
        """The captures as they are now, and a trace that fits them."""
        captures = resolve(traced.captures, given, device)
        for capture, t in zip(traced.captures, captures):
            if not capture.fits(t):
                traced = self.variant.renewed(dict(given))
                return traced, resolve(traced.captures, given, device)
        return traced, captures

    def _dense(self, q: Any, k: Any, v: Any, seqlens_k: Any, sink: Any, inputs: Any, dropout_p: Any, seed: Any, *, layout: str) -> tuple[Call, Traced]:
        q, k, v = _autocast(q, k, v)
        given = checks.given_inputs(self.variant.inputs, inputs)
        checks.dropout(dropout_p, seed)
        checks.tensors(
            self.variant,
            self._kind(q),
            {"q": q, "k": k, "v": v},
            4,
            "(batch, heads, length, head_dim)" if layout == "bhld" else "(batch, length, heads, head_dim)",
        )
        if layout == "blhd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        checks.dense(q, k, v)
        batch = q.shape[0]
        if k.shape[0] != batch:
            k, v = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
        if seqlens_k is not None:
            checks.seqlens(seqlens_k, batch, k.shape[2], q.device)
        checks.sink(self.variant, sink, q.shape[1], q.device)
        traced, captures = self._captured(self._traced(given), given, q.device)
        sizes = {"B": batch, "H": q.shape[1], "Q": q.shape[2], "K": k.shape[2]}
        checks.captures(traced.captures, captures, sizes, q.device)
        checks.spanned(traced.spanned, captures, sizes)
        call = Call(q, k, v, sink, seqlens_k, None, None, captures, list(traced.floats), list(traced.ints), self._scale(q), q.shape[2], k.shape[2])
        return _dropping(call, dropout_p, seed), traced

    def _packed(
        self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, sink: Any, inputs: Any, dropout_p: Any, seed: Any
    ) -> tuple[Call, Traced]:
        q, k, v = _autocast(q, k, v)
        given = checks.given_inputs(self.variant.inputs, inputs)
        checks.dropout(dropout_p, seed)
        checks.tensors(self.variant, self._kind(q), {"q": q, "k": k, "v": v}, 3, "(rows, heads, head_dim)")
        checks.packed(q, k, v, cu_q, cu_k)
        checks.sink(self.variant, sink, q.shape[1], q.device)
        lengths = []
        for name, given_max, cu, rows in (("max_seqlen_q", max_q, cu_q, q.shape[0]), ("max_seqlen_k", max_k, cu_k, k.shape[0])):
            if given_max is not None and (isinstance(given_max, bool) or not isinstance(given_max, int) or given_max < 0):
                raise VariantError(f"{name}={given_max!r}: a non-negative integer or None.")
            bound = rows if given_max is None else min(given_max, rows)
            lengths.append(checks.longest(name, cu, given_max) if checks.readable(cu) else bound)
        traced, captures = self._captured(self._traced(given), given, q.device)
        for capture in traced.captures:
            if {"Q", "K"} & {x for x in capture.expect or () if isinstance(x, str)}:
                raise ShapeError("from_dense and a bias with query or key dimensions do not fit packed sequences: use a function of b, q_idx and kv_idx.")
        sizes = {"B": cu_q.shape[0] - 1, "H": q.shape[1], "Q": lengths[0], "K": lengths[1]}
        checks.captures(traced.captures, captures, sizes, q.device)
        checks.spanned(traced.spanned, captures, sizes)
        call = Call(q, k, v, sink, None, cu_q, cu_k, captures, list(traced.floats), list(traced.ints), self._scale(q), lengths[0], lengths[1])
        return _dropping(call, dropout_p, seed), traced

    def _attend(self, call: Call, traced: Traced, layout: str, max_scores: bool) -> tuple[Tensor, Tensor, Tensor]:
        form = _form_text(traced, call.captures)
        return ops.attend(call, traced.score_slots, lambda learned: self._handle(form, layout, max_scores, learned), self.is_deterministic())

    def is_deterministic(self) -> bool:
        """Whether gradients must be bitwise repeatable, now."""
        return torch.are_deterministic_algorithms_enabled() if self.deterministic is None else self.deterministic

    def _scale(self, q: Tensor) -> float:
        return float(q.shape[-1]) ** -0.5 if self.variant.scale is None else self.variant.scale

    def _kind(self, q: Any) -> str:
        if isinstance(q, Tensor) and q.device.type not in ("cpu", "cuda"):
            raise checks.DeviceError(f"q is on {q.device}: CPU and CUDA tensors are supported.")
        return q.device.type if isinstance(q, Tensor) else "cpu"

    def _choose(self, form: Any, problem: Problem, target: Target) -> Plan:
        return pipeline.planned(form, problem, target, self.family, dict(self.forced) if self.forced else None, use_records=self.tune is not False)

    def _describe(self, which: str, q: Any, k: Any, v: Any, call: dict[str, Any]) -> tuple[Any, Problem, Target]:
        """Form, Problem and Target that a call with these arguments has; no tensors: a bfloat16 problem of DEFAULT_LENGTH."""
        if which not in ("forward", "backward"):
            raise VariantError(f"which={which!r}: 'forward' or 'backward'.")
        if q is None:
            traced = self._traced(call.get("inputs") or {})
            dims = self.variant.head_dim or (DEFAULT_HEAD_DIM, DEFAULT_HEAD_DIM)
            slots = tuple(n for n in traced.score_slots if (t := traced.captures[n].tensor) is not None and t.requires_grad)
            target = targets.parse(self.target) if self.target else self._present()
            size = size_class(DEFAULT_LENGTH, DEFAULT_LENGTH)
            scale = float(dims[0]) ** -0.5 if self.variant.scale is None else self.variant.scale
            fields = static_bounds(traced.form, traced.floats, scale) if which == "forward" else {"capture_grads": slots}
            sign = (scale > 0) - (scale < 0)
            return traced.form, Problem("bfloat16", *dims, which=which, sink=self.variant.sink, scale_sign=sign, size=size, **fields), target
        made, traced, handle = self._call(q, k, v, call)
        target = targets.parse(self.target) if self.target else calls.resolve_target(None, made.q.device)
        form = Form.parse(handle.form)
        made = calls.prepared(made)
        aligned = calls.strides_aligned((made.q, made.k, made.v)) and not any(t.data_ptr() % 16 for t in (made.q, made.k, made.v))
        if which == "forward":
            form, made, _ = calls.packed_heads(form, made)
            return form, calls.forward_problem(handle, made, aligned), target
        wants, learned = _wanted(made, traced)
        low = made.q if learned and made.q.element_size() == 2 else made.q.new_empty(0)
        return form, calls.backward_problem(handle, made, Backward(made.q, None, made.q, low, made.q, wants, learned, self.is_deterministic()), aligned), target

    def _call(self, q: Any, k: Any, v: Any, call: dict[str, Any]) -> tuple[Call, Traced, Handle]:
        """The call that these arguments make, of ``kernel(...)`` or of ``kernel.varlen(...)``, and the name of its kernels."""
        varlen = "cu_seqlens_q" in call
        wanted = checks.aux(call.pop("return_aux", False))
        layout = call.pop("layout", "bhld")
        keys = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k") if varlen else ("seqlens_k",)
        common = [call.pop("sink", None), call.pop("inputs", None), call.pop("dropout_p", 0.0), call.pop("seed", None)]
        first = [call.pop(n, None) for n in keys]
        if call:
            raise VariantError(f"unknown arguments {', '.join(call)}.")
        if varlen:
            made, traced = self._packed(q, k, v, first[0], first[1], first[2], first[3], *common)
        else:
            made, traced = self._dense(q, k, v, first[0], *common, layout=layout)
        learned = any(made.captures[n].requires_grad for n in traced.score_slots)
        form = _form_text(traced, made.captures)
        name = ("varlen" if varlen else "dense", True, "max_scores" in wanted, learned, self.target, self.family, self.forced, self.tune)
        return made, traced, Handle(form, *name)

    def tunable(self, q: Any, k: Any, v: Any, call: dict[str, Any]) -> tuple[str, Call, list[bool], list[int]]:
        """For the autotuner: the handle and the Call of these arguments; which of dq, dk, dv and which captured gradients a backward computes."""
        made, traced, handle = self._call(q, k, v, dict(call))
        return handle.text, made, *_wanted(made, traced)

    @staticmethod
    def _shapes(q: Any, k: Any, problem: Problem, call: Mapping[str, Any]) -> tuple[Shape, ...]:
        """What a prediction is made for: one batch, or batches of like packed sequences, whose offsets are read wherever they lie."""
        if q is None:
            return (Shape(1, 16, 16 // problem.group, DEFAULT_LENGTH, DEFAULT_LENGTH),)
        if problem.layout == "varlen":
            q_lens, k_lens = (call[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
            return Shape.of_packed(q_lens, k_lens, q.shape[1], k.shape[1]) or (Shape(0, q.shape[1], k.shape[1], 0, 0),)
        q, k = (t.transpose(1, 2) if call.get("layout") == "blhd" else t for t in (q, k))
        packed = q.shape[1] // k.shape[1] if k.shape[1] and problem.group == 1 else 1  # a decoding step's heads as rows
        return (Shape(q.shape[0], q.shape[1] // packed, k.shape[1], q.shape[2] * packed, k.shape[2]),)

    def _present(self) -> Target:
        return targets.detect(torch.cuda.current_device()) if torch.cuda.is_available() else targets.detect_cpu()

    def __repr__(self) -> str:
        return f"Kernel({self.variant!r}, target={self.target!r})"


def _wanted(made: Call, traced: Traced) -> tuple[list[bool], list[int]]:
    """The gradients of q, k and v that a backward computes (all, where nothing requires grad), and the captures whose gradient it computes."""
    wants = [t.requires_grad for t in (made.q, made.k, made.v)]
    slots = [n for n in traced.score_slots if made.captures[n].requires_grad]
    return wants if any(wants) or slots else [True] * 3, slots


@dynamo.constant
def _handle_text(
    form: str, layout: str, max_scores: bool, out_low: bool, target: str | None, family: str | None, forced: tuple | None, tune: bool | None
) -> str:  # fmt: skip
    return Handle(form, layout, True, max_scores, out_low, target, family, forced, tune).text


def _form_text(traced: Traced, captures: list[Tensor]) -> str:
    """The form's text for captures stored as they are now: another floating dtype (``module.half()``) is another kernel, not another trace."""
    if not captures:
        return traced.form.text
    dtypes = tuple([dtype_name(t.dtype) for t in captures])
    return traced.form.text if dtypes == tuple([c.dtype for c in traced.captures]) else _with_dtypes(traced.form.text, dtypes)


@dynamo.constant
def _with_dtypes(form: str, dtypes: tuple[str, ...]) -> str:
    return _with_dtypes_text(form, dtypes)


@lru_cache(maxsize=1024)
def _with_dtypes_text(form: str, dtypes: tuple[str, ...]) -> str:
    return Form.parse(form).with_dtypes(dtypes).text


def _dropping(call: Call, p: float, seed: int | None) -> Call:
    """The call with its dropout. The seed is a tensor on q's device, so that a captured graph draws anew at each replay."""
    return call._replace(seed=calls.seed_tensor(seed, call.q.device), dropout_p=float(p)) if p else call


def _autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Under autocast, q, k and v take its dtype (float64 stays); captured tensors keep theirs."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return q, k, v  # the checks tell
    if q.device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v
