"""Variant: what a user describes; masks composed with ``& | ~``, scores chained with ``>>``.

Python functions -> Variant -> Traced (Form + captures). Example::

    Variant(head_dim=128, mask=causal & sliding_window(left=1023, right=0), score=softcap(30.0))
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from . import language as lang
from .capture import tracer
from .errors import FlashgenError, ShapeError, VariantError
from .form import Traced, linearise

MAX_HEAD_DIM = 576
MAX_TRACES = 64  # kept per variant, one for each dtype and broadcast pattern of its inputs


def _check_arity(function: Any, count: int, what: str, signature: str) -> None:
    if type(function).__module__.startswith("torch.jit"):
        raise VariantError(f"a {what} compiled by torch.jit takes tensors only: pass the plain function {signature}.")
    if not callable(function):
        raise VariantError(f"a {what} must be a function {signature} or an object of the catalogue, not {type(function).__name__}.")
    if getattr(function, "__module__", "") == "flashgen.catalogue" and inspect.isfunction(function) and "<" not in function.__qualname__:
        raise VariantError(f"{function.__name__} is a factory: call it, {function.__name__}({', '.join(inspect.signature(function).parameters)}).")
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        name = getattr(function, "__name__", function)
        raise VariantError(f"the {what} function {name!r} must take {signature}; further parameters need defaults.") from None
    except ValueError:  # a builtin without a signature
        return


class Mask:
    """A mask function ``f(b, h, q_idx, kv_idx) -> bool`` that composes: ``a & b``, ``a | b``, ``~a``. It is itself callable in other functions."""

    def __init__(self, function: Callable[..., Any], name: str = "", chain: tuple[str, tuple[Callable[..., Any], ...]] = ("", ())):
        _check_arity(function, 4, "mask", "f(b, h, q_idx, kv_idx)")
        self.chain = chain  # its operator and operands: a thousand masks are one loop, not a thousand nested calls
        self.function, self.name = function, name or getattr(function, "__name__", "mask")

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(b, h, q_idx, kv_idx)

    def __and__(self, other: Any) -> Mask:
        other = as_mask(other)
        parts = (*_operands(self, "&"), *_operands(other, "&"))

        def every(b: Any, h: Any, q: Any, k: Any) -> Any:
            result = parts[0](b, h, q, k)
            for part in parts[1:]:
                result = lang.logical_and(result, part(b, h, q, k))
            return result

        return Mask(every, f"({self.name} & {other.name})", ("&", parts))

    def __or__(self, other: Any) -> Mask:
        other = as_mask(other)
        parts = (*_operands(self, "|"), *_operands(other, "|"))

        def some(b: Any, h: Any, q: Any, k: Any) -> Any:
            result = parts[0](b, h, q, k)
            for part in parts[1:]:
                result = lang.logical_or(result, part(b, h, q, k))
            return result

        return Mask(some, f"({self.name} | {other.name})", ("|", parts))

    def __invert__(self) -> Mask:
        return Mask(lambda b, h, q, k: lang.logical_not(self.function(b, h, q, k)), f"~{self.name}")

    def __rand__(self, other: Any) -> Mask:
        return as_mask(other) & self

    def __ror__(self, other: Any) -> Mask:
        return as_mask(other) | self

    def __bool__(self) -> bool:
        raise VariantError("a mask has no truth value: compose masks with & | ~, not with and, or, not.")

    def __repr__(self) -> str:
        return f"Mask({self.name})"


def _operands(mask: Mask, operator: str) -> tuple[Callable[..., Any], ...]:
    return mask.chain[1] if mask.chain[0] == operator else (mask.function,)


class Score:
    """A score function ``f(score, b, h, q_idx, kv_idx) -> score`` that chains: ``a >> b`` applies a first. ``mask`` is what it also masks (bias)."""

    def __init__(self, function: Callable[..., Any], name: str = "", mask: Mask | None = None):
        _check_arity(function, 5, "score", "f(score, b, h, q_idx, kv_idx)")
        self.function, self.name, self.mask = function, name or getattr(function, "__name__", "score"), mask

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(score, b, h, q_idx, kv_idx)

    def __rshift__(self, other: Any) -> Score:
        other = as_score(other)
        masks = [m for m in (self.mask, other.mask) if m is not None]
        both = masks[0] & masks[1] if len(masks) == 2 else (masks[0] if masks else None)
        return Score(lambda s, b, h, q, k: other.function(self.function(s, b, h, q, k), b, h, q, k), f"{self.name} >> {other.name}", both)

    def __rrshift__(self, other: Any) -> Score:
        return as_score(other) >> self

    def __bool__(self) -> bool:
        raise VariantError("a score has no truth value: chain scores with >>, not with and, or, not.")

    def __repr__(self) -> str:
        return f"Score({self.name})"


def as_mask(x: Any) -> Mask:
    if isinstance(x, Score):
        raise VariantError(f"{x!r} is a score, given where a mask is wanted: pass it as score=.")
    return x if isinstance(x, Mask) else Mask(x)


def as_score(x: Any) -> Score:
    if isinstance(x, Mask):
        raise VariantError(f"{x!r} is a mask, given where a score is wanted: pass it as mask=.")
    return x if isinstance(x, Score) else Score(x)


mask, score = as_mask, as_score  # the public names; both serve as decorators


class Variant:
    """An attention variant.

    head_dim: int, or ``(head_dim_qk, head_dim_v)``, each 1..576; None takes it from the tensors.
    mask, score: catalogue objects or plain functions. scale: any float (default ``head_dim_qk ** -0.5``).
    sink: a learned extra logit per query head joins the softmax denominator; ``kernel(..., sink=tensor)`` gives it.
    Raises VariantError for anything that cannot be traced, ShapeError for a head dim out of range.
    """

    plain: Traced  # the trace of a variant without inputs

    def __init__(self, head_dim: int | tuple[int, int] | None = None, mask: Any = None, score: Any = None, scale: float | None = None, sink: bool = False):
        self.head_dim = _head_dims(head_dim)
        self.scale = _scale(scale)
        if not isinstance(sink, bool):
            raise VariantError(f"Variant(sink={type(sink).__name__}): sink is True or False; the tensor is given at each call, kernel(q, k, v, sink=tensor).")
        self.sink = sink
        self.mask = None if mask is None else as_mask(mask)
        self.score = None if score is None else as_score(score)
        self._traced: dict[Any, Traced] = {}
        self._sized: tuple[str, ...] = ()  # inputs whose sizes Python consumed
        self.inputs: dict[str, int] = {}  # names of flashgen.input -> ndim
        self.volatile = False  # whether the functions read values of tensors into Python: they are traced at each call
        try:
            self.plain = self.trace({})
        except VariantError:
            if not self.inputs:  # else dtypes and sizes are not known yet: a call's own trace will tell
                raise

    def trace(self, inputs: dict[str, Any]) -> Traced:
        """Form and captures; ``inputs`` are the tensors of this call's ``flashgen.input`` names (their dtypes and sizes of 1 decide the form)."""
        found = None if self.volatile else self._traced.get(self._key(inputs))
        if found is None:
            found = self._trace(inputs)
            if len(self._traced) >= MAX_TRACES:
                self._traced.clear()
            self._traced[self._key(inputs)] = found
        return found

    def renewed(self, inputs: dict[str, Any]) -> Traced:
        """A new trace, since a captured tensor has another type, rank or broadcast pattern than it had; later calls find this one."""
        if self.mask is None and self.score is None:
            raise VariantError("a captured tensor changed its dtype or shape after the kernel was pickled or copied: make its Variant anew.")
        found = self._traced[self._key(inputs)] = self._trace(inputs)
        if not self.inputs:
            self.plain = found
        return found

    def _key(self, inputs: dict[str, Any]) -> tuple:
        sizes = lambda name, t: tuple(t.shape) if name in self._sized else tuple(n == 1 for n in t.shape)  # noqa: E731
        return tuple(sorted((name, lang.dtype_name(t.dtype), sizes(name, t)) for name, t in inputs.items()))

    def _trace(self, inputs: dict[str, Any]) -> Traced:
        score, mask = self.score, self.mask
        if score is not None and score.mask is not None:
            mask = score.mask if mask is None else mask & score.mask
        s = m = None
        errors = []
        tracer.read = False
        with lang.tracing(inputs) as captures:
            for what in ("score", "mask"):  # both, so that all inputs are met even if one fails
                try:
                    if what == "score" and score is not None:
                        s = lang.cast(lang.trace(score, (lang.S, lang.B, lang.H, lang.Q, lang.K), what="score"), lang.REAL)
                    if what == "mask" and mask is not None:
                        m = _condition(lang.trace(mask, (lang.B, lang.H, lang.Q, lang.K), what="mask"))
                except FlashgenError as error:
                    errors.append(error)
        named = [c for _, c in captures if c.name is not None]
        self.inputs |= {str(c.name): c.ndim for c in named}
        if errors:
            missing = sorted(str(c.name) for c in named if c.shape is None)
            if missing:
                raise VariantError(f"{errors[0]} (flashgen.input {', '.join(missing)}: float32 of unknown sizes until given, pass inputs=)") from errors[0]
            raise errors[0]
        self.volatile |= tracer.read
        self._sized = tuple(sorted({*self._sized, *(str(c.name) for c in named if c.consumed)}))
        traced = linearise(s, m, sink=self.sink)
        for _, capture in captures:
            if capture.recipe is not None and capture not in traced.captures:
                capture.tensor = None  # an intermediate: made anew at each call
        return traced

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        if not self.inputs and not self.volatile:  # traced for good: user functions (lambdas too) need not travel
            state["mask"] = state["score"] = None
        return state

    def __repr__(self) -> str:
        return f"Variant(head_dim={self.head_dim}, mask={self.mask}, score={self.score}, scale={self.scale}, sink={self.sink})"


