"""Loop bounds: the keys that a tile of query rows can see (and the rows that a tile of keys can be seen by) from the mask's affine predicates.

Form + axis -> Bounds, a small tree of one-sided limits. Example: for ``causal`` and axis "k" the upper limit is floor(q + kv_len - q_len).
sympy extracts the coefficient of the axis; the rest is extremised over the tile by interval rules (see ``interval``). sympy's inequality solvers
are not used: they gave a wrong answer on an ``Or`` and fail on floor division.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .form import Form
from .interval import Evaluator, Spans, may_wrap
from .language import BOOL, FLOATS, INT, LONG

MAX_TERMS = 64  # of one sum, and
MAX_RANGES = 4  # of one row of tiles; what would take more is walked as its hull, tile by tile
MAX_STEPS = 64  # inequalities of one comparison (nested minima); beyond, planning would take longer than the tiles it saves
_FLIP = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class Limit:
    """axis <= floor(rest / divisor) (upper) or axis >= ceil(rest / divisor) (lower); rest is a sum of coefficient * node, plus a constant."""

    upper: bool
    terms: tuple[tuple[int, int], ...]  # (coefficient, node)
    constant: int
    divisor: int
    guards: tuple[int, ...] = ()  # nodes of the comparison that must not wrap around, or there is no limit


@dataclass(frozen=True)
class Gate:
    """A condition that the axis does not enter: everything where the node can be true (false, for ``wanted`` False) on the tile, else nothing."""

    node: int
    wanted: bool


@dataclass(frozen=True)
class Listed:
    """Explicit blocks: the axis lies in a block of ``size`` whose entry of a captured tensor is not 0. ``node`` is the load, ``place`` the axis' dimension in
    it and ``line`` that of the other axis, -1 if the tensor has none; size 1 means entries of their own."""

    node: int
    place: int
    line: int
    size: int


@dataclass(frozen=True)
class All:
    """Every bound holds (a conjunction); the empty one bounds nothing."""

    parts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Any_:
    """At least one holds: the hull of the parts. The dual of All; the name `Any` is typing's."""

    parts: tuple[Any, ...]


UNBOUNDED = All()


