"""Rewrite: a score function for kernels that give it q . k unscaled, with what is the same for a whole head folded together.

Form -> Unscaled (a Form whose ``s`` is q . k, with a leaf ``scale``; a factor taken out). Example: ``cap * tanh(s / cap)`` becomes
``tanh(s * (scale * (1 / cap)))`` with the factor ``cap``, ``s + a * s * s`` becomes ``(a * scale * scale * s + scale) * s``,
``real(abs(q + off - k))`` becomes ``abs(real((q - k) + off))``, and ``real((q - k) + off)`` where the mask hides all but k <= q + off.
The results differ from the user's order of operations by float32 rounding alone: for 16-bit inputs, not for float32. Products and sums of other numbers keep
their order, and no two numbers are added that the user does not add.
"""

from __future__ import annotations

from typing import NamedTuple

from .form import Form, Node
from .language import FLOATS, INT, REAL

MOST_POWERS = 4  # of s in a polynomial
INNER, HEAD = frozenset("qk"), frozenset("bh")


def exact_nodes(form: Form) -> set[int]:
    """Nodes that masks and indices of captured tensors are made of: IEEE operations, each rounded on its own."""
    found = form.reachable(form.mask)
    for node in form.nodes:
        if node.op == "load" or (node.op == "cast" and node.type not in FLOATS):
            for a in node.args:
                found |= form.reachable(a)
    return found


def multiply_by_reciprocals(form: Form) -> Form:
    """The same form with x / y as x * (1 / y) in the score where y is the same for a whole head: one division per head instead of one per score.

    An ulp apart from a division; masks keep theirs, and so does float64.
    """
    exact, nodes, place = exact_nodes(form), [], []  # type: ignore[var-annotated]

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    one = None
    for i, node in enumerate(form.nodes):
        args = tuple(place[a] for a in node.args)
        inner = node.op == "div" and i not in exact and form.depends[node.args[1]] <= HEAD and not form.depends[node.args[0]] <= HEAD
        if not inner:
            place.append(add(node._replace(args=args)))
            continue
        one = add(Node("const", node.type, (), 1.0)) if one is None or nodes[one].type != node.type else one
        place.append(add(Node("mul", node.type, (args[0], add(Node("div", node.type, (one, args[1])))))))
    moved = lambda root: place[root] if root >= 0 else -1  # noqa: E731
    return Form(tuple(nodes), moved(form.score), moved(form.mask), form.captures, form.floats, form.ints, form.sink)


class Unscaled(NamedTuple):
    form: Form
    gain: int  # the node that the score is multiplied by afterwards, the same for a whole head; -1 for none


class Term(NamedTuple):
    """A product of old nodes that do not vary with s, some negated."""

    factors: tuple[int, ...]
    negative: bool = False


