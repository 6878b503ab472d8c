"""Typed expressions: the nodes that a traced function builds, and the captured tensors that it indexes.

What a user writes as an operand -> Expr. Example: ``wrap(3)`` is a run-time number, ``as_captured(t)[q]`` one load.
The operations themselves are ``operations``; it fills FUNCTIONS and gives the classes here their operators.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from .capture import BOOL, INT, LONG, SINGLE, STORAGE, Capture, is_tensor, known, tracer
from .errors import DtypeError, FlashgenError, VariantError

MAX_UNROLLED = 256  # longest trailing dimension of a partly indexed tensor that is unrolled into a sum

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # torch's name of a function or method -> its traced twin
OPERATORS: dict[str, Callable[..., Any]] = {}  # "__add__" -> its traced twin
_NUMPY_OPERATORS = {"equal": "eq", "power": "pow", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift"} | {
    name: name
    for name in (
        "add", "subtract", "multiply", "divide", "floor_divide", "remainder", "not_equal", "less", "less_equal", "greater", "greater_equal",
        "bitwise_and", "bitwise_or", "bitwise_xor",
    )
}  # fmt: skip


class UnknownAttribute(VariantError, AttributeError):
    """A method that traced values lack. Also an AttributeError, so that ``hasattr`` answers False."""


def as_captured(x: Any, expect: tuple | None = None) -> Indexed:
    """The indexable proxy of a captured tensor or Input inside a trace."""
    if isinstance(x, Indexed):
        return x
    if tracer.captures is None or tracer.inputs is None:
        raise VariantError("captured tensors can be indexed only inside a score or mask function that flashgen traces.")
    capture = known(x)
    if capture is None:
        if isinstance(x, Input):
            # two Inputs of one name are one tensor
            capture = next((c for _, c in tracer.captures if c.name == x.name), None)
            capture = capture or Capture(tracer.inputs.get(x.name), name=x.name, ndim=x.ndim, expect=expect)
            if capture.ndim != x.ndim:
                raise VariantError(f"flashgen.input({x.name!r}, ndim={x.ndim}): the tensor has {capture.ndim} dimensions.")
        else:
            capture = Capture(x, expect=expect)
        tracer.captures.append((x, capture))
    if capture.dtype not in STORAGE:
        raise DtypeError(f"captured tensor of dtype {capture.dtype}: supported are {', '.join(STORAGE)}. Convert it before capturing.")
    return Indexed(capture, (None,) * capture.ndim)


def _refuse(message: str) -> Callable[..., NoReturn]:
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise VariantError(message)

    return method


class Operand:
    """What all traced values share: torch functions and methods are looked up in FUNCTIONS, and what needs a value now is refused."""

    __slots__ = ()
    if TYPE_CHECKING:  # given by operations
        __add__: Any
        __sub__: Any
        __mul__: Any
        __ge__: Any

    __hash__ = object.__hash__
    __bool__ = _refuse(
        "a traced value has no truth value: the function is traced once with symbols. Write torch.where(cond, a, b) instead of `if`, "
        "`&`, `|`, `~` instead of `and`, `or`, `not`, and (a <= x) & (x <= b) instead of a chained comparison. "
        "Put comparisons beside `&` and `|` in parentheses, (a <= b) & (c < d): without them `&` comes first."
    )
    __int__ = __float__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = item = tolist = numpy = _refuse(
        "a traced value is not a Python number: use torch functions (torch.exp, torch.floor) in place of math.*, int() or float(), "
        "and index torch tensors rather than lists or numpy arrays."
    )
    __iter__ = _refuse("a traced value cannot be iterated over or used as a range: loops must run over Python numbers.")
    __len__ = _refuse("a traced value is a scalar and has no length.")
    __getitem__ = _refuse("a traced value is a scalar and cannot be indexed.")
    __setitem__ = _refuse("a traced value cannot be assigned into: score and mask functions are pure. Use torch.where.")
    __array__ = _refuse("numpy on a traced value: index a torch tensor, torch.from_numpy(table)[...], and use torch functions.")
    __array_function__ = _refuse("numpy on a traced value: use the torch function of the same name.")
    __matmul__ = __rmatmul__ = _refuse("@ on a traced value: scores are computed one by one; write (a * b).sum(-1) over a short dimension.")

    def __format__(self, specification: str) -> str:
        return repr(self)  # print while tracing, whatever the precision asked for

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = _NUMPY_OPERATORS.get(ufunc.__name__)
        if method != "__call__" or kwargs or name is None or any(type(x).__name__ == "ndarray" for x in inputs):
            raise VariantError(f"numpy.{ufunc.__name__} on a traced value: use torch.{ufunc.__name__}.")
        return FUNCTIONS[name](*inputs)  # a numpy number beside an operator

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call_torch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS or name.startswith("__"):
            if is_in_place(name):
                raise UnknownAttribute(f"{name} writes in place: score and mask functions are pure. Use the method without the underscore.")
            raise UnknownAttribute(f"a traced value has no attribute {name!r}; {_close(name)}.")
        return lambda *args, **kwargs: _call(name, (self, *args), kwargs)


class Expr(Operand):
    """A typed node. ``data`` holds what is static in it: a constant, a capture."""

    __slots__ = ("args", "data", "kind", "op")

    def __init__(self, op: str, kind: str, args: tuple[Expr, ...] = (), data: Any = None):
        self.op, self.kind, self.args, self.data = op, kind, args, data

    @property
    def dtype(self) -> Any:
        import torch

        return {BOOL: torch.bool, INT: torch.int32, LONG: torch.int64}.get(self.kind, torch.float32)

    @property
    def device(self) -> Any:
        """The host: a scalar tensor made there serves any kernel."""
        import torch

        return torch.device("cpu")

    @property
    def shape(self) -> tuple:
        return ()

    @property
    def ndim(self) -> int:
        return 0

    def dim(self) -> int:
        return 0

    def size(self, *_: Any) -> Any:
        return ()

    def __repr__(self) -> str:
        return f"Expr({self.op}: {self.kind})"


class Vector(Operand):
    """A short dimension of a partly indexed tensor, unrolled."""

    __slots__ = ("items",)

    def __init__(self, items: list):
        self.items = items

    @property
    def dtype(self) -> Any:
        return self.items[0].dtype

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Vector(self.items[index])
        if isinstance(index, numbers.Integral) and not isinstance(index, bool) and -len(self.items) <= int(index) < len(self.items):
            return self.items[int(index)]
        raise VariantError(f"index {index!r}: the unrolled dimension of {len(self.items)} takes Python numbers and slices within it only.")


class Indexed(Operand):
    """A captured tensor with some dimensions indexed (Expr) and some left (None)."""

    __slots__ = ("capture", "indices")

    def __init__(self, capture: Capture, indices: tuple):
        self.capture, self.indices = capture, indices

    @property
    def dtype(self) -> Any:
        import torch

        return getattr(torch, self.capture.dtype)

    @property
    def shape(self) -> tuple:
        return tuple(n for n, i in zip(self.capture.sizes(), self.indices) if i is None)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        free = [d for d, i in enumerate(self.indices) if i is None]
        explicit = sum(1 for i in index if i is not Ellipsis)
        if explicit > len(free):
            raise VariantError(f"too many indices: {explicit} for {self._name()} with {len(free)} dimension(s) left.")
        if explicit < len(index):
            at = next(n for n, i in enumerate(index) if i is Ellipsis)
            index = index[:at] + (slice(None),) * (len(free) - explicit) + index[at + 1 :]
        if len(free) == 1 and isinstance(index[0], slice):
            return self.lower()[index[0]]
        indices = list(self.indices)
        for dim, i in zip(free, index):
            if isinstance(i, slice):
                if i != slice(None):
                    raise VariantError("slices of a tensor that is also indexed by symbols: only ':' is supported; slice it first, t[2:][q_idx].")
                continue
            indices[dim] = self._index(i, dim)
        result = Indexed(self.capture, tuple(indices))
        return result if any(i is None for i in indices) else result.scalar()

    def _index(self, i: Any, dim: int) -> Expr:
        if isinstance(i, bool) or i is None or i is Ellipsis:
            raise VariantError(f"index {i!r}: captured tensors are indexed by integers.")
        if isinstance(i, numbers.Integral):
            i = int(i)
            if i < 0 or self.capture.shape is not None:
                size = self.capture.sizes()[dim]
                if not -size <= i < size:
                    raise VariantError(f"index {i} is out of range for dimension {dim} of size {size} of a captured tensor.")
                i %= size
        e = wrap(i, static=True)
        if e.kind not in (INT, LONG):
            name = {SINGLE: "float32", BOOL: "bool"}.get(e.kind, "floating point")
            raise VariantError(f"index of type {name}: captured tensors are indexed by integers; use // in place of /, or convert with .to(torch.int32).")
        return e

    def _name(self) -> str:
        c = self.capture
        return f"flashgen.input({c.name!r}, ndim={c.ndim})" if c.name is not None else f"a captured tensor of shape {c.shape}"

    def lower(self) -> Any:
        """A scalar load if fully indexed, else the unrolled dimension that is left."""
        free = [d for d, i in enumerate(self.indices) if i is None]
        if not free:
            return self.scalar()
        if len(free) > 1:
            raise VariantError(f"{self._name()} is used with {len(free)} dimensions left: index it down to a scalar.")
        n = self.shape[0]
        if n > MAX_UNROLLED or n == 0:
            raise VariantError(f"a trailing dimension of {n} cannot be unrolled: the limit is {MAX_UNROLLED}. Precompute the product, or move it into q and k.")
        pick = lambda j: tuple(const(j) if i is None else i for i in self.indices)  # noqa: E731
        return Vector([Expr("load", self.capture.type, pick(j), self.capture) for j in range(n)])

    def scalar(self) -> Expr:
        left = sum(i is None for i in self.indices)
        if left:
            raise VariantError(f"{self._name()} is used as a number with {left} dimension(s) left: index all of its {self.capture.ndim}.")
        return Expr("load", self.capture.type, self.indices, self.capture)


class Input(Operand):
    """Stands for a tensor that is given at each call: ``kernel(q, k, v, inputs={name: tensor})``; see ``input``."""

    def __init__(self, name: str, ndim: int):
        self.name, self.ndim = name, ndim

    def __getitem__(self, index: Any) -> Any:
        return as_captured(self)[index]

    @property
    def dtype(self) -> Any:
        return as_captured(self).dtype

    @property
    def shape(self) -> tuple:
        return as_captured(self).shape

    def size(self, dim: int | None = None) -> Any:
        return as_captured(self).size(dim)


def input(name: str, *, ndim: int) -> Input:
    """A captured tensor whose value comes with each call: ``kernel(q, k, v, inputs={name: tensor})``.

    ndim is the tensor's rank; its dtype is that of the tensor given (a new dtype compiles a new kernel). Raises VariantError.
    """
    if not isinstance(name, str) or not name:
        raise VariantError("flashgen.input needs a name: flashgen.input('table', ndim=2).")
    if isinstance(ndim, bool) or not isinstance(ndim, numbers.Integral) or ndim < 0:
        raise VariantError(f"flashgen.input({name!r}, ndim={ndim!r}): the tensor's number of dimensions, an integer of at least 0, is wanted.")
    return Input(name, int(ndim))


def const(value: bool | int | float) -> Expr:
    """A value that decides the text: a divisor, an exponent, an infinity."""
    if isinstance(value, bool):
        return Expr("const", BOOL, (), value)
    if isinstance(value, int):
        return Expr("const", INT if -(2**31) <= value < 2**31 else LONG, (), value)
    return Expr("const", SINGLE, (), float(value))


def wrap(x: Any, *, static: bool = False) -> Expr:
    """Anything a user may write as an operand -> Expr. Numbers are run-time slots unless ``static``."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, (Indexed, Input)) or is_tensor(x):
        return as_captured(x).scalar()
    if isinstance(x, bool) or (type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_")):
        return const(bool(x))
    if isinstance(x, numbers.Integral):
        value = int(x)
        if not -(2**63) <= value < 2**63:
            raise VariantError(f"the integer {value} does not fit 64 bits.")
        # a large number is an int64 one, so that an index plus a number never wraps around
        return const(value) if static else Expr("number", INT if abs(value) < 2**30 else LONG, (), value)
    if isinstance(x, numbers.Real):
        try:
            real = float(x)
        except OverflowError:
            raise VariantError("a number beyond the range of float64 in a score or mask function.") from None
        return const(real) if static or not -math.inf < real < math.inf else Expr("number", SINGLE, (), real)
    if x is None or isinstance(x, slice):
        raise VariantError("a slice or None in a score or mask function: each index is one number for each (b, h, q_idx, kv_idx); reduce tensors beforehand.")
    raise VariantError(f"cannot use a value of type {type(x).__name__} in a score or mask function; numbers, tensors and traced values are supported.")


def cast(x: Expr, kind: str) -> Expr:
    if x.kind == kind:
        return x
    if x.op in ("number", "const") and not (x.op == "number" and kind == BOOL):
        if kind in (INT, LONG) and not math.isfinite(x.data):
            raise VariantError(f"{x.data} cannot be converted to an integer.")
        if kind == INT and not -(2**31) <= x.data < 2**31:
            raise VariantError(f"{x.data} does not fit an int32.")
        convert: Callable[[Any], Any] = {BOOL: bool, INT: int, LONG: int}.get(kind, float)
        return Expr(x.op, kind, (), convert(x.data))
    return Expr("cast", kind, (x,))


def is_in_place(name: str) -> bool:
    """torch's names of operations that write into their first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in OPERATORS)
    return name.endswith("_")


def _close(name: str) -> str:
    """What a user may have meant by a name that is not traced."""
    from difflib import get_close_matches

    found = get_close_matches(name, FUNCTIONS, cutoff=0.75)
    return f"close to it: {', '.join(found)}" if found else "torch's pointwise functions are supported (where, exp, tanh, clamp, minimum ...)"


def call_torch(func: Any, args: tuple, kwargs: dict) -> Any:
    """A torch function or tensor method called with at least one traced value."""
    return call_named(getattr(func, "__name__", str(func)), args, kwargs)


def call_named(name: str, args: tuple, kwargs: dict) -> Any:
    """``call_torch`` for the function of this name."""
    if name == "__getitem__":
        return as_captured(args[0])[args[1]]
    if is_in_place(name) or kwargs.pop("out", None) is not None:
        raise VariantError(f"{name} writes in place: score and mask functions are pure. Use torch.where, or the function that returns a new value.")
    name = name.removeprefix("special_")
    if name in OPERATORS:
        return OPERATORS[name](*args)
    if name not in FUNCTIONS:
        raise VariantError(f"torch.{name} cannot be traced in a score or mask function; {_close(name)}.")
    return _call(name, args, kwargs)


def _call(name: str, args: tuple, kwargs: dict) -> Any:
    try:
        return FUNCTIONS[name](*args, **kwargs)
    except FlashgenError:
        raise
    except TypeError as error:
        raise VariantError(f"torch.{name} with these arguments cannot be traced in a score or mask function: {error}.") from error
