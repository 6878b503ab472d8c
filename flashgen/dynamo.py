"""Tracing inside ``torch.compile``: a path that Dynamo inlines, so that captured tensors become inputs of the graph, with gradients.

Score and mask functions -> Inlined. Example: ``inlined(score, mask).form`` is the text of the same Form that ``Variant`` would give.
Plain Python on Expr only: no builtins are patched, nothing is memoised, tensors that are derived from captured ones are operations of the graph.
The text of the Form is made from constants, outside of what is inlined.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode

from . import language as lang
from .capture import tracer
from .expression import OPERATORS, Operand, call_named
from .form import linearise
from .variant import Mask, Score, _condition


def constant(function: Any) -> Any:
    """``torch.compiler.assume_constant_result``, which imports torch._dynamo (seconds, and sympy), reduced to the mark that it sets."""
    function._dynamo_marked_constant = True
    return function


class Inlined(NamedTuple):
    """A Traced whose Form is its text."""

    form: str
    captures: list[lang.Capture]
    floats: list[float]
    ints: list[int]
    score_slots: tuple[int, ...]
    spanned: tuple[tuple[int, int, str], ...]


def _pairwise(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def fold(*args: Any) -> Any:
        total = args[0]
        for a in args[1:]:
            total = function(total, a)
        return total

    return fold


_RULES: dict[Any, Callable[..., Any]] = {min: _pairwise(lang.minimum), max: _pairwise(lang.maximum)} | {
    getattr(operator, name): OPERATORS[f"__{name}__"] for name in ("invert", "lt", "le", "gt", "ge", "eq", "ne")
}


@constant
def _teach() -> None:
    """Dynamo (torch 2.13) has no rule for ``~``, ``min`` and ``max`` of an object, nor for its comparison with an integer that has become symbolic:
    give it ours, for traced values alone. Where Dynamo has changed so that this fails, those few are refused as before."""
    try:
        from torch._dynamo.variables.builder import SourcelessBuilder
        from torch._dynamo.variables.builtin import BuiltinVariable
        from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

        usual = BuiltinVariable.call_function
    except (ImportError, AttributeError):
        return
    if getattr(usual, "_knows_flashgen", False):
        return

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not kwargs and len(args) <= 2 and self.fn in _RULES:
            found = [a.realize() if hasattr(a, "realize") else a for a in args]
            if any(isinstance(a, UserDefinedObjectVariable) and isinstance(a.value, Operand) for a in found):
                return SourcelessBuilder.create(tx, _RULES[self.fn]).call_function(tx, found, {})
        return usual(self, tx, args, kwargs)

    call_function._knows_flashgen = True  # type: ignore[attr-defined]
    BuiltinVariable.call_function = call_function  # type: ignore[method-assign]


@constant
def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


class _Symbols(TorchFunctionMode):
    """Sees every torch function: those with a traced value among their arguments or indices build nodes."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        flat = [*args, *kwargs.values()]
        flat += [x for a in flat if isinstance(a, (tuple, list)) for x in a]
        if any(isinstance(a, Operand) for a in flat):
            return call_named(_name(func), args, kwargs)
        return func(*args, **kwargs)


def inlined(score: Callable[..., Any] | None, mask: Callable[..., Any] | None) -> Inlined:
    """Trace a score and a mask function where Dynamo is compiling."""
    own = score.mask if isinstance(score, Score) else None
    score, mask, own = _function(score), _function(mask), _function(own)
    if own is not None:
        mask = own if mask is None else _both(mask, own)
    _teach()
    # set, never read from outside: a read would become a guard on this state, which the graph's own end changes
    tracer.captures, tracer.inputs = [], {}
    try:
        s = None if score is None else lang.cast(_traced(score, (lang.S, lang.B, lang.H, lang.Q, lang.K), "score"), lang.REAL)
        m = None if mask is None else _condition(_traced(mask, (lang.B, lang.H, lang.Q, lang.K), "mask"))
    finally:
        tracer.captures, tracer.inputs = None, None
    graph = _Graph([], [], [], [])
    place: dict[int, int] = {}
    roots = (-1 if s is None else _flatten(s, graph, place), -1 if m is None else _flatten(m, graph, place))
    form, slots, spanned = _form(tuple(graph.nodes), roots, tuple([(c.dtype, c.ndim) for c in graph.captures]))
    return Inlined(form, graph.captures, graph.floats, graph.ints, slots, spanned)


def _function(x: Any) -> Any:
    """The function of a catalogue object: Dynamo of torch 2.11 asks a callable object for its truth value."""
    return x.function if isinstance(x, (Mask, Score)) else x


def _both(mask: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda b, h, q, k: lang.logical_and(mask(b, h, q, k), own(b, h, q, k))


def _traced(function: Callable[..., Any], leaves: tuple, what: str) -> lang.Expr:
    with _Symbols():
        result = function(*leaves)
        return lang.returned(result, what)


class _Graph(NamedTuple):
    """Expressions as constants, each (op, type, arguments, data) after its arguments, and what they hold besides: captures and numbers."""

    nodes: list[tuple]
    captures: list[lang.Capture]
    floats: list[float]
    ints: list[int]


def _flatten(root: lang.Expr, graph: _Graph, place: dict[int, int]) -> int:
    """Add an expression to the graph, in the order of ``linearise``; its number."""
    stack = [(root, False)]
    while stack:
        e, ready = stack.pop()
        if id(e) in place:
            continue
        if not ready:
            stack.append((e, True))
            for a in reversed(e.args):
                stack.append((a, False))
            continue
        data = e.data
        if e.op == "load":
            data = len(graph.captures)
            for n, c in enumerate(graph.captures):
                if c is e.data:
                    data = n
            if data == len(graph.captures):
                graph.captures.append(e.data)
        elif e.op == "number":
            numbers = graph.floats if e.kind in lang.FLOATS else graph.ints
            data = len(numbers)
            numbers.append(e.data)
        elif e.op == "const" and e.kind in (lang.INT, lang.LONG):
            data = range(e.data, e.data + 1)[0]  # an integer that has become symbolic is static here: a range makes Dynamo read it
        place[id(e)] = len(graph.nodes)
        graph.nodes.append((e.op, e.kind, tuple([place[id(a)] for a in e.args]), data))
    return place[id(root)]


@constant
def _form(nodes: tuple, roots: tuple[int, int], specs: tuple) -> tuple[str, tuple[int, ...], tuple[tuple[int, int, str], ...]]:
    """The canonical text, the score's slots and what is spanned of a graph: equal to what a trace outside of ``torch.compile`` gives."""
    captures = []
    for dtype, ndim in specs:
        captures.append(lang.Capture(ndim=ndim))
        captures[-1].dtype = dtype
    made: list[lang.Expr] = []
    for op, kind, args, data in nodes:
        made.append(lang.Expr(op, kind, tuple(made[a] for a in args), captures[data] if op == "load" else data))
    score, mask = (None if at < 0 else made[at] for at in roots)
    traced = linearise(score, mask)
    return traced.form.text, traced.score_slots, traced.spanned
