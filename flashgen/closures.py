"""What a score or mask function reads: decides whether an earlier trace of the same code still holds.

Function -> a key without tensors, and the tensors. Example: two closures of one lambda over tables of one shape have equal keys, so the second
is not traced again: the trace is given the second's tables. A function that reads anything else that may change (attributes of an object, of a
user's module) has no key and is traced at each call, about a millisecond; its kernel is found by its Form all the same.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import language as lang
from .errors import VariantError
from .form import Traced
from .variant import Mask, Score, Variant

MAX_TRACES = 256  # the least recently used goes first; a trace holds expressions and code objects, never a tensor
_VALUES = (type(None), bool, int, str, bytes, type(Ellipsis), torch.dtype, torch.device)
_STATIC = ("torch", "math", "operator", "functools", "builtins", "numpy", "flashgen", "itertools", "collections")  # whose functions do not change


class Unknown(Exception):
    """Something is read of which no change would be seen."""


class Reader:
    """Keys of values; ``tensors`` are those met, by the name of the variable that held them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._functions: dict[int, int] = {}

    def key(self, x: Any, name: str = "tensor") -> Hashable:
        kind = type(x)
        if kind in _VALUES:
            return kind, x
        if kind is float:
            return kind, x.hex()  # -0.0 is not 0.0, a NaN equals itself
        if isinstance(x, Tensor):
            return self._name(x, name), x.dtype, tuple(x.shape)
        if kind is types.FunctionType:
            return self._function(x)
        if kind in (tuple, list):
            return kind, *[self.key(y, name) for y in x]
        if kind is functools.partial:
            return "partial", self.key(x.func), self.key(x.args), *[(n, self.key(y, n)) for n, y in sorted(x.keywords.items())]
        if kind is Mask:
            return "mask", self.key(x.function)
        if kind is Score:
            return "score", self.key(x.function), self.key(x.mask)
        if kind is lang.Expr:
            return "expression", x.op, x.kind, self.key(x.data), *[self.key(a) for a in x.args]
        if isinstance(x, (types.ModuleType, types.BuiltinFunctionType, type)):
            module = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
            if module is None or module.split(".")[0] in _STATIC:
                return "static", x
        raise Unknown

    def _name(self, x: Tensor, name: str) -> str:
        for known, t in self.tensors.items():
            if t is x:
                return known
        name = name if name not in self.tensors else f"{name} {len(self.tensors)}"
        self.tensors[name] = x
        return name

    def _function(self, f: types.FunctionType) -> Hashable:
        if f.__module__ and f.__module__.split(".")[0] in ("torch", "math", "operator", "functools"):
            return "static", f
        if id(f) in self._functions:
            return "again", self._functions[id(f)]
        self._functions[id(f)] = len(self._functions)
        cells = [self._cell(c, n) for c, n in zip(f.__closure__ or (), f.__code__.co_freevars)]
        read = [(n, self.key(f.__globals__[n], n)) for n in sorted(set(_names(f.__code__))) if n in f.__globals__]
        defaults = [(n, self.key(v, n)) for n, v in sorted((f.__kwdefaults__ or {}).items())]
        return f.__code__, *cells, *read, *defaults, *[self.key(v, "default") for v in f.__defaults__ or ()]

    def _cell(self, cell: Any, name: str) -> Hashable:
        try:
            return self.key(cell.cell_contents, name)
        except ValueError:  # not assigned yet
            return "empty"


def _names(code: types.CodeType) -> Iterator[str]:
    """Every name that the code or a function within it may look up as a global; attributes' names are among them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_traces: OrderedDict[Hashable, Traced] = OrderedDict()
_lock = threading.Lock()


def traced(score: Callable[..., Any] | None, mask: Callable[..., Any] | None) -> tuple[Traced, dict[str, Tensor]]:
    """The trace of a score and a mask function, and the tensors that its captures name (none where the captures hold them)."""
    reader = Reader()
    try:
        key = reader.key(score), reader.key(mask)
    except Unknown:
        return _trace(score, mask)[0], {}
    with _lock:
        found = _traces.pop(key, None)
        if found is not None:
            _traces[key] = found  # now the latest
            return found, reader.tensors
    found, volatile = _trace(score, mask)
    if volatile or not _name_captures(found, reader.tensors):
        return found, {}
    with _lock:
        _traces[key] = found
        if len(_traces) > MAX_TRACES:
            _traces.popitem(last=False)
    return found, reader.tensors


def _trace(score: Callable[..., Any] | None, mask: Callable[..., Any] | None) -> tuple[Traced, bool]:
    """A trace, and whether Python read the value of a tensor meanwhile, which may differ at the next call."""
    variant = Variant(score=score, mask=mask)
    if variant.inputs:
        raise VariantError(f"flashgen.input ({', '.join(variant.inputs)}) in flex_attention: capture the tensor itself, it is read at each call.")
    return variant.plain, variant.volatile


def _name_captures(trace: Traced, tensors: dict[str, Tensor]) -> bool:
    """Captures hold names in place of tensors, so that the trace serves others; False, and nothing changed, where one is none of ``tensors``."""
    named: list[tuple[lang.Capture, str]] = []
    derived: dict[int, tuple[lang.Capture, tuple]] = {}

    def name(t: Tensor) -> str:
        for known, other in tensors.items():
            if other is t:
                return known
        raise Unknown

    def visit(x: Any) -> Any:
        if isinstance(x, lang.Capture):
            if x.recipe is None:
                named.append((x, name(x.tensor)))
            elif id(x) not in derived:
                function, args, kwargs = x.recipe
                derived[id(x)] = x, (function, visit(args), {n: visit(y) for n, y in kwargs.items()})
            return x
        if isinstance(x, Tensor):
            return lang.Capture(name=name(x), ndim=x.dim())
        return type(x)(visit(y) for y in x) if type(x) in (tuple, list) else x

    try:
        for capture in trace.captures:
            visit(capture)
    except Unknown:
        return False
    for capture, known in named:
        capture.name, capture.tensor = known, None
    for capture, recipe in derived.values():
        capture.recipe, capture.tensor = recipe, None
    return True
