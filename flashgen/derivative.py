"""Derivatives of the score: forward mode over the graph, so that a ``where`` selects the slope of the branch it takes and no 0 * NaN can arise.

Form -> Graph with slope nodes appended. Example: for soft-cap the slope is ``1 - t * t`` on the very node t = tanh(s / cap) of the value.
Rules at kinks follow torch: |x| has slope 0 at 0, maximum gives half to each side of a tie, clamp all to its input, relu none.
Every rule is checked against sympy.diff by the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .form import Form, Node
from .language import BOOL, FLOATS, REAL, SINGLE


class Graph:
    """The nodes of a form, growing; equal nodes are shared."""

    def __init__(self, form: Form):
        self.form = form
        self.nodes: list[Node] = list(form.nodes)
        self._index = {node.key: i for i, node in enumerate(self.nodes)}

    def make(self, op: str, *args: int | None, kind: str = REAL, data: object = None) -> int:
        """The node of an operation. Slopes are REAL: float32 parts of a float64 problem are converted, not mixed."""
        found = tuple(a for a in args if a is not None)
        return self._add(Node(op, kind, tuple(map(self._as_real, found)) if kind == REAL else found, data))

    def _as_real(self, i: int) -> int:
        return self._add(Node("cast", REAL, (i,))) if self.nodes[i].type == SINGLE else i

    def _add(self, node: Node) -> int:
        i = self._index.setdefault(node.key, len(self.nodes))
        if i == len(self.nodes):
            self.nodes.append(node)
        return i

    def const(self, value: float) -> int:
        return self.make("const", data=value)

    def extended(self) -> Form:
        """The same form with the appended nodes, for the printer."""
        f = self.form
        return Form(tuple(self.nodes), f.score, f.mask, f.captures, f.floats, f.ints, f.sink)


# op -> (graph, value node, argument nodes) -> partial derivative node for each argument, None for zero
_Partial = Callable[[Graph, int, tuple[int, ...]], tuple["int | None", ...]]


def _one_minus_square(g: Graph, v: int) -> int:
    return g.make("sub", g.const(1.0), g.make("mul", v, v))


def _power_slope(g: Graph, a: tuple[int, ...]) -> int:
    """y * x^(y - 1), and 0 for y = 0 even at x = 0, as in torch."""
    slope = g.make("mul", a[1], g.make("pow", a[0], g.make("sub", a[1], g.const(1.0))))
    return slope if g.nodes[a[1]].op == "const" else g.make("where", g.make("eq", a[1], g.const(0.0), kind=BOOL), g.const(0.0), slope)


def _exponent_slope(g: Graph, v: int, a: tuple[int, ...]) -> int:
    """x^y * log(x), and 0 at x = 0 for y >= 0, as in torch."""
    flat = g.make("and", g.make("eq", a[0], g.const(0.0), kind=BOOL), g.make("ge", a[1], g.const(0.0), kind=BOOL), kind=BOOL)
    return g.make("where", flat, g.const(0.0), g.make("mul", v, g.make("log", a[0])))


PARTIALS: dict[str, _Partial] = {
    "exp": lambda g, v, a: (v,),
    "exp2": lambda g, v, a: (g.make("mul", v, g.const(math.log(2))),),
    "expm1": lambda g, v, a: (g.make("add", v, g.const(1.0)),),
    "log": lambda g, v, a: (g.make("div", g.const(1.0), a[0]),),
    "log2": lambda g, v, a: (g.make("div", g.const(1 / math.log(2)), a[0]),),
    "log1p": lambda g, v, a: (g.make("div", g.const(1.0), g.make("add", a[0], g.const(1.0))),),
    "sqrt": lambda g, v, a: (g.make("div", g.const(0.5), v),),
    "rsqrt": lambda g, v, a: (g.make("div", g.make("mul", g.const(-0.5), v), a[0]),),
    "sin": lambda g, v, a: (g.make("cos", a[0]),),
    "cos": lambda g, v, a: (g.make("neg", g.make("sin", a[0])),),
    "tan": lambda g, v, a: (g.make("add", g.const(1.0), g.make("mul", v, v)),),
    "asin": lambda g, v, a: (g.make("rsqrt", _one_minus_square(g, a[0])),),
    "acos": lambda g, v, a: (g.make("neg", g.make("rsqrt", _one_minus_square(g, a[0]))),),
    "atan": lambda g, v, a: (g.make("div", g.const(1.0), g.make("add", g.const(1.0), g.make("mul", a[0], a[0]))),),
    "sinh": lambda g, v, a: (g.make("cosh", a[0]),),
    "cosh": lambda g, v, a: (g.make("sinh", a[0]),),
    "tanh": lambda g, v, a: (_one_minus_square(g, v),),
    "sigmoid": lambda g, v, a: (g.make("mul", v, g.make("sub", g.const(1.0), v)),),
    "erf": lambda g, v, a: (g.make("mul", g.const(2 / math.sqrt(math.pi)), g.make("exp", g.make("neg", g.make("mul", a[0], a[0])))),),
    "atan2": lambda g, v, a: tuple(
        g.make("div", n, g.make("add", g.make("mul", a[0], a[0]), g.make("mul", a[1], a[1]))) for n in (a[1], g.make("neg", a[0]))
    ),
    "pow": lambda g, v, a: (_power_slope(g, a), _exponent_slope(g, v, a)),
}
FLAT = {
    "floor", "ceil", "trunc", "round", "sign", "floordiv", "truncdiv", "cast", "detach", "load", "number", "const", "s", "b", "h", "q", "k", "q_len", "kv_len",
    "heads",
}  # fmt: skip


class Tangents:
    """Slope nodes with respect to one seed node."""

    def __init__(self, graph: Graph, seed: int):
        self.g, self.seed = graph, seed
        self.known: dict[int, int | None] = {}

    def of(self, i: int) -> int | None:
        """The node of d node_i / d seed; None where it is identically zero."""
        for j in range(i + 1):  # arguments come before their node, so a plain loop replaces recursion
            if j not in self.known:
                self.known[j] = self._slope(j)
        return self.known[i]

    def _slope(self, i: int) -> int | None:
        g, node = self.g, self.g.nodes[i]
        if i == self.seed:
            return g.const(1.0)
        if node.op == "cast" and node.type in FLOATS and self.known[node.args[0]] is not None:
            return self.known[node.args[0]]
        if node.type not in FLOATS or node.op in FLAT:
            return None
        d = [self.known[a] if g.nodes[a].type in FLOATS else None for a in node.args]
        if all(x is None for x in d):
            return None
        a = node.args
        match node.op:
            case "add":
                return self._sum(d[0], d[1])
            case "sub":
                return self._sum(d[0], None if d[1] is None else self._negated(d[1]))
            case "neg":
                return self._negated(d[0])
            case "mul":
                return self._sum(self._scaled(d[0], a[1]), self._scaled(d[1], a[0]))
            case "div":
                top = None if d[0] is None else g.make("div", d[0], a[1])
                bottom = None if d[1] is None else self._negated(g.make("div", self._scaled(d[1], i), a[1]))
                return self._sum(top, bottom)
            case "mod" | "fmod":  # a - floor(a / b) * b, or trunc
                turns = g.make("floor" if node.op == "mod" else "trunc", g.make("div", a[0], a[1]))
                return self._sum(d[0], None if d[1] is None else self._negated(self._scaled(d[1], turns)))
            case "abs":
                return self._scaled(d[0], g.make("sign", a[0]))
            case "where":
                return self._select(a[0], d[1], d[2])
            case "minimum" | "maximum":
                ahead = g.make("lt" if node.op == "minimum" else "gt", a[0], a[1], kind=BOOL)
                match node.data:
                    case "first":
                        return self._select(g.make("le" if node.op == "minimum" else "ge", a[0], a[1], kind=BOOL), d[0], d[1])
                    case "second":
                        return self._select(ahead, d[0], d[1])
                half = self._scaled(self._sum(d[0], d[1]), g.const(0.5))
                return self._select(g.make("eq", a[0], a[1], kind=BOOL), half, self._select(ahead, d[0], d[1]))
        partials = PARTIALS[node.op](g, i, a)
        total: int | None = None
        for slope, partial in zip(d, partials):
            total = self._sum(total, None if slope is None or partial is None else self._scaled(slope, partial))
        return total

    def _is_one(self, i: int) -> bool:
        return self.g.nodes[i].op == "const" and self.g.nodes[i].data == 1.0

    def _scaled(self, slope: int | None, factor: int) -> int | None:
        if slope is None:
            return None
        return factor if self._is_one(slope) else self.g.make("mul", slope, factor)

    def _sum(self, x: int | None, y: int | None) -> int | None:
        return y if x is None else x if y is None else self.g.make("add", x, y)

    def _negated(self, x: int | None) -> int | None:
        return None if x is None else self.g.make("neg", x)

    def _select(self, condition: int, x: int | None, y: int | None) -> int | None:
        if x is None and y is None:
            return None
        zero = self.g.const(0.0)
        return self.g.make("where", condition, zero if x is None else x, zero if y is None else y)


def score_slope(graph: Graph) -> int:
    """The node of d score / d s (a constant zero or one where it is that)."""
    form = graph.form
    if form.score < 0:
        return graph.const(1.0)
    seed = next((i for i, n in enumerate(form.nodes) if n.op == "s"), None)
    slope = None if seed is None else Tangents(graph, seed).of(form.score)
    return graph.const(0.0) if slope is None else slope


def load_slopes(graph: Graph, slots: tuple[int, ...]) -> list[tuple[int, int]]:
    """(load node, node of d score / d load) for every load of the wanted slots that the score depends on."""
    form = graph.form
    loads = [i for i in sorted(form.reachable(form.score)) if form.nodes[i].op == "load" and form.nodes[i].data in slots and form.nodes[i].type == REAL]
    found = [(i, Tangents(graph, i).of(form.score)) for i in loads]
    return [(i, slope) for i, slope in found if slope is not None]