class _Extractor:
    def __init__(self, form: Form, axis: str):
        self.form, self.axis, self.wraps = form, axis, may_wrap(form)
        self.linear: dict[int, Any] = {}
        self.steps = 0  # inequalities met in one comparison

    def bounds(self, i: int, positive: bool = True) -> Any:
        node = self.form.nodes[i]
        match node.op:
            case "not":
                return self.bounds(node.args[0], not positive)
            case "and" | "or":
                parts = tuple(self.bounds(a, positive) for a in self._operands(i))
                if (node.op == "and") == positive:
                    kept = tuple(p for p in parts if p != UNBOUNDED)
                    return kept[0] if len(kept) == 1 else All(kept)
                return UNBOUNDED if UNBOUNDED in parts else Any_(parts)
            case _ if self.axis not in self.form.depends[i]:
                return Gate(i, positive)
            case "le" | "lt" | "ge" | "gt" | "eq" | "ne":
                if node.op in ("eq", "ne") and (listed := self._not_zero(node, positive)) != UNBOUNDED:
                    return listed
                if any(self.form.nodes[a].type not in (INT, LONG) for a in node.args):
                    return UNBOUNDED
                op: str = node.op
                if not positive:
                    op = _FLIP[op]
                self.steps = 0
                guards = tuple(sorted(self.wraps & self.form.reachable(i))) if self.wraps else ()
                return _guarded(self.compare(op, self.affine(node.args[0]), self.affine(node.args[1])), guards)
            case "load" if positive and node.type == BOOL:
                return self.listed(i)
            case "cast" if node.type == BOOL:
                return self.bounds(node.args[0], positive)
        return UNBOUNDED

    def listed(self, i: int) -> Any:
        """A load as explicit blocks: its last dimensions indexed by q // size and k // size, nothing before them by either."""
        node, axes = self.form.nodes[i], frozenset("qk")
        if node.op != "load" or node.type not in (BOOL, INT, LONG):
            return UNBOUNDED
        places = [n for n, a in enumerate(node.args) if self.axis in self.form.depends[a]]
        lines = [n for n, a in enumerate(node.args) if axes & self.form.depends[a] and n not in places]
        if len(places) != 1 or len(lines) > 1:
            return UNBOUNDED
        index = self.form.nodes[node.args[places[0]]]
        while index.op == "cast":
            index = self.form.nodes[index.args[0]]
        size = 1
        if index.op == "floordiv" and self.form.nodes[index.args[1]].op == "const":
            size, index = self.form.nodes[index.args[1]].data, self.form.nodes[index.args[0]]
        return Listed(i, places[0], lines[0] if lines else -1, size) if index.op == self.axis and size > 0 else UNBOUNDED

    def _not_zero(self, node: Any, positive: bool) -> Any:
        """``entry == c`` with a constant c > 0, or ``entry != 0`` of entries that are never negative: the entry, or the largest of several, is not 0."""
        entry, other = node.args if self.form.nodes[node.args[1]].op == "const" else reversed(node.args)
        constant = self.form.nodes[other]
        equal = (node.op == "eq") == positive
        if constant.op != "const" or constant.type in FLOATS or (constant.data <= 0 if equal else constant.data != 0):
            return UNBOUNDED
        while self.form.nodes[entry].op == "cast" and self.form.nodes[entry].type in (INT, LONG):
            entry = self.form.nodes[entry].args[0]
        load = self.form.nodes[entry]
        unsigned = load.op == "load" and self.form.captures[load.data].dtype in ("bool", "uint8")
        return self.listed(entry) if equal or unsigned else UNBOUNDED

    def _operands(self, i: int) -> list[int]:
        """The operands of nested nodes of one operation, left to right: a long chain of | is one union."""
        op, found, todo = self.form.nodes[i].op, [], [i]
        while todo:
            j = todo.pop()
            if self.form.nodes[j].op == op:
                todo.extend(reversed(self.form.nodes[j].args))
            else:
                found.append(j)
        return found

    def affine(self, i: int) -> Any:
        """The node as a sympy sum; what is not +, - or a product with a constant becomes an opaque symbol ``n<i>``."""
        todo = [i]  # a stack of its own: long sums would exhaust Python's
        while todo:
            missing = [a for a in self._summed(todo[-1]) if a not in self.linear]
            if missing:
                todo += missing
            else:
                j = todo.pop()
                if j not in self.linear:
                    self.linear[j] = self._sum(j)
        return self.linear[i]

    def _summed(self, i: int) -> tuple[int, ...]:
        """The arguments that the sum of a node is made of."""
        node = self.form.nodes[i]
        kinds = {self.form.nodes[a].type for a in node.args}
        constant = any(self.form.nodes[a].op == "const" for a in node.args)
        sums = node.op in ("add", "sub", "neg") or (node.op == "mul" and constant) or (node.op == "cast" and node.type in (INT, LONG))
        return node.args if sums and kinds <= {INT, LONG} else ()

    def _sum(self, i: int) -> Any:
        import sympy

        node, opaque = self.form.nodes[i], sympy.Symbol(f"n{i}", integer=True)
        if node.op == "const" and node.type not in FLOATS:
            return sympy.Integer(int(node.data))
        match node.op, [self.linear[a] for a in self._summed(i)]:
            case "add", [a, b]:
                total = a + b
            case "sub", [a, b]:
                total = a - b
            case "neg", [a]:
                total = -a
            case "mul", [a, b]:
                total = a * b
            case "cast", [total]:
                pass
            case _:
                return opaque
        total = sympy.expand(total)
        return total if len(total.args) <= MAX_TERMS else opaque

    def compare(self, op: str, a: Any, b: Any) -> Any:
        match op:
            case "le":
                return self.at_most(a - b)
            case "lt":
                return self.at_most(a - b + 1)
            case "ge":
                return self.at_most(b - a)
            case "gt":
                return self.at_most(b - a + 1)
            case "eq":
                parts = tuple(p for p in (self.at_most(a - b), self.at_most(b - a)) if p != UNBOUNDED)
                return parts[0] if len(parts) == 1 else All(parts)
            case "ne":
                return self._either(self.at_most(a - b + 1), self.at_most(b - a + 1))
        return UNBOUNDED

    def _node(self, symbol: Any) -> int:
        return int(symbol.name[1:])

    def at_most(self, expression: Any) -> Any:
        """expression <= 0 as bounds of the axis."""
        import sympy

        self.steps += 1
        if self.steps > MAX_STEPS:
            return UNBOUNDED
        expression = sympy.expand(expression)
        moving = [x for x in expression.free_symbols if self.axis in self.form.depends[self._node(x)]]
        if len(moving) != 1 or not sympy.Poly(expression, moving[0]).is_linear:
            return UNBOUNDED
        symbol = moving[0]
        coefficient, rest = int(expression.coeff(symbol, 1)), expression.coeff(symbol, 0)
        node = self.form.nodes[self._node(symbol)]
        if node.op == self.axis:
            return self._limit(coefficient, rest)
        # c * f(axis) + rest <= 0 for the functions that invert into sums
        arguments = [self.affine(a) for a in node.args] if node.op in ("abs", "floordiv", "minimum", "maximum") else []
        match node.op:
            case "abs" if coefficient > 0:  # |u| <= x: u <= x and -u <= x
                return self._both(self.at_most(coefficient * arguments[0] + rest), self.at_most(-coefficient * arguments[0] + rest))
            case "abs":  # |u| >= x: u >= x or -u >= x
                return self._either(self.at_most(coefficient * arguments[0] + rest), self.at_most(-coefficient * arguments[0] + rest))
            case "maximum" | "minimum":
                combine = self._both if (node.op == "maximum") == (coefficient > 0) else self._either
                return combine(*(self.at_most(coefficient * u + rest) for u in arguments))
            case "floordiv" if arguments[1].is_Integer and arguments[1] > 0 and abs(coefficient) == 1:
                divisor = arguments[1]
                if coefficient > 0:  # u // c <= e  <=>  u <= c * e + c - 1
                    return self.at_most(arguments[0] + divisor * rest - divisor + 1)
                return self.at_most(-arguments[0] + divisor * rest)  # u // c >= e  <=>  u >= c * e
        return UNBOUNDED

    def _both(self, *parts: Any) -> Any:
        kept = tuple(p for p in parts if p != UNBOUNDED)
        return kept[0] if len(kept) == 1 else All(kept)

    def _either(self, *parts: Any) -> Any:
        return UNBOUNDED if UNBOUNDED in parts else Any_(parts)

    def _limit(self, coefficient: int, rest: Any) -> Any:
        """coefficient * axis + rest <= 0."""
        import sympy

        sign = -1 if coefficient > 0 else 1
        terms, constant = [], 0
        for symbol, factor in sorted(sympy.expand(sign * rest).as_coefficients_dict().items(), key=lambda item: str(item[0])):
            if symbol == 1:
                constant = int(factor)
            elif symbol.is_Symbol and factor.is_Integer:
                terms.append((int(factor), self._node(symbol)))
            else:
                return UNBOUNDED  # a product of two unknowns
        return Limit(coefficient > 0, tuple(sorted(terms, key=lambda t: t[1])), constant, abs(coefficient))


