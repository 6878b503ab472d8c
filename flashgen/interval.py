"""Intervals of a Form over a tile: one set of rules, run on Python numbers or printed as C.

Form + a backend -> spans of nodes. Example: ``tile_truth(form, NumberSpans(leaves, captures, numbers))`` is the mask's (must, may) over one tile.
The C functions are those of ``fg/interval.h``; ``NumberSpans`` is their twin, tested against brute force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from .bounds import BLOCK
from .form import Form
from .language import BOOL, FLOATS, INT, LONG

FAR = 1 << 61
SCAN_LIMIT, SPAN_LIMIT = 256, 4096  # entries read one by one for the bounds of one tile, and those whose bounds a table gives
EXACT = 1 << 24  # integers beyond round when they become floats


INT_LEAST, INT_MOST = -(1 << 31), (1 << 31) - 1
INDEX_MOST = (1 << 30) - 1  # of indices, lengths and captured int32 numbers: two of them add up without wrapping


class Spans(Protocol):
    """A backend: makes handles for spans (integer), real spans and truths."""

    def integer(self, value: int) -> Any: ...
    def real(self, value: float) -> Any: ...
    def leaf(self, op: str) -> Any: ...
    def number(self, slot: int, kind: str) -> Any: ...
    def load(self, slot: int, kind: str, indices: Sequence[Any]) -> Any: ...
    def call(self, function: str, *args: Any) -> Any: ...


_INTEGER = {"add": "span_add", "sub": "span_sub", "mul": "span_mul", "neg": "span_neg", "abs": "span_abs", "floordiv": "span_floordiv", "mod": "span_mod",
            "minimum": "span_minimum", "maximum": "span_maximum"}  # fmt: skip
_TRUTH = {"and": "truth_and", "or": "truth_or", "xor": "truth_xor", "not": "truth_not"}
_ORDER = {"le": ("truth_le", False), "lt": ("truth_lt", False), "ge": ("truth_le", True), "gt": ("truth_lt", True), "eq": ("truth_eq", False),
          "ne": ("truth_ne", False)}  # fmt: skip


class Evaluator:
    """Spans of the nodes of a form, computed once each."""

    def __init__(self, form: Form, spans: Spans, wraps: frozenset[int] | None = None):
        self.form, self.spans, self.known = form, spans, {}  # type: ignore[var-annotated]
        self.wraps = may_wrap(form) if wraps is None else wraps

    def span(self, i: int) -> Any:
        todo = [i]  # a stack of its own: long chains of | would exhaust Python's
        while todo:
            j = todo[-1]
            unknown = [a for a in self._used(j) if a not in self.known] if j not in self.known else []
            if unknown:
                todo.extend(reversed(unknown))
            else:
                if j not in self.known:
                    found = self._evaluate(j)
                    self.known[j] = self.spans.call("span_int", found) if j in self.wraps and self.form.nodes[j].type == INT else found
                todo.pop()
        return self.known[i]

    def _used(self, i: int) -> tuple[int, ...]:
        """The arguments that evaluating a node surely asks for."""
        op, kind = self.form.nodes[i].op, self.form.nodes[i].type
        logic, whole = kind == BOOL, kind in (INT, LONG)
        used = op in _ORDER or (op in _TRUTH and logic) or (op in _INTEGER and whole) or (op == "where" and (whole or logic))
        return self.form.nodes[i].args if used else ()

    def as_integer(self, i: int) -> Any:
        kind = self.form.nodes[i].type
        return self.spans.call("span_of", self.span(i)) if kind == BOOL else self.span(i)

    def _as_real(self, i: int) -> Any:
        kind = self.form.nodes[i].type
        return self.span(i) if kind in FLOATS else self.spans.call("real_of", self.as_integer(i))

    def _evaluate(self, i: int) -> Any:
        node, spans = self.form.nodes[i], self.spans
        match node.op:
            case "const" if node.type == BOOL:
                truth = self.spans.integer(int(node.data))
                return spans.call("truth_of", truth)
            case "const":
                return spans.real(node.data) if node.type in FLOATS else spans.integer(node.data)
            case "number":
                return spans.number(node.data, node.type)
            case "b" | "h" | "q" | "k" | "q_len" | "kv_len" | "heads":
                return spans.leaf(node.op)
            case "load" if node.type in (INT, LONG, BOOL):
                loaded = spans.load(node.data, node.type, [self.as_integer(a) for a in node.args])
                return spans.call("truth_of", loaded) if node.type == BOOL else loaded
            case "cast" if node.type in (INT, LONG) and self.form.nodes[node.args[0]].type not in FLOATS:
                return self.as_integer(node.args[0])
            case "cast" if node.type in FLOATS:
                return self._as_real(node.args[0])
            case "detach":
                return self.span(node.args[0])
            case "where" if node.type == BOOL:
                return spans.call("truth_where", *(self.span(a) for a in node.args))
            case "where" if node.type in (INT, LONG):
                return spans.call("span_where", self.span(node.args[0]), self.as_integer(node.args[1]), self.as_integer(node.args[2]))
            case op if op in _TRUTH and node.type == BOOL:
                return spans.call(_TRUTH[op], *(self.span(a) for a in node.args))
            case op if op in _ORDER:
                function, swap = _ORDER[op]
                real = any(self.form.nodes[a].type in FLOATS for a in node.args)
                pair = [self._as_real(a) if real else self.as_integer(a) for a in node.args]
                return spans.call(function, *(reversed(pair) if swap else pair))
            case op if op in _INTEGER and node.type in (INT, LONG):
                return spans.call(_INTEGER[op], *(self.as_integer(a) for a in node.args))
        if node.type == BOOL:
            return spans.call("truth_unknown")
        return spans.call("real_unknown" if node.type in FLOATS else "span_unknown")


def _clip(x: int) -> int:
    return max(-FAR, min(x, FAR))


def _is_far(a: tuple) -> bool:
    return a[0] <= -FAR or a[1] >= FAR


def _mul(a: tuple, b: tuple) -> tuple:
    if any(abs(x) >= 1 << 30 for x in (*a, *b)):
        return (-FAR, FAR)
    products = [x * y for x in a for y in b]
    return (min(products), max(products))


def _floordiv(a: tuple, b: tuple) -> tuple:
    if b[0] != b[1] or b[0] <= 0:
        return (-FAR, FAR)
    return (-FAR if a[0] <= -FAR else a[0] // b[0], FAR if a[1] >= FAR else a[1] // b[0])


def _mod(a: tuple, b: tuple) -> tuple:
    if b[0] != b[1] or b[0] <= 0:
        return (-FAR, FAR)
    c = b[0]
    return (a[0] % c, a[1] % c) if not _is_far(a) and a[0] // c == a[1] // c else (0, c - 1)


def _neg(a: tuple) -> tuple:
    return (-a[1], -a[0])


def _add(a: tuple, b: tuple) -> tuple:
    return (-FAR if min(a[0], b[0]) <= -FAR else _clip(a[0] + b[0]), FAR if max(a[1], b[1]) >= FAR else _clip(a[1] + b[1]))


def _le(a: tuple, b: tuple) -> tuple:
    certain = not (a[2] or b[2]) if len(a) > 2 else not (_is_far(a) or _is_far(b))
    return (a[1] <= b[0] and certain, a[0] <= b[1])


def _lt(a: tuple, b: tuple) -> tuple:
    if len(a) > 2:
        return (a[1] < b[0] and not a[2] and not b[2], a[0] < b[1])
    return (a[1] < b[0] and not (_is_far(a) or _is_far(b)), a[0] < b[1] or a[0] <= -FAR or b[1] >= FAR)


def _eq(a: tuple, b: tuple) -> tuple:
    certain = not (a[2] or b[2]) if len(a) > 2 else not _is_far(a)
    return (a[0] == a[1] == b[0] == b[1] and certain, a[0] <= b[1] and b[0] <= a[1])


def _ne(a: tuple, b: tuple) -> tuple:
    must, may = _eq(a, b)
    loose = len(a) > 2 and (a[2] or b[2])
    return (not may and not loose, not must or loose)


_TWINS: dict[str, Callable[..., Any]] = {
    "span_add": _add, "span_neg": _neg, "span_sub": lambda a, b: _add(a, _neg(b)), "span_mul": _mul, "span_floordiv": _floordiv, "span_mod": _mod,
    "span_ceildiv": lambda a, b: _neg(_floordiv(_neg(a), b)),
    "span_abs": lambda a: a if a[0] >= 0 else (_neg(a) if a[1] <= 0 else (0, max(-a[0], a[1]))),
    "span_minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), "span_maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "span_of": lambda a: (int(a[0]), int(a[1])), "span_unknown": lambda: (-FAR, FAR),
    "span_int": lambda a: a if a[0] >= INT_LEAST and a[1] <= INT_MOST else (-FAR, FAR), "span_guard": lambda a, b: (-FAR, FAR) if _is_far(b) else a,
    "span_where": lambda c, a, b: a if c[0] else (b if not c[1] else (min(a[0], b[0]), max(a[1], b[1]))),
    "truth_and": lambda a, b: (a[0] and b[0], a[1] and b[1]), "truth_or": lambda a, b: (a[0] or b[0], a[1] or b[1]),
    "truth_not": lambda a: (not a[1], not a[0]),
    "truth_xor": lambda a, b: ((a[0] and not b[1]) or (b[0] and not a[1]), (a[1] and not b[0]) or (b[1] and not a[0])),
    "truth_where": lambda c, a, b: a if c[0] else (b if not c[1] else (a[0] and b[0], a[1] or b[1])),
    "truth_unknown": lambda: (False, True), "truth_of": lambda a: ((a[0] > 0 or a[1] < 0) and not _is_far(a), a != (0, 0)),
    "truth_le": _le, "truth_lt": _lt, "truth_eq": _eq, "truth_ne": _ne,
    "span_if": lambda a: (-FAR, FAR) if a[1] else (0, -1),
    "span_below": lambda a: (-FAR, a[1]), "span_above": lambda a: (a[0], FAR), "span_meet": lambda a, b: (max(a[0], b[0]), min(a[1], b[1])),
    "span_join": lambda a, b: b if a[0] > a[1] else (a if b[0] > b[1] else (min(a[0], b[0]), max(a[1], b[1]))),
    "real_of": lambda a: (float(a[0]), float(a[1]), False) if max(abs(a[0]), abs(a[1])) <= EXACT else (-math.inf, math.inf, True),
    "real_unknown": lambda: (-math.inf, math.inf, True),
}  # fmt: skip


class NumberSpans:
    """The backend that computes: ``leaves`` maps q, k, ... to (lo, hi); ``captures`` are numpy arrays, ``floats`` and ``ints`` the captured numbers.
    ``tables`` are those of ``bounds.tables``: over two dimensions they answer for the blocks that cover a box."""

    def __init__(
        self, leaves: dict[str, tuple[int, int]], captures: Sequence[Any] = (), floats: Sequence[float] = (), ints: Sequence[int] = (),
        tables: Mapping[int, int] | None = None,
    ):  # fmt: skip
        self.leaves, self.captures, self.floats, self.ints, self.tables = leaves, captures, floats, ints, tables or {}

    def integer(self, value: int) -> tuple:
        return (value, value)

    def real(self, value: float) -> tuple:
        return (value, value, math.isnan(value))

    def leaf(self, op: str) -> tuple:
        return self.leaves[op]

    def number(self, slot: int, kind: str) -> tuple:
        return self.real(self.floats[slot]) if kind in FLOATS else self.integer(self.ints[slot])

    def load(self, slot: int, kind: str, indices: Sequence[tuple]) -> tuple:
        data = self.captures[slot]
        if data is None or data.size == 0 or data.ndim > 4:
            return (-FAR, FAR)
        boxes = [tuple(min(max(x, 0), n - 1) for x in i) for i, n in zip(indices, data.shape)]
        blocked, sizes = self.tables.get(slot, 0), [hi - lo + 1 for lo, hi in boxes]
        if blocked:
            inner = boxes[-blocked:]
            if blocked == 2 and math.prod(sizes[-2:]) > BLOCK:  # the blocks that cover the box
                inner = [(lo // BLOCK * BLOCK, lo // BLOCK * BLOCK + BLOCK * (hi // BLOCK - lo // BLOCK + 1) - 1) for lo, hi in inner]
                far = math.prod((hi - lo + 1) // BLOCK for lo, hi in inner) * BLOCK > SPAN_LIMIT
            else:
                far = blocked == 1 and sizes[-1] > SPAN_LIMIT
            if far or any(n > 1 for n in sizes[:-blocked]):
                return (-FAR, FAR)
            boxes[-blocked:] = inner
        elif math.prod(sizes) > SCAN_LIMIT:
            return (-FAR, FAR)
        part = data[tuple(slice(lo, hi + 1) for lo, hi in boxes)]
        return (int(part.min()), int(part.max()))

    def call(self, function: str, *args: Any) -> Any:
        return _TWINS[function](*args)


class PrintedSpans:
    """The backend that prints C: every call becomes a named constant; ``names`` maps leaves to C spans."""

    def __init__(self, names: dict[str, str], tables: Mapping[int, int] | None = None):
        """tables: of ``bounds.tables``; other captured tensors are read as they lie."""
        self.names, self.tables, self.lines, self._seen = names, tables or {}, [], {}  # type: ignore[var-annotated]

    def keep(self, expression: str) -> str:
        """The name of an expression, computed once."""
        if expression not in self._seen:
            self._seen[expression] = f"r{len(self._seen)}"
            self.lines.append(f"const auto {self._seen[expression]} = {expression};")
        return self._seen[expression]

    def integer(self, value: int) -> str:
        return f"fg::Span{{{_clip(value)}, {_clip(value)}}}"

    def real(self, value: float) -> str:
        if math.isinf(value):
            return f"fg::real_of({'-' if value < 0 else ''}fg::infinity<double>())"
        return "fg::real_unknown()" if math.isnan(value) else f"fg::real_of({value!r})"

    def leaf(self, op: str) -> str:
        return self.names[op]

    def number(self, slot: int, kind: str) -> str:
        if kind == LONG:
            return self.call("span_near", f"fg::Span{{p.int_{slot}, p.int_{slot}}}")
        return f"fg::real_of(double(p.float_{slot}))" if kind in FLOATS else f"fg::Span{{p.int_{slot}, p.int_{slot}}}"

    def load(self, slot: int, kind: str, indices: Sequence[str]) -> str:
        axes = [f"fg::Axis{{{i}, p.capture_{slot}_size_{d}, p.capture_{slot}_stride_{d}}}" for d, i in enumerate(indices)]
        if len(axes) > 4:
            return "fg::span_unknown()"
        if slot not in self.tables:
            return self.keep(f"fg::span_load({', '.join([f'p.capture_{slot}', *axes])})")
        tensors = [f"p.{name}_{slot}" for name in ("capture", "least", "most")]
        return self.keep(f"fg::span_table<{self.tables[slot]}>({', '.join([*tensors, *axes])})")

    def call(self, function: str, *args: Any) -> str:
        return self.keep(f"fg::{function}({', '.join(args)})")


_STORED = {"bool": (0, 1), "uint8": (0, 255), "int8": (-128, 127), "int16": (-(1 << 15), (1 << 15) - 1), "int32": (INT_LEAST, INT_MOST)}


class _Anywhere(NumberSpans):
    """The backend of all tiles at once: whatever indices, numbers and captured tensors hold."""

    def __init__(self, form: Form):
        self.form = form

    def leaf(self, op: str) -> tuple:
        return (0, INDEX_MOST)

    def number(self, slot: int, kind: str) -> tuple:
        return (-math.inf, math.inf, True) if kind in FLOATS else ((-INDEX_MOST, INDEX_MOST) if kind == INT else (-FAR, FAR))

    def load(self, slot: int, kind: str, indices: Sequence[tuple]) -> tuple:
        return _STORED.get(self.form.captures[slot].dtype, (-FAR, FAR))


def _is_last_row(form: Form, i: int) -> bool:
    """q + (kv_len - q_len), which ends within kv_len."""
    node = form.nodes[i]
    ops = {form.nodes[a].op: a for a in node.args}
    return node.op == "add" and set(ops) == {"q", "sub"} and [form.nodes[a].op for a in form.nodes[ops["sub"]].args] == ["kv_len", "q_len"]


@lru_cache(maxsize=256)
def may_wrap(form: Form) -> frozenset[int]:
    """Integer nodes that leave their type for some values, as a product of two indices does: the kernel's arithmetic wraps around there."""
    everywhere = Evaluator(form, _Anywhere(form), frozenset())
    found = set()
    for i, node in enumerate(form.nodes):
        if node.type not in (INT, LONG) or not (node.op in _INTEGER or node.op == "cast"):
            continue
        lo, hi = everywhere.span(i)
        if _is_last_row(form, i):
            everywhere.known[i] = (-INDEX_MOST, INDEX_MOST)
        elif _is_far((lo, hi)) or (node.type == INT and (lo < INT_LEAST or hi > INT_MOST)):
            found.add(i)
            everywhere.known[i] = (INT_LEAST, INT_MOST) if node.type == INT else (-FAR, FAR)
    return frozenset(found)


def tile_truth(form: Form, spans: Spans) -> Any:
    """(must, may) of the mask over the tile that the backend's leaves describe."""
    return Evaluator(form, spans).span(form.mask)
