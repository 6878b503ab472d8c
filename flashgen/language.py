"""The tracing language: symbols b, h, q, k, s, with which FlexAttention-style functions are called once to build typed expressions.

Python function -> Expr. Example: ``(q - k <= 1023) & (k <= q)`` on symbols is an Expr of type bool. Nodes are ``expression``'s, what can be
done with them is in ``operations`` and ``functions``.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import functions  # noqa: F401 - completes FUNCTIONS
from .capture import BOOL, FLOATS, INT, LONG, REAL, SINGLE, STORAGE, Capture, dtype_name, is_tensor, known, tracer
from .errors import VariantError
from .expression import FUNCTIONS, Expr, Input, Operand, Vector, as_captured, call_torch, cast, const, input, is_in_place, wrap
from .operations import ROUNDING, UNARY_REAL, absolute, clamp, logical_and, logical_not, logical_or, lower, maximum, minimum, to, truth, where

B, H, Q, K, S = Expr("b", INT), Expr("h", INT), Expr("q", INT), Expr("k", INT), Expr("s", REAL)
q_len, kv_len, heads = Expr("q_len", INT), Expr("kv_len", INT), Expr("heads", INT)

# with these Python consumes the value of a tensor, which is then part of the trace
HOST_READS = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__")

_builtin_lock = threading.RLock()


@contextmanager
def _traced_builtins() -> Iterator[None]:
    """Python's min and max compare with ``if``; while tracing they build nodes for traced values and are the usual functions otherwise."""

    def pairwise(usual: Callable[..., Any], op: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            values = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            if len(values) > 1 and not kwargs and any(isinstance(a, Operand) for a in values):
                total = values[0]
                for a in values[1:]:
                    total = op(total, a)
                return total
            return usual(*args, **kwargs)

        return function

    with _builtin_lock:
        usual_min, usual_max = builtins.min, builtins.max
        builtins.min, builtins.max = pairwise(usual_min, minimum), pairwise(usual_max, maximum)
        try:
            yield
        finally:
            builtins.min, builtins.max = usual_min, usual_max


def _element(n: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)[n]


def _known(x: Any) -> Any:
    """Arguments of a recipe: tensors that were themselves derived stand as their Capture."""
    if isinstance(x, (tuple, list)) and type(x) in (tuple, list):
        return type(x)(map(_known, x))
    return (known(x) or x) if is_tensor(x) else x


def _remember(result: Any, recipe: tuple) -> None:
    from torch import Tensor

    if isinstance(result, Tensor):
        if tracer.captures is not None and known(result) is None:
            tracer.captures.append((result, Capture(result, recipe=recipe)))
    elif isinstance(result, (tuple, list)):
        function, args, kwargs = recipe
        for n, part in enumerate(result):
            _remember(part, (_element, (n, function, *args), kwargs))


def _capture_mode() -> Any:
    """Watches torch operations on real tensors inside a trace, so that what they make is derived anew at each call and never goes stale."""
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = kwargs or {}
            flat = [*args, *kwargs.values()]
            flat += [x for a in flat if isinstance(a, (tuple, list)) for x in a]
            if any(isinstance(a, Operand) for a in flat):
                return call_torch(func, args, kwargs)
            tensors = [a for a in flat if isinstance(a, Tensor)]
            if tensors and is_in_place(getattr(func, "__name__", "")):
                raise VariantError(f"{func.__name__} writes in place: score and mask functions are pure. Prepare the tensor outside the function.")
            if getattr(func, "__name__", "") == "__get__":  # a property such as t.T: its getter cannot be pickled, getattr can
                func, args, kwargs = getattr, (args[0], func.__self__.__name__), {}
            if tensors and getattr(func, "__name__", "") in HOST_READS:
                tracer.read = True
            result = func(*args, **kwargs)
            if tensors and not any(result is a for a in tensors):
                _remember(result, (func, _known(args), {n: _known(x) for n, x in kwargs.items()}))
            return result

    return Mode()


def trace(function: Callable[..., Any], leaves: Sequence[Expr], *, what: str) -> Expr:
    """Call a user's function with symbols; the result as an Expr. Errors of the user's own code pass through unchanged."""
    with _traced_builtins(), _capture_mode():
        result = function(*leaves)
    return returned(result, what)


def returned(result: Any, what: str) -> Expr:
    """What a user's score or mask function returned, as an Expr."""
    result = lower(result)
    if isinstance(result, Vector):
        raise VariantError(f"the {what} function returned a vector of {len(result.items)} values; it must return one value per (query, key) pair.")
    if result is None:
        raise VariantError(f"the {what} function returned None: it must return its {'new score' if what == 'score' else 'condition'}.")
    result = wrap(result)
    if what == "score" and result.kind == BOOL:
        raise VariantError("the score function returned a condition, not its new score: pass it as mask=, or write torch.where(condition, score, -math.inf).")
    return result


@contextmanager
def tracing(inputs: dict[str, Any]) -> Iterator[list[tuple[Any, Capture]]]:
    """One trace: captures are shared between its functions; ``inputs`` maps names of flashgen.input to tensors (or nothing, before any call)."""
    before = (tracer.captures, tracer.inputs)
    tracer.captures, tracer.inputs = [], inputs
    try:
        yield tracer.captures
    finally:
        tracer.captures, tracer.inputs = before


__all__ = [
    "BOOL", "FLOATS", "FUNCTIONS", "INT", "LONG", "REAL", "ROUNDING", "SINGLE", "STORAGE", "UNARY_REAL", "B", "Capture", "Expr", "H", "Input", "K", "Q", "S",
    "absolute", "as_captured", "cast", "clamp", "const", "dtype_name", "heads", "input", "is_tensor", "kv_len", "logical_and", "logical_not", "logical_or",
    "maximum", "minimum", "q_len", "returned", "to", "trace", "tracing", "truth", "where",
]  # fmt: skip