def _guarded(bounds: Any, guards: tuple[int, ...]) -> Any:
    if isinstance(bounds, Limit):
        return replace(bounds, guards=guards)
    if isinstance(bounds, (Gate, Listed)):
        return bounds
    return type(bounds)(tuple(_guarded(p, guards) for p in bounds.parts))


def axis_bounds(form: Form, axis: str) -> Any:
    """Bounds of ``axis`` ("k" or "q") that hold wherever the mask is true."""
    return _Extractor(form, axis).bounds(form.mask) if form.mask >= 0 else UNBOUNDED


def several(bounds: Any) -> tuple[Any, ...]:
    """The bounds as a union of at most MAX_RANGES parts that may leave holes between them, each one range of the axis.

    Example: ``causal & (sliding_window(left=9) | first keys)`` has two, ``causal | first keys``, which both begin at 0, has one.
    """
    found = list(_disjuncts(bounds))
    for side in (True, False):  # ranges that are open on the same side are one
        same = [part for part in found if _sides(part) == {side}]
        if len(same) > 1:
            found = [part for part in found if part not in same] + [Any_(tuple(same))]
    bounded = [part for part in found if _sides(part)]  # the others are everything or nothing
    return tuple(found) if len(bounded) > 1 else (bounds,)


def limited(bounds: Any) -> bool:
    """Whether the bounds hold any but explicit blocks."""
    return any(limited(p) for p in bounds.parts) if isinstance(bounds, (All, Any_)) else not isinstance(bounds, Listed)


