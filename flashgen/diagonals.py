"""Diagonals: captured tensors whose gradient needs only the sums of d loss / d score along the diagonals of a tile, where q - k is the same.

Form -> capture slots. Example: ``slots(form) == (0,)`` for ``relative_bias(table)``, whose entry is chosen by q - k and added to the score.
"""

from __future__ import annotations

from . import derivative
from .form import Form
from .language import INT

_STEPS = {"q": (1, 0), "k": (0, 1)}  # how an index grows with q and with k


def slots(form: Form) -> tuple[int, ...]:
    """Slots each of whose loads is chosen, and enters the score, by b, h and q - k alone, where the score is s plus something without s."""
    if form.score < 0:
        return ()
    graph = derivative.Graph(form)
    slope = graph.nodes[derivative.score_slope(graph)]
    if (slope.op, slope.data) != ("const", 1.0):
        return ()
    every = tuple(range(len(form.captures)))
    gradients = derivative.load_slopes(graph, every)
    extended = graph.extended()
    constant = _constant_on_diagonals(extended)
    others = {extended.nodes[load].data for load, g in gradients if not {g, *extended.nodes[load].args} <= constant}
    return tuple(sorted({extended.nodes[load].data for load, _ in gradients} - others))


def _constant_on_diagonals(form: Form) -> set[int]:
    """Nodes that are the same for all (q, k) with the same q - k."""
    steps: dict[int, tuple[int, int]] = {}  # of sums of ints
    found: set[int] = set()
    for i, node in enumerate(form.nodes):
        if not form.depends[i] & {"q", "k", "s"}:
            steps[i] = (0, 0)
        elif node.op in _STEPS:
            steps[i] = _STEPS[node.op]
        elif node.op in ("add", "sub", "neg") and node.type == INT and all(a in steps for a in node.args):
            first, *second = (steps[a] for a in node.args)
            sign = -1 if node.op == "sub" else 1
            steps[i] = (-first[0], -first[1]) if node.op == "neg" else (first[0] + sign * second[0][0], first[1] + sign * second[0][1])
        if sum(steps.get(i, (1, 0))) == 0 or (node.op not in ("q", "k", "s") and node.args and all(a in found for a in node.args)):
            found.add(i)
    return found
