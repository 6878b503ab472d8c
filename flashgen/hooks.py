"""Hooks: the generated functions of a kernel (uniform, row, col, score, score_grad, capture_grads, mask, ranges, tile class).

Form, Problem -> Hooks, lists of C++ lines for ``part/hooks``. Example: ALiBi's slope lands in Uniform, q + off in Row.
Every node is computed at the earliest stage that knows its symbols: b, h -> Uniform; with q -> Row; with k -> Col; the rest per element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from . import bounds, derivative, ranges
from .form import Form
from .interval import Evaluator, PrintedSpans
from .language import BOOL, INT, LONG, REAL
from .printer import C_TYPES, STORAGE_TYPES, SUM, Printer
from .problem import Problem
from .rewrite import HEAD, exact_nodes, multiply_by_reciprocals, unscaled

Tables = Mapping[int, int]  # of captured tensors, see bounds.tables

# what a comparison of k with a bound says of the half-open interval of keys
_BOUNDS = {"le": ("end", "int_min", " + 1"), "lt": ("end", "int_min", ""), "ge": ("begin", "int_max", ""), "gt": ("begin", "int_max", " + 1")}
_SWAPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}
_LEAVES = {"b": "u.b", "h": "u.h", "q": "q", "k": "k", "s": "s", "q_len": "u.lens.q_len", "kv_len": "u.lens.kv_len", "heads": "p.heads",
           "scale": "p.scale"}  # fmt: skip


@dataclass
class Stage:
    """One of the structs Uniform, Row, Col: its fields and the statements that fill them."""

    fields: list[tuple[str, str]] = field(default_factory=list)  # (C type, name)
    lines: list[str] = field(default_factory=list)


@dataclass
class Entries:
    """A Gap that is made of one entry of a captured tensor, looked up by q - k: entries of neighbours lie side by side as far as no index is clamped."""

    type: str  # C type of an entry
    direction: int  # 1 or -1: what the index grows by as q - k grows by 1, where it does not stand still
    base: list[str]  # body of gap_entries
    index: list[str]  # body of gap_index
    gap: list[str]  # body of gap_of
    stride: str  # of the tensor's last dimension


@dataclass
class Hooks:
    """What ``part/hooks`` prints. A function that does not exist for this variant has no lines."""

    uniform: Stage
    row: Stage
    col: Stage
    gap: Stage  # with raw scores: what depends on q - k alone
    entries: Entries | None
    score: list[str]
    score_grad: list[str]
    capture_grads: list[str]
    mask: list[str]
    kv_range: list[str]
    q_range: list[str]
    tile_class: list[str]
    kv_from: list[str]  # these three where a row of tiles (of keys, of rows) has several ranges
    kv_before: list[str]
    q_from: list[str]
    listed: bool  # the three step along explicit blocks
    scanned: bool  # tile_class reads captured tensors
    mask_loads: bool  # mask() itself reads them
    mask_rows: list[str]  # fields of Row that mask() reads
    mask_cols: list[str]  # fields of Col that mask() reads
    visible: list[str]  # where the keys of a row are one interval, or one and a pattern
    mask_beside: list[str]  # the pattern
    gain: list[str]  # with raw scores: the factor that score() leaves out
    score_near: list[str]  # with raw scores: score() for small scores, where a tanh has a short polynomial
    near: list[str]  # what small means: the largest |s| that score_near() is for
    score_cols: list[str]  # the fields of Col that score() reads

    @property
    def one_a_column(self) -> bool:
        """What a score needs of keys or of differences alone is one register for each column."""
        return len(self.gap.fields) + len(self.score_cols) == 1


def _stage(depends: frozenset[str]) -> str | None:
    """The struct a node belongs to, None for the innermost functions."""
    if "s" in depends or {"q", "k"} <= depends:
        return None
    return "row" if "q" in depends else "col" if "k" in depends else "uniform"


def make(form: Form, problem: Problem, *, raw: bool = False, gaps: bool = False) -> Hooks:
    """All hook functions of one pass. ``raw``: a forward whose score function is given q . k unscaled, see ``rewrite``; ``gaps``: and a Gap."""
    form = multiply_by_reciprocals(form) if problem.real == "float" else form
    form, gain = unscaled(form, positive_gain=problem.positive_gain) if raw else (form, -1)
    graph = derivative.Graph(form)
    backward = problem.which == "backward"
    slope = derivative.score_slope(graph) if backward and form.score >= 0 else -1
    gradients = derivative.load_slopes(graph, problem.capture_grads) if backward else []
    extended = graph.extended()
    roots = [r for r in (form.score, form.mask, gain, slope, *(g for _, g in gradients), *(i for i, _ in gradients)) if r >= 0]
    stages = _Stages(extended, problem.real, roots, raw=raw, gaps_of=form.score if gaps else -1)

    score_lines = stages.function([form.score], lambda p: [f"return {p.expression(form.score)};"], steps=raw) if form.score >= 0 else []
    both = lambda p: [f"value = {p.expression(form.score)};", f"slope = {p.expression(slope)};"]  # noqa: E731
    grad_lines = stages.function([form.score, slope], both) if slope >= 0 else []
    mask_lines = stages.function([form.mask], lambda p: [f"return {p.expression(form.mask)};"]) if form.mask >= 0 else []
    capture_lines: list[str] = []
    if gradients:
        wanted = [x for load, g in gradients for x in (g, *extended.nodes[load].args)]

        def finish(p: Printer) -> list[str]:
            lines = []
            for load, g in gradients:
                node = extended.nodes[load]
                slot, offset = node.data, "0"
                for d in range(len(node.args)):  # row-major offset in the contiguous gradient
                    before = f"(long long){offset}" if d == 1 else f"({offset})"
                    offset = f"{before} * p.capture_{slot}_size_{d} + {p.clamped(node, d)}" if d else p.clamped(node, d)
                one = extended.nodes[g].op == "const" and extended.nodes[g].data == 1.0
                lines.append(f"fg::grad_add(p.grad_{slot} + ({offset}), {'dscore' if one else f'dscore * ({p.expression(g)})'});")
            return lines

        capture_lines = stages.function(wanted, finish)
    tables = bounds.tables(form, problem)
    return Hooks(
        stages.stages["uniform"], stages.stages["row"], stages.stages["col"], stages.stages["gap"], stages.entries(),
        score_lines, grad_lines, capture_lines, mask_lines,
        _range(form, tables, "k"), _range(form, tables, "q"), _tile_class(form, tables), _jump(form, tables, "k", "from"), _jump(form, tables, "k", "before"),
        _jump(form, tables, "q", "from"), any(_stepped(form, tables, x) for part in _parts(form, "k") for x in ranges.lists(part)),
        any(form.nodes[i].op == "load" for i in form.reachable(form.mask)),
        any(form.nodes[i].op == "load" and _stage(form.depends[i]) is None for i in form.reachable(form.mask)),
        stages.behind("row", form.mask), stages.behind("col", form.mask),
        *_visible(form, stages), stages.function([gain], lambda p: [f"return {p.expression(gain)};"]) if gain >= 0 else [],
        *(_near(form, stages) if raw and form.score >= 0 else ([], [])), stages.read("col", form.score),
    )  # fmt: skip


def _near(form: Form, stages: _Stages) -> tuple[list[str], list[str]]:
    """Bodies of score_near and near: where a tanh of the score has an argument that is s, or s times a number that is the same for a whole head."""
    factors: dict[int, int] = {}  # of the argument of each such tanh; -1: none
    for i in sorted(form.reachable(form.score)):
        if form.nodes[i].op == "tanh" and form.nodes[i].type == REAL:
            argument = form.nodes[form.nodes[i].args[0]]
            if argument.op == "s":
                factors[i] = -1
            elif argument.op == "mul" and form.nodes[argument.args[0]].op == "s" and form.depends[argument.args[1]] <= HEAD:
                factors[i] = argument.args[1]
    if not factors:
        return [], []

    def limit(p: Printer) -> list[str]:
        limits = ["fg::NEAR_TANH" if i < 0 else f"fg::NEAR_TANH / fg::abs({p.expression(i)})" for i in sorted(set(factors.values()))]
        return [f"return {reduce(lambda a, b: f'fg::minimum({a}, {b})', limits)};"]

    score = stages.function([form.score], lambda p: [f"return {p.expression(form.score)};"], steps=True, near=frozenset(factors))
    return score, stages.function([i for i in set(factors.values()) if i >= 0], limit)


def _visible(form: Form, stages: _Stages) -> tuple[list[str], list[str]]:
    """Bodies of visible and mask_beside: of the comparisons that a mask joins by "and", those that bound k on one side by an int that is known without k, and
    the others, of which there may only be some where the mask is patterned and loads nothing."""
    bounds, others, todo = [], [], [form.mask] if form.mask >= 0 else []
    while todo:
        i = todo.pop()
        node = form.nodes[i]
        if node.op == "and" and node.type == BOOL:
            todo.extend(reversed(node.args))
            continue
        sides = [form.nodes[a].op == "k" for a in node.args]
        bound = node.args[sides.index(False)] if node.op in _BOUNDS and sides in ([True, False], [False, True]) else -1
        if bound < 0 or "k" in form.depends[bound] or form.nodes[bound].type != INT:
            others.append(i)
        else:
            bounds.append((_BOUNDS[node.op] if sides[0] else _BOUNDS[_SWAPPED[node.op]], bound))
    plain = form.patterned and not any(form.nodes[i].op == "load" for i in form.reachable(form.mask))
    if not bounds or (others and not plain):
        return [], []

    def finish(p: Printer) -> list[str]:
        lines = ["int begin = 0, end = u.lens.kv_len;"]
        for (name, function, shift), bound in bounds:
            value = p.expression(bound, SUM)
            value = f"fg::int_min({value}, u.lens.kv_len - 1){shift}" if shift else value  # a bound may be the largest int
            lines.append(f"{name} = fg::{function}({name}, {value});")
        return [*lines, "return fg::Range{begin, fg::int_max(end, 0)};"]

    beside = stages.function(others, lambda p: [f"return {' & '.join(f'({p.expression(i)})' for i in others)};"]) if others else []
    return stages.function([bound for _, bound in bounds], finish), beside


class _Stages:
    """Assigns nodes to Uniform, Row and Col and prints functions over them."""

    def __init__(self, form: Form, real: str, roots: list[int], *, raw: bool, gaps_of: int):
        """``gaps_of``: the root of a score that has a stage of its own for what depends on q - k alone; -1 for none."""
        self.form, self.real, self.raw = form, real, raw
        self.exact = frozenset(exact_nodes(form))
        self.stages = {"uniform": Stage(), "row": Stage(), "col": Stage(), "gap": Stage()}
        self.home: dict[int, str | None] = {}
        self.field: dict[int, str] = {}
        needed: set[int] = set()
        for r in roots:
            needed |= form.reachable(r)
        for i in needed:
            self.home[i] = _stage(form.depends[i])
        crossing = {i for i in roots if self._storable(i)}
        for i in needed:
            crossing |= {a for a in form.nodes[i].args if self.home[a] != self.home[i] and self._storable(a)}
        self.gap = -1
        if gaps_of >= 0 and len(gaps := self._gaps(gaps_of)) == 1:  # of several a thread would have to hold too many
            (self.gap,) = gaps
            self.home[self.gap] = "gap"
            crossing |= gaps
        for i in sorted(crossing):
            stage = self.home[i]
            assert stage is not None
            self.field[i] = f"{stage[0]}{len(self.stages[stage].fields)}"
            self.stages[stage].fields.append((C_TYPES[form.nodes[i].type], self.field[i]))
        for name in self.stages:
            own = [i for i in sorted(crossing) if self.home[i] == name]
            printer = Printer(form, real, lambda i, name=name: self._name(i, name, steps=name == "gap"), self.exact, narrow=self.raw)  # type: ignore[misc]
            lines = list(printer.statements(own))
            self.stages[name].lines = lines + [f"{name[0]}.{self.field[i]} = {printer.expression(i)};" for i in own]

    def _gaps(self, score: int) -> set[int]:
        """The nodes that depend on q - k and the head alone, of those that the rest of the score needs."""
        nodes, depends, found = self.form.nodes, self.form.depends, set()
        uniform = lambda a: depends[a] <= {"b", "h"}  # noqa: E731
        reachable = self.form.reachable(score)
        for i in sorted(reachable):
            node = nodes[i]
            difference = node.op in ("sub", "real_distance") and [nodes[a].op for a in node.args[:2]] == ["q", "k"] and all(map(uniform, node.args[2:]))
            if difference or (any(a in found for a in node.args) and all(a in found or uniform(a) for a in node.args)):
                found.add(i)
        plain = {i for i in found if nodes[i].op == "sub"}
        return {a for i in reachable - found for a in nodes[i].args if a in found and a not in plain} | ({score} & found)

    def entries(self) -> Entries | None:
        """The gap as an entry of a captured tensor, if it is made of one whose last index alone depends on q - k, and changes by at most as much as q - k."""
        nodes, depends = self.form.nodes, self.form.depends
        loads = [i for i in self.form.reachable(self.gap) if nodes[i].op == "load" and "q" in depends[i]] if self.gap >= 0 else []
        if len(loads) != 1 or any("q" in depends[a] for a in nodes[loads[0]].args[:-1]):
            return None
        node = nodes[loads[0]]
        slot, *_, last = node.data, *node.args
        direction = self._direction(last)
        beside, todo = {loads[0]}, [self.gap]
        while todo:
            if (i := todo.pop()) not in beside:
                beside.add(i)
                todo += nodes[i].args
        if not direction or any(nodes[i].op in ("q", "k") for i in beside):  # q - k is needed beside the entry
            return None
        dimension = len(node.args) - 1

        def function(roots: list[int], finish: Callable[[Printer], str], known: Mapping[int, str]) -> list[str]:
            printer = Printer(self.form, self.real, lambda i: known.get(i) or self._name(i, "gap"), self.exact, narrow=True)
            return [*printer.statements(roots), f"{finish(printer)};"]

        differences = {i: "d" for i in self.form.reachable(last) if nodes[i].op == "sub" and [nodes[a].op for a in nodes[i].args] == ["q", "k"]}
        return Entries(
            STORAGE_TYPES[self.form.captures[slot].dtype], direction,
            function(list(node.args[:-1]), lambda p: f"return {p.line(node)}", {}),
            function([last], lambda p: f"return {p.clamped(node, dimension)}", differences),
            function([self.gap], lambda p: f"g.{self.field[self.gap]} = {p.expression(self.gap)}", {loads[0]: Printer.stored("entry", node.type)}),
            f"p.capture_{slot}_stride_{dimension}",
        )  # fmt: skip

    def _direction(self, i: int) -> int:
        """1 or -1: where node i changes as q - k grows by 1, it changes by this; 0: not known to."""
        node, uniform = self.form.nodes[i], lambda a: not self.form.depends[a] & {"q", "k"}
        if node.op == "sub" and [self.form.nodes[a].op for a in node.args] == ["q", "k"]:
            return 1
        if node.type not in (INT, LONG):
            return 0
        if node.op in ("neg", "cast"):
            return self._direction(node.args[0]) * (-1 if node.op == "neg" else 1)
        if node.op in ("add", "sub", "minimum", "maximum") and sum(map(uniform, node.args)) == 1:
            (inner,) = (a for a in node.args if not uniform(a))
            return self._direction(inner) * (-1 if node.op == "sub" and inner == node.args[1] else 1)
        return 0

    def read(self, stage: str, root: int) -> list[str]:
        """The fields of a stage that the innermost function of ``root`` reads."""
        inner = {i for i in self.form.reachable(root) if self.home[i] is None} if root >= 0 else set()
        return sorted({self.field[a] for i in inner for a in self.form.nodes[i].args if a in self.field and self.home[a] == stage})

    def behind(self, stage: str, root: int) -> list[str]:
        """The fields of a stage that ``root`` is made of."""
        return [self.field[i] for i in sorted(self.form.reachable(root)) if self.home.get(i) == stage and i in self.field]

    def _storable(self, i: int) -> bool:
        return self.home[i] is not None and self.form.nodes[i].op not in ("const", "number", *_LEAVES)

    def _name(self, i: int, inside: str | None, *, steps: bool = False) -> str | None:
        node = self.form.nodes[i]
        if node.op in _LEAVES:
            return _LEAVES[node.op]
        if steps and node.op == "sub" and [self.form.nodes[a].op for a in node.args] == ["q", "k"]:
            return "(d + step)"
        stage = self.home.get(i)
        if i in self.field and stage != inside and (stage != "gap" or steps):
            return f"{str(stage)[0]}.{self.field[i]}"
        return None

    def function(self, roots: list[int], finish, *, steps: bool = False, near: frozenset[int] = frozenset()) -> list[str]:  # type: ignore[no-untyped-def]
        """The body of a function; with ``steps`` it is given q - k as d + step, as a score of q . k is. ``near``: tanh of small arguments."""
        printer = Printer(self.form, self.real, lambda i: self._name(i, None, steps=steps), self.exact, narrow=self.raw, near=near)
        lines = list(printer.statements(roots))
        return lines + finish(printer)


_TILE = {
    "b": "fg::Span{u.b, u.b}", "h": "fg::Span{u.h, u.h}", "q": "fg::Span{q_first, q_last}", "k": "fg::Span{k_first, k_last}",
    "q_len": "fg::Span{u.lens.q_len, u.lens.q_len}", "kv_len": "fg::Span{u.lens.kv_len, u.lens.kv_len}", "heads": "fg::Span{p.heads, p.heads}",
}  # fmt: skip


def _axis(axis: str, tables: Tables) -> tuple[str, PrintedSpans]:
    """The length of an axis, and spans over all of it."""
    length = "u.lens.kv_len" if axis == "k" else "u.lens.q_len"
    return length, PrintedSpans({**_TILE, axis: f"fg::Span{{0, {length} - 1}}"}, tables)


def _parts(form: Form, axis: str) -> tuple[Any, ...]:
    return ranges.several(ranges.axis_bounds(form, axis))


def _stepped(form: Form, tables: Tables, x: ranges.Listed) -> bool:
    return bounds.stepped(x.size, tables.get(form.nodes[x.node].data))


def _jump(form: Form, tables: Tables, axis: str, way: str) -> list[str]:
    """Body of kv_from, kv_before or q_from: over the holes between the ranges and the explicit blocks of a tile. Empty where there are neither.

    way: "from" (to the first index that is not below one) or "before" (to the end of the last one below).
    """
    parts = _parts(form, axis)
    length, spans = _axis(axis, tables)
    evaluator, found = Evaluator(form, spans), []
    within, at = {"from": ("first_from", "begin"), "before": ("end_before", "end")}[way]
    for part in parts:
        blocks = [_blocks(form, tables, x, evaluator, spans) for x in ranges.lists(part) if _stepped(form, tables, x)]
        limits = spans.keep(f"fg::range_within({ranges.axis_span(part, evaluator, spans)}, {length})")
        place = f"fg::{within}({limits}, {at})"
        for text in blocks:  # a step along the blocks may leave the range again
            place = f"fg::{within}({limits}, {spans.keep(f'fg::blocks_{way}({text}, {spans.keep(place)})')})"
        found.append((place, bool(blocks)))
    if len(found) == 1 and not found[0][1]:
        return []
    result = found[0][0]
    for other, _ in found[1:]:
        result = f"fg::{'int_min' if way == 'from' else 'int_max'}({result}, {other})"
    return [*spans.lines, f"return {result};"]


def _blocks(form: Form, tables: Tables, x: ranges.Listed, evaluator: Evaluator, spans: PrintedSpans) -> str:
    """The arguments that say where explicit blocks lie: entries, the lines of blocks that the tile meets, the entries of a line, the size of a block."""
    node = form.nodes[x.node]
    slot, count, blocked = node.data, len(node.args), tables.get(node.data, 0)
    axes, step = {}, "1"
    for d in reversed(range(count)):
        size, index = f"p.capture_{slot}_size_{d}", evaluator.as_integer(node.args[d])
        if d >= count - blocked:  # an entry of the table of largest entries: not 0 if one of its block is not
            size, index = f"fg::blocks({size})", f"fg::span_floordiv({index}, fg::Span{{fg::TABLE_BLOCK, fg::TABLE_BLOCK}})"
        axes[d] = f"fg::Axis{{{index}, {size}, {step if blocked else f'p.capture_{slot}_stride_{d}'}}}"
        step = f"(long long){size}" if step == "1" else f"{step} * {size}"
    entries = f"p.{'most' if blocked else 'capture'}_{slot}"
    for d in range(count):
        if d not in (x.place, x.line):
            entries = spans.keep(f"fg::first_entry({entries}, {axes[d]})")
    line = axes[x.line] if x.line >= 0 else "fg::Axis{fg::Span{0, 0}, 1, 0}"
    return ", ".join([entries, *(spans.keep(a) for a in (line, axes[x.place])), "fg::TABLE_BLOCK" if blocked else str(x.size)])


def _range(form: Form, tables: Tables, axis: str) -> list[str]:
    """Body of kv_range (axis k) or q_range (axis q)."""
    limits, (length, spans) = ranges.axis_bounds(form, axis), _axis(axis, tables)
    if limits == ranges.UNBOUNDED:
        return [f"return fg::Range{{0, {length}}};"]
    total = ranges.axis_span(limits, Evaluator(form, spans), spans)
    return [*spans.lines, f"return fg::range_within({total}, {length});"]


def _tile_class(form: Form, tables: Tables) -> list[str]:
    if form.mask < 0:
        return []
    spans = PrintedSpans(_TILE, tables)
    truth = Evaluator(form, spans).span(form.mask)
    return [*spans.lines, f"return {truth}.must ? fg::FULL : {truth}.may ? fg::PARTIAL : fg::EMPTY;"]
