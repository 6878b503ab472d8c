"""Bounds of captured tensors over a tile: how the integers that a mask loads are read when whole tiles are classified.

Form, Problem -> access per capture slot. Example: of ``document(ids)`` the ids get a table of their least and largest entries per BLOCK of
neighbours, made on the device before the pass, so that a tile reads a few entries whatever its size; ``block_sparse(blocks, 128)`` is read as it lies.
"""

from __future__ import annotations

from .form import Form
from .language import BOOL, INT, LONG
from .problem import Problem

BLOCK = 32  # neighbours of one entry of a table along each of its axes; TABLE_BLOCK of fg/interval.h
COARSE = 16  # an index that is divided by at least so much meets few entries within a tile
AXES = frozenset("qk")


def access(form: Form) -> dict[int, int]:
    """Capture slot -> trailing dimensions along which a tile meets many entries: 0 (read as they lie), 1 or 2. Others have no entry."""
    found: dict[int, int | None] = {}
    for i in sorted(form.reachable(form.mask)):
        node = form.nodes[i]
        if node.op != "load" or node.type not in (INT, LONG, BOOL) or len(node.args) > 4:
            continue
        varying = [bool(form.depends[a] & AXES) for a in node.args]
        dense = [v and not _coarse(form, a) for v, a in zip(varying, node.args)]
        count = sum(dense)
        trailing = count <= 2 and all(dense[len(dense) - count :]) and (count == 0 or not any(varying[: len(dense) - count]))
        known = found.setdefault(node.data, count if trailing else None)
        if known != count or not trailing:
            found[node.data] = None
    return {slot: count for slot, count in found.items() if count is not None}


def stepped(size: int, blocked: int | None) -> bool:
    """Whether explicit blocks of ``size`` are stepped along: as they lie, or single entries through a table of ``blocked`` dimensions."""
    return size == 1 if blocked else size >= COARSE


def tables(form: Form, problem: Problem) -> dict[int, int]:
    """Capture slots that have a table in this pass -> its blocked trailing dimensions. Calls with few keys scan the tensors themselves."""
    return {slot: count for slot, count in access(form).items() if count} if problem.size == "long" else {}


def _coarse(form: Form, i: int) -> bool:
    """Whether an index is a quotient by at least COARSE."""
    node = form.nodes[i]
    while node.op == "cast":
        node = form.nodes[node.args[0]]
    if node.op != "floordiv":
        return False
    divisor = form.nodes[node.args[1]]
    return divisor.op == "const" and divisor.data >= COARSE
