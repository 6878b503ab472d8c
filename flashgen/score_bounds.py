"""Score bounds: the values that a score can take, whatever q . k is, by interval arithmetic with the numbers of a call.

Form, captured numbers -> ScoreBounds. Example: of ``softcap(30.0)`` the magnitude is 30 and the factor that can be taken out, 30, is positive.
A kernel for a bounded score needs no running maximum: its exponentials neither overflow nor all vanish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from .form import Form
from .language import FLOATS
from .rewrite import multiply_by_reciprocals, unscaled

Interval = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)
# Up to this magnitude (natural units; 80 in powers of two) weights e^score, their sums over 2^24 keys and sums with values up to 2^22 lie within
# float32 and bfloat16.
MOST = 55.0


class ScoreBounds(NamedTuple):
    magnitude: float  # no score is further from 0; math.inf if unknown
    positive_gain: bool  # the score has a factor that is the same for a whole head and above 0 (see ``rewrite.unscaled``)


def _product(a: Interval, b: Interval) -> Interval:
    if math.inf in (*map(abs, a), *map(abs, b)):
        return ANY
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _quotient(a: Interval, b: Interval) -> Interval:
    return ANY if b[0] <= 0.0 <= b[1] else _product(a, (1.0 / b[1], 1.0 / b[0]))


def _absolute(a: Interval) -> Interval:
    return (0.0 if a[0] <= 0.0 <= a[1] else min(abs(a[0]), abs(a[1]))), max(abs(a[0]), abs(a[1]))


def _exponential(a: Interval) -> Interval:
    return math.exp(min(a[0], 700.0)), (math.exp(a[1]) if a[1] < 700.0 else math.inf)


def _sum(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


_RULES: dict[str, Callable[..., Interval]] = {
    "add": _sum, "sub": lambda a, b: _sum(a, (-b[1], -b[0])), "mul": _product, "div": _quotient, "neg": lambda a: (-a[1], -a[0]), "abs": _absolute,
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])), "exp": _exponential,
    "where": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])), "cast": lambda a: a, "detach": lambda a: a, "fma": lambda a, b, c: _sum(_product(a, b), c),
    "tanh": lambda _: (-1.0, 1.0), "erf": lambda _: (-1.0, 1.0), "sin": lambda _: (-1.0, 1.0), "cos": lambda _: (-1.0, 1.0), "sigmoid": lambda _: (0.0, 1.0),
    "atan": lambda _: (-math.pi / 2, math.pi / 2),
}  # fmt: skip


def _interval(form: Form, root: int, floats: Sequence[float], scale: float) -> Interval:
    """Where node ``root`` lies; NaN, which spreads on its own, aside."""
    known: dict[int, Interval] = {}
    for i in sorted(form.reachable(root)):
        node = form.nodes[i]
        args = [known[a] for a in node.args]
        if node.type not in FLOATS:
            found = ANY
        elif node.op in ("const", "number", "scale"):
            value = node.data if node.op == "const" else scale if node.op == "scale" else floats[node.data]
            found = (value, value) if math.isfinite(value) else ANY
        else:
            found = _RULES[node.op](*args) if node.op in _RULES else ANY
        known[i] = found if found[0] <= found[1] else ANY
    return known[root]


def static_bounds(form: Form, floats: Sequence[float], scale: float) -> dict[str, bool]:
    """The fields of a forward Problem that these numbers decide."""
    found = score_bounds(form, tuple(floats), scale)
    return {"bounded": found.magnitude <= MOST, "positive_gain": found.positive_gain}


@lru_cache(maxsize=256)
def score_bounds(form: Form, floats: tuple[float, ...], scale: float) -> ScoreBounds:
    """What is proved of a score with these captured numbers."""
    if form.score < 0:
        return ScoreBounds(math.inf, False)
    made = unscaled(multiply_by_reciprocals(form), positive_gain=True)
    gain = _interval(made.form, made.gain, floats, scale) if made.gain >= 0 else ANY
    return ScoreBounds(max(map(abs, _interval(form, form.score, floats, scale))), gain[0] > 0.0)
