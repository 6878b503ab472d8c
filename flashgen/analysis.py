"""Analysis: what can be proved of a form.

Form -> Facts. Example: ``analyze(form).kv_bounds`` for causal is one upper limit; ``facts.sentences`` says it in prose for ``explain``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import bounds, derivative, diagonals, ranges
from .form import Form
from .language import FLOATS
from .operations import UNARY_REAL

MAX_PROSE = 6  # operations nested in one term of a sentence
_INFIX = {  # sign, and how tightly it binds
    "or": ("or", 1), "and": ("and", 2), "lt": ("<", 3), "le": ("<=", 3), "gt": (">", 3), "ge": (">=", 3), "eq": ("==", 3), "ne": ("!=", 3),
    "add": ("+", 4), "sub": ("-", 4), "mul": ("*", 5), "floordiv": ("//", 5), "mod": ("%", 5), "div": ("/", 5),
}  # fmt: skip
_SHORT = {"minimum": "min", "maximum": "max"}


@dataclass(frozen=True)
class Facts:
    """Proved properties of a variant."""

    has_score: bool
    has_mask: bool
    kv_bounds: Any  # ranges.All | Any_ | Limit: the keys a row can see
    q_bounds: Any
    kv_prefix: bool  # without a mask, or as far as its form tells, a row that sees a key sees all before it
    kv_bounded: bool  # the loop over keys has a closed form on at least one side
    score_affine: bool  # score = a * s + c with a, c free of s
    score_ops: int  # operations per (query, key) pair in the score
    score_specials: int  # those of them that are functions such as tanh, for a GPU's special-function units
    mask_ops: int
    patterned: bool  # hardly a tile is full, see Form.patterned
    data_dependent: bool  # the mask reads captured tensors
    loads_per_pair: int  # captured loads that no stage can hoist
    kv_text: str  # kv_bounds in prose
    ranges: int  # into which the keys of a tile of rows may fall apart, 1 for one without holes
    listed: tuple[int, ...]  # capture slots that say which blocks are visible
    bounded: tuple[int, ...]  # capture slots whose bounds over a tile decide its class
    block: int  # size of the explicit blocks, 0 without any
    diagonal: tuple[int, ...]  # capture slots whose gradient is made of sums along q - k

    @property
    def sentences(self) -> list[str]:
        """What was proved, for a reader."""
        if not self.has_mask:
            text = ["No mask: every tile is full."]
        else:
            open_ = "No closed form for the keys of a row: every tile is classified by interval evaluation."
            how = " with the bounds of captured tensors over the tile" if self.data_dependent else ""
            text = [f"Keys of a row: {self.kv_text}." if self.kv_bounded else open_, f"Tiles are empty, full or partial by interval evaluation{how}."]
            if self.ranges > 1 or self.data_dependent:
                text.append(f"What is not visible is skipped by {', '.join(self.ways)}.")
        if self.has_score:
            shape = "a * s + c" if self.score_affine else "a general function of s"
            text.append(f"Score: {shape}, {self.score_ops} operations per pair, {self.loads_per_pair} of them loads.")
        return text

    @property
    def ways(self) -> list[str]:
        """How tiles without a visible key are passed over."""
        names = lambda slots: " and ".join(f"capture_{n}" for n in slots)  # noqa: E731
        found = [f"closed-form bounds in up to {self.ranges} ranges" if self.ranges > 1 else "closed-form bounds"] if ranges.limited(self.kv_bounds) else []
        found += [f"the explicit blocks of {names(self.listed)}"] if self.listed else []
        return found + ([f"classes of tiles from bounds of {names(self.bounded)}"] if self.bounded else [] if found else ["classes of tiles"])


def analyze(form: Form) -> Facts:
    """Prove what the tiler, the templates and explain rely on."""
    kv, q = ranges.axis_bounds(form, "k"), ranges.axis_bounds(form, "q")
    inner = lambda root: [  # noqa: E731 - nodes computed for every pair
        form.nodes[i] for i in form.reachable(root) if form.nodes[i].op not in ("s", "q", "k") and ("s" in form.depends[i] or {"q", "k"} <= form.depends[i])
    ]
    score, mask = inner(form.score), inner(form.mask)
    parts = ranges.several(kv)
    blocks = [x for p in parts for x in ranges.lists(p) if bounds.stepped(x.size, bounds.access(form).get(form.nodes[x.node].data))]
    listed = {form.nodes[x.node].data for x in blocks}
    loads = {
        form.nodes[i].data
        for i in form.reachable(form.mask)
        if form.nodes[i].op == "load" and form.nodes[i].type not in FLOATS and form.depends[i] & bounds.AXES
    }
    return Facts(
        has_score=form.score >= 0, has_mask=form.mask >= 0, kv_bounds=kv, q_bounds=q, kv_prefix=kv_prefix(form), kv_bounded=kv != ranges.UNBOUNDED,
        score_affine=_affine(form), score_ops=len(score), score_specials=sum(n.op in UNARY_REAL for n in score), mask_ops=len(mask),
        patterned=form.patterned,
        data_dependent=any(form.nodes[i].op == "load" for i in form.reachable(form.mask)),
        loads_per_pair=sum(n.op == "load" for n in score + mask), kv_text=describe(kv, "k", form), ranges=len(parts),
        listed=tuple(sorted(listed)), bounded=tuple(sorted(loads - listed)),
        block=max((x.size for x in blocks if x.size > 1), default=0), diagonal=diagonals.slots(form),
    )  # fmt: skip


def _affine(form: Form) -> bool:
    """d score / d s does not depend on s."""
    if form.score < 0:
        return True
    graph = derivative.Graph(form)
    slope = derivative.score_slope(graph)
    extended = graph.extended()
    return "s" not in extended.depends[slope]


def kv_prefix(form: Form) -> bool:
    """The mask is made of comparisons by "and" and "or" alone, each an upper limit of the key."""
    todo = [form.mask] if form.mask >= 0 else []
    while todo:
        i = todo.pop()
        if form.nodes[i].op in ("and", "or"):
            todo.extend(form.nodes[i].args)
            continue
        bounds = ranges.axis_bounds(replace(form, mask=i), "k")
        if not isinstance(bounds, ranges.Limit) or not bounds.upper:
            return False
    return True


def describe(bounds: Any, axis: str, form: Form, ints: Sequence[int] | None = None) -> str:
    """Bounds in prose: ``k <= q + kv_len - q_len``. Captured numbers stand by their values ``ints``, else by the names of the emitted text."""
    match bounds:
        case ranges.Limit(upper, terms, constant, divisor):
            inside = _sum(terms, constant, form, ints)
            inside = inside if divisor == 1 else f"({inside}) / {divisor}"
            return f"{axis} {'<=' if upper else '>='} {inside}"
        case ranges.Gate(node, wanted):
            return f"any {axis} where {'' if wanted else 'not '}{_term(form, node, ints)}"
        case ranges.Listed(node):
            return f"{axis} in a block of {_term(form, node, ints)}"
        case ranges.All(parts):
            return " and ".join(dict.fromkeys(describe(p, axis, form, ints) for p in parts)) or f"any {axis}"
        case ranges.Any_(parts):
            return "(" + " or ".join(dict.fromkeys(describe(p, axis, form, ints) for p in parts)) + ")"
    raise TypeError(bounds)


def _sum(terms: tuple[tuple[int, int], ...], constant: int, form: Form, ints: Sequence[int] | None) -> str:
    text = ""
    for factor, node in sorted(terms, key=lambda t: -t[0]):
        if ints is not None and form.nodes[node].op == "number":
            constant += factor * ints[form.nodes[node].data]
            continue
        sign = " - " if factor < 0 else " + " if text else ""
        text += f"{sign}{_term(form, node, ints, 4) if abs(factor) == 1 else f'{abs(factor)} * {_term(form, node, ints, 6)}'}"
    if constant or not text:
        text += f" {'+' if constant > 0 else '-'} {abs(constant)}" if text else str(constant)
    return text.strip()


def _term(form: Form, i: int, ints: Sequence[int] | None, outer: int = 0, depth: int = 0) -> str:
    """A node in prose, in parentheses where it binds less tightly than ``outer``."""
    node = form.nodes[i]
    if depth > MAX_PROSE:
        return "..."
    match node.op:
        case "number" if node.type not in FLOATS:
            return f"int_{node.data}" if ints is None else str(ints[node.data])
        case "number":
            return f"float_{node.data}"
        case "load":
            return f"capture_{node.data}[{', '.join(_term(form, a, ints, 0, depth + 1) for a in node.args)}]"
        case "const":
            return str(node.data)
        case op if op in _INFIX:
            sign, binds = _INFIX[op]
            first, second = (_term(form, a, ints, binds + n, depth + 1) for n, a in enumerate(node.args))  # a - (b - c), a // (b // c)
            return f"({first} {sign} {second})" if binds < outer else f"{first} {sign} {second}"
    return f"{_SHORT.get(node.op, node.op)}({', '.join(_term(form, a, ints, 0, depth + 1) for a in node.args)})" if node.args else node.op
