"""Form: the frozen expression graph of a variant, with numbered slots for captured tensors and numbers.

Expr (one for the score, one for the mask) -> Form. Example: ``Form.of(score, mask).text`` is the canonical text that keys every cache.
Equal forms are equal programs: only values of captures and run-time numbers may differ between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from .language import FLOATS, REAL, Capture, Expr


class Node(NamedTuple):
    """One operation. ``args`` are indices of earlier nodes; ``data`` is a constant's value or the number of a slot."""

    op: str
    type: str
    args: tuple[int, ...] = ()
    data: Any = None

    @property
    def key(self) -> tuple:
        """What equal nodes share: 0.0 and -0.0, True and 1 are different data."""
        return self.op, self.type, self.args, repr(self.data)


class CaptureSpec(NamedTuple):
    """What the text must know of a captured tensor."""

    dtype: str
    ndim: int


@dataclass(frozen=True, eq=False)
class Form:
    """The score and mask of a variant as one graph in evaluation order. ``score`` and ``mask`` are node indices, -1 for none.

    Forms are equal when their texts are: 0.0 and -0.0 differ there, and a NaN equals itself.
    """

    nodes: tuple[Node, ...]
    score: int
    mask: int
    captures: tuple[CaptureSpec, ...]
    floats: int  # run-time numbers float_0 ...
    ints: tuple[str, ...]  # types of the run-time integers int_0 ...
    sink: bool = False

    @cached_property
    def text(self) -> str:
        """Canonical JSON; ``Form.parse`` reads it back, in any process."""
        nodes = [[n.op, n.type, list(n.args), _encode(n.data)] for n in self.nodes]
        return json.dumps([nodes, self.score, self.mask, self.captures, self.floats, self.ints, self.sink], separators=(",", ":"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @staticmethod
    def parse(text: str) -> Form:
        nodes, score, mask, captures, floats, ints, sink = json.loads(text)
        return Form(
            tuple(Node(op, kind, tuple(args), _decode(data)) for op, kind, args, data in nodes),
            score, mask, tuple(CaptureSpec(d, n) for d, n in captures), floats, tuple(ints), sink,
        )  # fmt: skip

    def with_dtypes(self, dtypes: Sequence[str]) -> Form:
        """The same program on captures stored as ``dtypes``."""
        return replace(self, captures=tuple(CaptureSpec(dtype, c.ndim) for dtype, c in zip(dtypes, self.captures)))

    @property
    def patterned(self) -> bool:
        """Whether the mask has a remainder of the key or of a difference to it, which leaves hardly a tile full."""
        return any(self.nodes[i].op == "mod" and "k" in self.depends[i] for i in self.reachable(self.mask))

    def reachable(self, root: int) -> set[int]:
        """The nodes that ``root`` needs, itself included."""
        seen: set[int] = set()
        todo = [root] if root >= 0 else []
        while todo:
            i = todo.pop()
            if i not in seen:
                seen.add(i)
                todo.extend(self.nodes[i].args)
        return seen

    @cached_property
    def depends(self) -> tuple[frozenset[str], ...]:
        """For every node, which of the symbols b, h, q, k, s it varies with."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = frozenset((node.op,)) if node.op in ("b", "h", "q", "k", "s") else frozenset()
            found.append(own.union(*(found[i] for i in node.args)))
        return tuple(found)

    def score_slots(self) -> tuple[int, ...]:
        """Capture slots through which a gradient of the score can flow."""
        loads = (self.nodes[i] for i in sorted(self.reachable(self.score)))
        return tuple(sorted({n.data for n in loads if n.op == "load" and n.type == REAL}))

    def spanned(self) -> tuple[tuple[int, int, str], ...]:
        """(slot, dimension, "H" or "B") of captures that every call reads at each head or batch item: those indexed by plain h or b.

        Left out is what a condition on the head (or item) may keep from being read: ``where(h < 4, t[h], 0)``, or a score under such a mask.
        """
        found = set()
        for axis, name in (("h", "H"), ("b", "B")):
            todo = [self.mask] if self.mask >= 0 else []
            if self.score >= 0 and not (self.mask >= 0 and axis in self.depends[self.mask]):
                todo.append(self.score)
            seen: set[int] = set()
            while todo:
                i = todo.pop()
                if i in seen:
                    continue
                seen.add(i)
                node = self.nodes[i]
                if node.op == "load":
                    found |= {(node.data, d, name) for d, a in enumerate(node.args) if self._plain(a) == axis}
                todo.extend(self._needed(node, axis))
        return tuple(sorted(found))

    def _plain(self, i: int) -> str:
        """The operation of a node, conversions aside."""
        while self.nodes[i].op == "cast":
            i = self.nodes[i].args[0]
        return self.nodes[i].op

    def _needed(self, node: Node, axis: str) -> Iterator[int]:
        """The arguments of a node whose values count for every value of ``axis``, at some query and key."""
        for a in node.args:
            others = [self.depends[other] for other in node.args if other != a]
            match node.op:
                case "and" | "or":
                    needed = not any(axis in d for d in others)
                case "where":
                    condition = self.depends[node.args[0]]
                    needed = a == node.args[0] or (axis not in condition and bool(condition & {"q", "k", "s"}))
                case _:
                    needed = True
            if needed:
                yield a


def _encode(data: Any) -> Any:
    return {"float": repr(data)} if isinstance(data, float) else data


def _decode(data: Any) -> Any:
    return float(data["float"]) if isinstance(data, dict) else data


class Traced(NamedTuple):
    """A Form with the values that fill its slots."""

    form: Form
    captures: tuple[Capture, ...]
    floats: tuple[float, ...]
    ints: tuple[int, ...]
    score_slots: tuple[int, ...]  # captures through which a gradient of the score can flow
    spanned: tuple[tuple[int, int, str], ...] = ()  # Form.spanned: dimensions that must hold every head or batch item


def _postorder(roots: list[Expr]) -> Iterator[Expr]:
    seen: set[int] = set()
    for root in roots:
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            e, ready = stack.pop()
            if ready:
                yield e
            elif id(e) not in seen:
                seen.add(id(e))
                stack.append((e, True))
                stack.extend((a, False) for a in reversed(e.args))


def linearise(score: Expr | None, mask: Expr | None, *, sink: bool = False) -> Traced:
    """Number the slots, share equal subexpressions and freeze the graph."""
    nodes: list[Node] = []
    index: dict[Any, int] = {}
    place: dict[int, int] = {}
    captures: list[Capture] = []
    floats: list[float] = []
    ints: list[int] = []
    int_types: list[str] = []
    for e in _postorder([x for x in (score, mask) if x is not None]):
        data = e.data
        if e.op == "load":
            if e.data not in captures:
                captures.append(e.data)
            data = captures.index(e.data)
        elif e.op == "number":
            if e.kind in FLOATS:
                floats.append(e.data)
                data = len(floats) - 1
            else:
                ints.append(e.data)
                int_types.append(e.kind)
                data = len(ints) - 1
        node = Node(e.op, e.kind, tuple(place[id(a)] for a in e.args), data)
        place[id(e)] = index.setdefault(node.key, len(nodes))
        if place[id(e)] == len(nodes):
            nodes.append(node)
    form = Form(
        tuple(nodes),
        -1 if score is None or score.op == "s" else place[id(score)],
        -1 if mask is None else place[id(mask)],
        tuple(CaptureSpec(c.dtype, c.ndim) for c in captures), len(floats), tuple(int_types), sink,
    )  # fmt: skip
    return Traced(form, tuple(captures), tuple(floats), tuple(ints), form.score_slots(), form.spanned())
