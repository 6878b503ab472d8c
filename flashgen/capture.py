"""Captured tensors: what a trace has met, by reference, by name, or derived; and the types of their elements.

Tensor -> Capture. Example: ``Capture(table).type`` is "real" for a bfloat16 table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import VariantError

BOOL, INT, LONG, SINGLE, REAL = "bool", "int", "long", "single", "real"
# SINGLE is float32 always (int / int, a number times an index); REAL is float32, or float64 for float64 inputs (scores, captured floats)
RANK = {BOOL: 0, INT: 1, LONG: 2, SINGLE: 3, REAL: 4}
FLOATS = (SINGLE, REAL)
STORAGE = {
    "bool": BOOL, "uint8": INT, "int8": INT, "int16": INT, "int32": INT, "int64": LONG,
    "float16": REAL, "bfloat16": REAL, "float32": REAL, "float64": REAL,
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """``torch.float32`` or ``"float32"`` -> ``"float32"``."""
    return str(dtype).rsplit(".", 1)[-1]


class Capture:
    """A tensor a function indexes: captured by reference, named by ``input``, or derived from captured tensors by torch operations.

    ``expect`` names what each dimension must measure ("B", "H", "Q", "K", a number, or None), checked at each call. ``recipe`` is
    (function, args, kwargs) of a derived one. ``consumed`` says that Python used its sizes, so that other sizes need another trace.
    """

    def __init__(self, tensor: Any = None, *, name: str | None = None, ndim: int = 0, expect: tuple | None = None, recipe: tuple | None = None):
        self.tensor: Any = tensor if name is None else None  # an input's tensor belongs to one call
        self.name, self.expect, self.recipe, self.consumed = name, expect, recipe, False
        self.dtype = dtype_name(tensor.dtype) if tensor is not None else "float32"
        self.ndim = tensor.dim() if tensor is not None else ndim
        self.shape: tuple[int, ...] | None = tuple(tensor.shape) if tensor is not None else None

    @property
    def type(self) -> str:
        return STORAGE[self.dtype]

    def sizes(self) -> tuple[int, ...]:
        """The shape, for use by Python while tracing."""
        if self.shape is None:
            raise VariantError(f"the sizes of flashgen.input({self.name!r}) are not known before a call gives its tensor.")
        self.consumed = True
        return self.shape

    def fits(self, t: Any) -> bool:
        """Whether the trace holds for this tensor: a captured one can change under its name (``module.half()``, ``parameter.data = ...``)."""
        if STORAGE.get(dtype_name(t.dtype)) != self.type or t.dim() != self.ndim:
            return False
        if self.consumed or self.expect is not None:
            for now, then in zip(t.shape, self.shape or t.shape):
                if now != then and (self.consumed or 1 in (now, then)):
                    return False
        return True

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        if self.recipe is not None:
            state["tensor"] = None  # derived anew from its recipe; a non-leaf tensor cannot be copied
        return state


class Tracer(threading.local):
    """What one trace has captured so far."""

    captures: list[tuple[Any, Capture]] | None = None  # each with its tensor or Input
    inputs: dict[str, Any] | None = None
    read = False  # whether Python consumed the value of a tensor, which may differ at the next call


tracer = Tracer()


def known(x: Any) -> Capture | None:
    """The capture of a tensor or Input that this trace has met. Compared by ``is``: Dynamo knows no id of an intermediate tensor."""
    for held, capture in tracer.captures or []:
        if held is x:
            return capture
    return None


def is_tensor(x: Any) -> bool:
    return hasattr(type(x), "__torch_function__") and hasattr(type(x), "data_ptr")


def resolve(captures: Iterable[Capture], inputs: Mapping[str, Any], device: Any) -> list[Any]:
    """The tensors of this call: captured ones as they are now, inputs as given, derived ones computed anew."""
    memo: dict[int, Any] = {}
    found = [_replay(c, inputs, memo) for c in captures]
    return [t.to(device) if t.dim() == 0 and t.device.type == "cpu" and device.type != "cpu" else t for t in found]


def _replay(capture: Capture, inputs: Mapping[str, Any], memo: dict[int, Any]) -> Any:
    if capture.name is not None:
        return inputs[capture.name]
    if capture.recipe is None:
        return capture.tensor
    if id(capture) not in memo:
        function, args, kwargs = capture.recipe

        def fresh(x: Any) -> Any:
            if isinstance(x, Capture):
                return _replay(x, inputs, memo)
            return type(x)(fresh(y) for y in x) if type(x) in (list, tuple) else x

        memo[id(capture)] = function(*fresh(args), **{n: fresh(x) for n, x in kwargs.items()})
    return memo[id(capture)]
