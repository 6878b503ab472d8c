"""Evaluate: a node of a Form on torch tensors, eagerly.

Form, symbols as broadcastable tensors -> Tensor. Example: ``evaluate(form, form.mask, {"q": rows, "k": columns, ...}, captures, floats, ints, torch.float32)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .form import Form
from .language import BOOL, FLOATS, INT, LONG, SINGLE

_TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.true_divide, "neg": torch.neg, "abs": torch.abs, "where": torch.where,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "floordiv": torch.floor_divide, "mod": torch.remainder,
    "fmod": torch.fmod, "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "pow": torch.pow, "atan2": torch.atan2, "sign": torch.sign,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "detach": torch.detach, "minimum": torch.minimum, "maximum": torch.maximum,
}  # fmt: skip
_DTYPE = {BOOL: torch.bool, INT: torch.int32, LONG: torch.int64, SINGLE: torch.float32}


def evaluate(form: Form, root: int, symbols: Mapping[str, Tensor], captures: list[Tensor], floats: tuple, ints: tuple, real: torch.dtype) -> Tensor:
    """A node's value for broadcastable symbol tensors (b, h, q, k, s, q_len, kv_len, heads)."""
    device = symbols["q"].device
    values: dict[int, Tensor] = {}
    scalar = lambda x, kind: torch.tensor(x, dtype=_DTYPE.get(kind, real), device=device)  # noqa: E731
    for i in sorted(form.reachable(root)):
        node = form.nodes[i]
        args = [values[a] for a in node.args]
        match node.op:
            case "const":
                values[i] = scalar(node.data, node.type)
            case "number":
                values[i] = scalar((floats if node.type in FLOATS else ints)[node.data], node.type)
            case "cast":
                values[i] = args[0].to(_DTYPE.get(node.type, real))
            case "load":
                t = captures[node.data]
                index = tuple(a.long().clamp(0, n - 1) for a, n in zip(args, t.shape))
                loaded = t[index] if index else t
                values[i] = loaded.to(_DTYPE.get(node.type, real))
            case "maximum" | "minimum" if node.data == "first" and node.type in FLOATS:
                better = (args[0] >= args[1]) if node.op == "maximum" else (args[0] <= args[1])
                values[i] = torch.where(better | args[0].isnan(), args[0], args[1])
            case "maximum" | "minimum" if node.data == "second" and node.type in FLOATS:
                better = (args[0] > args[1]) if node.op == "maximum" else (args[0] < args[1])
                values[i] = torch.where(better | args[0].isnan(), args[0], args[1])
            case op if op in symbols:
                values[i] = symbols[op]
            case op:
                values[i] = _TORCH.get(op, getattr(torch, op, None))(*args)  # type: ignore[misc]
    return values[root]