class _Rewriter:
    def __init__(self, form: Form):
        self.old = form
        self.nodes: list[Node] = []
        self.depends: list[frozenset[str]] = []
        self.index: dict[tuple, int] = {}
        self.place: dict[int, int] = {}
        self.powers: dict[int, dict[int, Term] | None] = {}
        self.positive = {self._linear(b, a) for a, b in self._ordered(form.mask)}  # differences that no pair has below 0 unless the mask hides it

    # ---- new nodes

    def add(self, op: str, kind: str, *args: int, data: object = None) -> int:
        node = Node(op, kind, args, data)
        found = self.index.setdefault(node.key, len(self.nodes))
        if found == len(self.nodes):
            self.nodes.append(node)
            own = frozenset((op,)) if op in ("b", "h", "q", "k", "s") else frozenset()
            self.depends.append(own.union(*(self.depends[a] for a in args)))
        return found

    def uniform(self, i: int) -> bool:
        return self.depends[i] <= HEAD

    def product(self, a: int, b: int) -> int:
        """a * b; a head's own numbers are multiplied with each other first."""
        for x, u in ((a, b), (b, a)):
            node = self.nodes[x]
            if self.uniform(u) and not self.uniform(x) and node.op == "mul" and node.type == REAL:
                y, v = node.args if self.uniform(node.args[1]) else node.args[::-1]
                if self.uniform(v):
                    return self.add("mul", REAL, y, self.add("mul", REAL, v, u))
        return self.add("mul", REAL, a, b)

    # ---- polynomials of s

    def terms(self, i: int) -> dict[int, Term] | None:
        """The old node i as a sum of terms by their power of s; None unless every power occurs once."""
        if i not in self.powers:
            self.powers[i] = self._terms(i)
        return self.powers[i]

    def _terms(self, i: int) -> dict[int, Term] | None:
        node = self.old.nodes[i]
        if "s" not in self.old.depends[i]:
            return {0: Term((i,))}
        if node.op == "s":
            return {1: Term(())}
        parts = [self.terms(a) for a in node.args]
        if node.type != REAL or node.op not in ("neg", "add", "sub", "mul") or any(p is None for p in parts):
            return None
        first, second = parts[0] or {}, (parts[1] if len(parts) > 1 else None) or {}
        negated = lambda p: {n: Term(t.factors, not t.negative) for n, t in p.items()}  # noqa: E731
        match node.op:
            case "neg":
                return negated(first)
            case "mul" if self._distributes(first, second) or self._distributes(second, first):
                product = {n + m: Term(x.factors + y.factors, x.negative != y.negative) for n, x in first.items() for m, y in second.items()}
                return product if max(product) <= MOST_POWERS else None
            case "add" | "sub" if not first.keys() & second.keys():
                return first | (second if node.op == "add" else negated(second))
        return None

    def _distributes(self, one: dict[int, Term], terms: dict[int, Term]) -> bool:
        """Whether ``one`` is a single term that multiplies each of ``terms``: of several only where that costs nothing per score."""
        return len(one) == 1 and (len(terms) == 1 or all(self.old.depends[i] <= HEAD for term in one.values() for i in term.factors))

    def coefficient(self, power: int, term: Term) -> int:
        """What s ** power is multiplied by: the scale as often, then the term's factors in their order."""
        factors = [self.emit(i) for i in term.factors] + [self.add("scale", REAL)] * power
        found = -1
        for factor in sorted(factors, key=lambda i: not self.uniform(i)):  # stable: a head's own numbers first
            found = factor if found < 0 else self.add("mul", REAL, found, factor)
        if found < 0:
            found = self.add("const", REAL, data=1.0)
        return self.add("neg", REAL, found) if term.negative else found

    def horner(self, terms: dict[int, Term]) -> int:
        s, top = self.add("s", REAL), max(terms)
        found = self.coefficient(top, terms[top])
        for power in range(top - 1, -1, -1):
            found = self.add("fma", REAL, found, s, self.coefficient(power, terms[power])) if power in terms else self.product(s, found)
        return found

    # ---- old nodes

    def copy(self, root: int) -> int:
        """A mask, which keeps every operation."""
        place = {-1: -1}
        for i in sorted(self.old.reachable(root)):
            node = self.old.nodes[i]
            place[i] = self.add(node.op, node.type, *(place[a] for a in node.args), data=node.data)
        return place[root]

    def emit(self, i: int) -> int:
        if i not in self.place:
            self.place[i] = self._emit(i)
        return self.place[i]

    def _emit(self, i: int) -> int:
        node = self.old.nodes[i]
        if "s" in self.old.depends[i] and node.type == REAL and (terms := self.terms(i)) is not None:
            return self.horner(terms)
        if node.type == INT and node.op in ("add", "sub", "neg") and self.old.depends[i] >= INNER and (found := self._distance(i)) is not None:
            return found
        args = [self.emit(a) for a in node.args]
        if node.type == INT and node.op == "abs" and self._linear(node.args[0]) in self.positive:
            return args[0]
        if node.type == INT and node.op == "abs" and self._linear(-1, node.args[0]) in self.positive:
            return self.add("neg", INT, args[0])
        if node.op == "mul" and node.type == REAL:
            return self.product(*args)
        if node.op == "cast" and node.type in FLOATS:
            return self._float(args[0], node.type)
        return self.add(node.op, node.type, *args, data=node.data)

    def _float(self, i: int, kind: str) -> int:
        """The new node i as a float. A float's sign costs nothing; of differences that threads share, one is converted and the others added to it."""
        node = self.nodes[i]
        if node.type == INT and node.op in ("abs", "neg"):
            return self.add(node.op, kind, self._float(node.args[0], kind))
        split = sorted(node.args, key=self.uniform) if node.op == "add" else [i]  # the difference, then what is added to it
        difference, rest = self.nodes[split[0]], split[1:]
        if all(map(self.uniform, rest)) and difference.op == "sub" and [self.nodes[a].op for a in difference.args] == ["q", "k"]:
            return self.add("real_distance", kind, *difference.args, *rest)
        return self.add("cast", kind, i)

    def _ordered(self, i: int) -> list[tuple[int, int]]:
        """Pairs of old nodes, the first one at most the second one wherever the mask i holds."""
        node = self.old.nodes[i]
        if i < 0 or (node.op != "and" and self.old.nodes[node.args[0] if node.args else i].type != INT):
            return []
        match node.op:
            case "and":
                return [pair for a in node.args for pair in self._ordered(a)]
            case "le" | "lt":
                return [(node.args[0], node.args[1])]
            case "ge" | "gt":
                return [(node.args[1], node.args[0])]
        return []

    def _sum(self, *signed: tuple[int, int]) -> tuple[dict[str, int], list[tuple[int, int]]]:
        """Old nodes, each with its sign: how often q and k are in their sum, and the rest of it."""
        signs = {"q": 0, "k": 0}
        rest: list[tuple[int, int]] = []
        todo = list(signed)
        while todo:
            j, sign = todo.pop()
            node = self.old.nodes[j]
            if node.op in signs:
                signs[node.op] += sign
            elif node.type == INT and node.op in ("add", "sub", "neg") and {"q", "k"} & self.old.depends[j]:
                second = -sign if node.op == "sub" else sign
                todo += [(a, s) for a, s in zip(node.args, (-sign if node.op == "neg" else sign, second))]
            else:
                rest.append((j, sign))
        return signs, rest

    def _linear(self, i: int, less: int = -1) -> tuple[object, ...]:
        """The old node i (-1: 0) less another one, in a form in which equal sums of equal nodes are equal."""
        signs, rest = self._sum(*[(j, sign) for j, sign in ((i, 1), (less, -1)) if j >= 0])
        return (*signs.values(), *sorted(rest))

    def _distance(self, i: int) -> int | None:
        """(q - k) + rest for a sum of q, -k and the rest, or its negative: threads share differences among their rows and columns."""
        signs, rest = self._sum((i, 1))
        if sorted(signs.values()) != [-1, 1] or any({"q", "k"} & self.old.depends[j] for j, _ in rest):
            return None
        found = self.add("sub", INT, self.add("q", INT), self.add("k", INT))
        total = -1
        for j, sign in reversed(rest):  # the user's order
            sign *= signs["q"]
            term = self.emit(j)
            total = (term if sign > 0 else self.add("neg", INT, term)) if total < 0 else self.add("add" if sign > 0 else "sub", INT, total, term)
        found = found if total < 0 else self.add("add", INT, found, total)
        return found if signs["q"] > 0 else self.add("neg", INT, found)


def unscaled(form: Form, *, positive_gain: bool) -> Unscaled:
    """``form`` over the leaves s = q . k and scale. With ``positive_gain`` a factor of the score that is the same for a whole head is taken out."""
    if form.score < 0:
        return Unscaled(form, -1)
    made = _Rewriter(form)
    for i in sorted(form.reachable(form.score)):  # in order: no call nests deep
        made.terms(i)
        score = made.emit(i)
    node, gain = made.nodes[score], -1
    if positive_gain and node.op == "mul" and any(made.uniform(a) for a in node.args):
        score, gain = node.args if made.uniform(node.args[1]) else node.args[::-1]
    mask = made.copy(form.mask)
    return Unscaled(Form(tuple(made.nodes), score, mask, form.captures, form.floats, form.ints, form.sink), gain)