def lists(part: Any) -> tuple[Listed, ...]:
    """The explicit blocks that a part of ``several`` lies in."""
    match part:
        case Listed():
            return (part,)
        case All(parts):
            return tuple(x for p in parts for x in lists(p))
    return ()


def _sides(bounds: Any) -> set[bool]:
    """Of which limits (upper: True) a part is made."""
    match bounds:
        case Limit(upper):
            return {upper}
        case Gate():
            return set()
        case Listed():
            return {True, False}
    return set().union(*(_sides(p) for p in bounds.parts))


def _disjuncts(bounds: Any) -> tuple[Any, ...]:
    match bounds:
        case Any_(parts):
            found = tuple(d for p in parts for d in _disjuncts(p))
            return found if len(found) <= MAX_RANGES else (bounds,)
        case All(parts):
            products: list[tuple[Any, ...]] = [()]
            for p in parts:
                choices = _disjuncts(p)
                choices = choices if len(products) * len(choices) <= MAX_RANGES else (p,)
                products = [(*chosen, c) for chosen in products for c in choices]
            return tuple(All(chosen) for chosen in products)
    return (bounds,)


def axis_span(bounds: Any, evaluator: Evaluator, spans: Spans) -> Any:
    """The span of the axis inside the bounds, as a handle of the backend; empty when lo > hi."""
    match bounds:
        case Limit(upper, terms, constant, divisor, guards):
            total = None
            for factor, node in sorted(terms, reverse=True):
                term = evaluator.as_integer(node)
                if total is not None and factor == -1:
                    total = spans.call("span_sub", total, term)
                    continue
                term = term if factor == 1 else spans.call("span_mul", spans.integer(factor), term)
                total = term if total is None else spans.call("span_add", total, term)
            if constant or total is None:
                total = spans.integer(constant) if total is None else spans.call("span_add", total, spans.integer(constant))
            if divisor != 1:
                total = spans.call("span_floordiv" if upper else "span_ceildiv", total, spans.integer(divisor))
            total = spans.call("span_below" if upper else "span_above", total)
            for node in guards:
                total = spans.call("span_guard", total, evaluator.as_integer(node))
            return total
        case Listed():
            return spans.call("span_unknown")
        case Gate(node, wanted):
            truth = evaluator.span(node)
            return spans.call("span_if", truth if wanted else spans.call("truth_not", truth))
        case All(parts):
            total = axis_span(parts[0], evaluator, spans) if parts else spans.call("span_unknown")
            for part in parts[1:]:
                total = spans.call("span_meet", total, axis_span(part, evaluator, spans))
            return total
        case Any_(parts):
            total = axis_span(parts[0], evaluator, spans)
            for part in parts[1:]:
                total = spans.call("span_join", total, axis_span(part, evaluator, spans))
            return total
    raise TypeError(bounds)