def _condition(m: lang.Expr) -> lang.Expr | None:
    """What a mask function returned as a bool; None where it is always true."""
    if m.kind in lang.FLOATS:
        raise VariantError(
            "the mask function returned a floating point value: it must return a condition. Compare it (x > 0) or make its table bool "
            "(a mask selects; add a bias as a score)."
        )
    m = lang.truth(m)
    return None if m.op == "const" and m.data else m


def _head_dims(head_dim: Any) -> tuple[int, int] | None:
    if head_dim is None:
        return None
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    if len(dims) != 2 or not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        meant = " Did you mean mask= or score=?" if any(callable(d) for d in dims) else ""
        raise VariantError(f"head_dim={head_dim!r}: an int, a pair (head_dim_qk, head_dim_v), or None.{meant}")
    for d in dims:
        if not 1 <= d <= MAX_HEAD_DIM:
            raise ShapeError(f"head_dim={d}: the limit is 1..{MAX_HEAD_DIM} (value dim split by columns) on cpu and sm80, 256 on sm90. Split the heads.")
    return dims


def _scale(scale: Any) -> float | None:
    if scale is None:
        return None
    if getattr(scale, "requires_grad", False):
        raise VariantError("scale is a tensor that requires grad: it would get none. Multiply q by it, or multiply the score with it in a score function.")
    try:
        if isinstance(scale, (str, bytes, bytearray)):
            raise TypeError
        value = float(scale)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise VariantError(f"scale={scale!r}: any finite float, or None for head_dim_qk ** -0.5.") from None
    if not math.isfinite(value):
        raise VariantError(f"scale={value}: must be finite.")
    return value
