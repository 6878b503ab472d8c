"""The tracing language: symbols b, h, q, k, s and typed expressions that FlexAttention-style functions build when called with them.

Python function -> Expr. Example: ``(q - k <= 1023) & (k <= q)`` on symbols is an Expr of type bool.
Every operation is a node of the user's own order; nothing is simplified, so floats keep their rounding and ``==`` means equality of values.
Numbers become run-time slots when added, multiplied or compared, and constants when they divide integers, shift, or are exponents.
"""

from __future__ import annotations

import builtins
import math
import numbers
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from .errors import DtypeError, VariantError

BOOL, INT, LONG, SINGLE, REAL = "bool", "int", "long", "single", "real"
# SINGLE is float32 always (int / int, a number times an index); REAL is float32, or float64 for float64 inputs (scores, captured floats)
_RANK = {BOOL: 0, INT: 1, LONG: 2, SINGLE: 3, REAL: 4}
FLOATS = (SINGLE, REAL)
_STORAGE = {
    "bool": BOOL, "uint8": INT, "int8": INT, "int16": INT, "int32": INT, "int64": LONG,
    "float16": REAL, "bfloat16": REAL, "float32": REAL, "float64": REAL,
}  # fmt: skip
MAX_UNROLLED = 256  # longest trailing dimension of a partly indexed tensor that is unrolled into a sum

UNARY_REAL = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "sigmoid",
)  # fmt: skip
ROUNDING = ("floor", "ceil", "trunc", "round")


def dtype_name(dtype: Any) -> str:
    """``torch.float32`` or ``"float32"`` -> ``"float32"``."""
    return str(dtype).rsplit(".", 1)[-1]


class Capture:
    """A tensor a function indexes: captured by reference, named by ``input``, or derived from captured tensors by torch operations.

    ``expect`` names what each dimension must measure ("B", "H", "Q", "K", a number, or None), checked at each call.
    """

    def __init__(self, tensor: Any = None, *, name: str | None = None, dtype: Any = None, ndim: int = 0, expect: tuple | None = None, recipe: tuple | None = None):
        self.tensor, self.name, self.expect, self.recipe = tensor, name, expect, recipe
        self.dtype = dtype_name(tensor.dtype if tensor is not None else dtype or "float32")
        self.ndim = tensor.dim() if tensor is not None else ndim
        self.shape: tuple[int, ...] | None = tuple(tensor.shape) if tensor is not None else None
        if self.dtype not in _STORAGE:
            raise DtypeError(f"captured tensor of dtype {self.dtype}: supported are {', '.join(_STORAGE)}. Convert it before capturing.")

    @property
    def type(self) -> str:
        return _STORAGE[self.dtype]

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        if self.recipe is not None:
            state["tensor"] = None  # derived anew from its recipe; a non-leaf tensor cannot be copied
        return state


class Input:
    """Stands for a tensor that is given at each call: ``kernel(q, k, v, inputs={name: tensor})``; see ``input``."""

    def __init__(self, name: str, ndim: int):
        self.name, self.ndim = name, ndim

    def __getitem__(self, index: Any) -> Any:
        return as_captured(self)[index]


def input(name: str, *, ndim: int) -> Input:  # noqa: A001 - the public name is flashgen.input
    """A captured tensor whose value comes with each call: ``kernel(q, k, v, inputs={name: tensor})``.

    ndim is the tensor's rank; its dtype is that of the tensor given (a new dtype compiles a new kernel).
    """
    if not isinstance(name, str) or not name:
        raise VariantError("flashgen.input needs a name: flashgen.input('table', ndim=2).")
    return Input(name, ndim)


class _Tracer(threading.local):
    """What one trace has captured so far; tensors are kept alive so that their ids stay theirs."""

    captures: dict[int, Capture] | None = None
    inputs: dict[str, Any] | None = None


_tracer = _Tracer()


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "__torch_function__") and hasattr(x, "data_ptr")


def as_captured(x: Any, expect: tuple | None = None) -> Indexed:
    """The indexable proxy of a captured tensor or Input inside a trace."""
    if _tracer.captures is None or _tracer.inputs is None:
        raise VariantError("captured tensors can be indexed only inside a score or mask function that flashgen traces.")
    if isinstance(x, Indexed):
        return x
    key = id(x)
    if key not in _tracer.captures:
        if isinstance(x, Input):
            given = _tracer.inputs.get(x.name)
            capture = Capture(given, name=x.name, ndim=x.ndim, expect=expect)
            if capture.ndim != x.ndim:
                raise VariantError(f"flashgen.input({x.name!r}, ndim={x.ndim}): the tensor given has {capture.ndim} dimensions.")
        else:
            capture = Capture(x, expect=expect)
        capture.keep = x  # type: ignore[attr-defined]
        _tracer.captures[key] = capture
    capture = _tracer.captures[key]
    return Indexed(capture, (None,) * capture.ndim)


class Expr:
    """A typed node. ``data`` holds what is static in it: a constant, a capture."""

    __slots__ = ("op", "type", "args", "data")

    def __init__(self, op: str, type: str, args: tuple[Expr, ...] = (), data: Any = None):  # noqa: A002
        self.op, self.type, self.args, self.data = op, type, args, data

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise VariantError(
            "a traced value has no truth value: the function is traced once with symbols. Write torch.where(cond, a, b) instead of `if`, "
            "`&`, `|`, `~` instead of `and`, `or`, `not`, and (a <= x) & (x <= b) instead of a chained comparison."
        )

    def _no_python_number(self, *_: Any) -> Any:
        raise VariantError("a traced value is not a Python number: use torch functions (torch.exp, torch.floor) in place of math.*, int() or float().")

    __int__ = __float__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = _no_python_number
    item = tolist = _no_python_number

    def __iter__(self) -> Any:
        raise VariantError("a traced value cannot be iterated over or used as a range: loops must run over Python numbers.")

    def __len__(self) -> int:
        raise VariantError("a traced value is a scalar and has no length.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        raise VariantError(f"numpy.{ufunc.__name__} on a traced value: use torch.{ufunc.__name__}.")

    def __getitem__(self, index: Any) -> Any:
        raise VariantError("a traced value is a scalar and cannot be indexed.")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise VariantError("a traced value cannot be assigned into: score and mask functions are pure.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call_torch(func, args, kwargs or {})

    @property
    def dtype(self) -> Any:
        import torch

        return {BOOL: torch.bool, INT: torch.int32, LONG: torch.int64}.get(self.type, torch.float32)

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

    def __getattr__(self, name: str) -> Any:
        function = FUNCTIONS.get(name)
        if function is None or name.startswith("__"):
            raise AttributeError(f"a traced value has no attribute {name!r}; supported methods: {', '.join(sorted(FUNCTIONS))}")
        return lambda *args, **kwargs: function(self, *args, **kwargs)

    def __repr__(self) -> str:
        return f"Expr({self.op}: {self.type})"


def leaf(op: str, type: str) -> Expr:  # noqa: A002
    return Expr(op, type)


B, H, Q, K, S = leaf("b", INT), leaf("h", INT), leaf("q", INT), leaf("k", INT), leaf("s", REAL)
q_len, kv_len, heads = leaf("q_len", INT), leaf("kv_len", INT), leaf("heads", INT)


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
    if isinstance(x, Indexed):
        return x.scalar()
    if isinstance(x, Input):
        return as_captured(x).scalar()
    if _is_tensor(x):
        return as_captured(x).scalar()
    if isinstance(x, bool) or type(x).__name__ == "bool_":
        return const(bool(x))
    if isinstance(x, numbers.Integral):
        value = int(x)
        if not -(2**63) <= value < 2**63:
            raise VariantError(f"the integer {value} does not fit 64 bits.")
        return const(value) if static else Expr("number", const(value).type, (), value)
    if isinstance(x, numbers.Real):
        real = float(x)
        return const(real) if static or not math.isfinite(real) else Expr("number", SINGLE, (), real)
    raise VariantError(f"cannot use a value of type {type(x).__name__} in a score or mask function; numbers, tensors and traced values are supported.")


def cast(x: Expr, type: str) -> Expr:  # noqa: A002
    if x.type == type:
        return x
    if x.op in ("number", "const") and not (x.op == "number" and type == BOOL):
        value = {BOOL: bool, INT: int, LONG: int, SINGLE: float, REAL: float}[type](x.data)  # type: ignore[operator]
        return Expr(x.op, type, (), value)
    return Expr("cast", type, (x,))


def _common(*xs: Expr, least: str = BOOL) -> tuple[str, tuple[Expr, ...]]:
    kind = max((x.type for x in xs), key=_RANK.__getitem__)
    kind = kind if _RANK[kind] >= _RANK[least] else least
    return kind, tuple(cast(x, kind) for x in xs)


def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply an operation element by element when an operand is a partly indexed tensor with one short dimension left."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        operands = [_lower(a) for a in args]
        lengths = {len(a.items) for a in operands if isinstance(a, Vector)}
        if not lengths:
            return function(*operands, **kwargs)
        if len(lengths - {1}) > 1:
            raise VariantError(f"partly indexed tensors of different trailing lengths {sorted(lengths)} cannot be combined.")
        n = max(lengths)
        pick = lambda a, i: (a.items[i] if len(a.items) > 1 else a.items[0]) if isinstance(a, Vector) else a  # noqa: E731
        return Vector([function(*(pick(a, i) for a in operands), **kwargs) for i in range(n)])

    return apply


def _lower(x: Any) -> Any:
    if isinstance(x, Input):
        x = as_captured(x)
    elif _is_tensor(x):
        x = as_captured(x)
    return x.lower() if isinstance(x, Indexed) else x


def _arith(op: str) -> Callable[[Any, Any], Any]:
    def function(a: Any, b: Any, *, alpha: Any = 1) -> Expr:
        if alpha != 1:
            b = mul(b, alpha)
        kind, (x, y) = _common(wrap(a), wrap(b))
        if kind == BOOL:
            if op == "sub":
                raise VariantError("subtraction of two booleans: use ^ or convert one with .to(torch.int32).")
            return Expr({"add": "or", "mul": "and"}[op], BOOL, (x, y))
        return Expr(op, kind, (x, y))

    return lifted(function)


def _compare(op: str) -> Callable[[Any, Any], Any]:
    def function(a: Any, b: Any) -> Expr:
        _, pair = _common(wrap(a), wrap(b))
        return Expr(op, BOOL, pair)

    return lifted(function)


def _bits(op: str) -> Callable[[Any, Any], Any]:
    def function(a: Any, b: Any) -> Expr:
        kind, pair = _common(wrap(a, static=True), wrap(b, static=True))
        if kind in FLOATS:
            raise VariantError(f"bitwise {op} of floating point values: compare first, `(a > 0) & (b > 0)`.")
        return Expr(op, kind, pair)

    return lifted(function)


def _logical(op: str) -> Callable[[Any, Any], Any]:
    return lifted(lambda a, b: Expr(op, BOOL, (truth(wrap(a)), truth(wrap(b)))))


def truth(x: Expr) -> Expr:
    """x != 0 as a bool."""
    return x if x.type == BOOL else Expr("ne", BOOL, (x, cast(const(0), x.type)))


def _shift(op: str) -> Callable[[Any, Any], Any]:
    def function(a: Any, b: Any) -> Expr:
        kind, pair = _common(wrap(a, static=True), wrap(b, static=True), least=INT)
        if kind in FLOATS:
            raise VariantError("shifts need integers.")
        if pair[1].op == "const" and not 0 <= pair[1].data < 63:
            raise VariantError(f"shift by {pair[1].data}: must be from 0 to 62.")
        return Expr(op, kind, pair)

    return lifted(function)


def _division(op: str) -> Callable[[Any, Any], Any]:
    """Floor division and floored modulus, as in Python and torch."""

    def function(a: Any, b: Any) -> Expr:
        b_static = not (isinstance(b, float))
        kind, pair = _common(wrap(a), wrap(b, static=b_static), least=INT)
        if pair[1].op == "const" and pair[1].data == 0:
            raise VariantError(f"{'//' if op == 'floordiv' else '%'} by zero.")
        return Expr(op, kind, pair)

    return lifted(function)


def _true_divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return floordiv(a, b)
    quotient = _float_op("div")(a, b)
    if rounding_mode == "trunc":
        integral = all(w.type not in FLOATS for w in (wrap(a), wrap(b)))
        if integral:
            kind, pair = _common(wrap(a), wrap(b, static=not isinstance(b, Expr)), least=INT)
            return Expr("truncdiv", kind, pair)
        return FUNCTIONS["trunc"](quotient)
    if rounding_mode is not None:
        raise VariantError(f"rounding_mode={rounding_mode!r}: None, 'floor' or 'trunc'.")
    return quotient


def _unary_real(op: str) -> Callable[[Any], Any]:
    return _float_op(op)


def _float_op(op: str) -> Callable[..., Any]:
    """An operation on floating point values; integers become float32."""

    def function(*args: Any) -> Expr:
        kind, operands = _common(*map(wrap, args), least=SINGLE)
        return Expr(op, kind, operands)

    return lifted(function)


def _rounding(op: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Expr:
        x = wrap(x)
        return x if x.type not in FLOATS else Expr(op, x.type, (x,))

    return lifted(function)


@lifted
def absolute(x: Any) -> Expr:
    x = wrap(x)
    return x if x.type == BOOL else Expr("abs", x.type, (x,))


@lifted
def negate(x: Any) -> Expr:
    x = wrap(x)
    if x.type == BOOL:
        raise VariantError("- of a boolean: use ~ for logical not.")
    return Expr("neg", x.type, (x,))


@lifted
def invert(x: Any) -> Expr:
    x = wrap(x)
    if x.type in FLOATS:
        raise VariantError("~ of a floating point value.")
    return Expr("not", x.type, (x,))


def _extreme(op: str, tie: str = "half") -> Callable[[Any, Any], Any]:
    """``tie`` says where the gradient goes when both are equal, as in torch: half to each (maximum), to the first (clamp), to the second (relu)."""

    def function(a: Any, b: Any) -> Expr:
        kind, pair = _common(wrap(a), wrap(b))
        return Expr({"minimum": "and", "maximum": "or"}[op], kind, pair) if kind == BOOL else Expr(op, kind, pair, tie)

    return lifted(function)


@lifted
def where(condition: Any, a: Any, b: Any) -> Expr:
    kind, (x, y) = _common(wrap(a), wrap(b))
    return Expr("where", kind, (truth(wrap(condition)), x, y))


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002
    if min is not None:
        x = _clamp_low(x, min)
    return _clamp_high(x, max) if max is not None else x


def power(a: Any, b: Any) -> Any:
    if isinstance(b, numbers.Real) and not isinstance(b, bool):
        return lifted(lambda x: _power_of(wrap(x), b))(a)
    return _float_op("pow")(const(a) if isinstance(a, numbers.Real) else a, b)


def _power_of(x: Expr, exponent: Any) -> Expr:
    if float(exponent).is_integer() and 0 <= exponent <= 16:
        n = int(exponent)
        if n == 0:
            return cast(const(1), x.type if x.type != BOOL else INT)
        result = None
        while n:  # square and multiply, so that x ** 2 is x * x
            if n & 1:
                result = x if result is None else mul(result, x)
            n >>= 1
            x = mul(x, x) if n else x
        return result  # type: ignore[return-value]
    if exponent == 0.5:
        return FUNCTIONS["sqrt"](x)
    kind, (base, power) = _common(x, const(float(exponent)), least=SINGLE)
    return Expr("pow", kind, (base, power))


def to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Conversion to a dtype; devices and memory formats mean nothing here."""
    for target in (*args, *kwargs.values()):
        if isinstance(target, (Expr, Vector, Indexed)) or _is_tensor(target):
            return to(x, target.dtype)
        name = dtype_name(target)
        if name in _STORAGE:
            kind = _STORAGE[name]
            return lifted(lambda v: truth(wrap(v)) if kind == BOOL else cast(wrap(v), kind))(x)
    return x


def _to(name: str) -> Callable[[Any], Any]:
    return lambda x: to(x, name)


add, sub, mul = _arith("add"), _arith("sub"), _arith("mul")
floordiv, mod = _division("floordiv"), _division("mod")
minimum, maximum = _extreme("minimum"), _extreme("maximum")
_clamp_low, _clamp_high, _relu_max = _extreme("maximum", "first"), _extreme("minimum", "first"), _extreme("maximum", "second")
band, bor, bxor = _bits("and"), _bits("or"), _bits("xor")
fmod = _float_op("fmod")


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inner = mul(math.sqrt(2 / math.pi), add(x, mul(0.044715, mul(mul(x, x), x))))
        return mul(mul(0.5, x), add(1.0, FUNCTIONS["tanh"](inner)))
    return mul(mul(x, 0.5), add(1.0, FUNCTIONS["erf"](mul(x, math.sqrt(0.5)))))


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    y = mul(x, beta) if beta != 1.0 else x
    soft = add(maximum(y, 0.0), FUNCTIONS["log1p"](FUNCTIONS["exp"](negate(absolute(y)))))
    return _true_divide(soft, beta) if beta != 1.0 else soft


def _relu(x: Any) -> Any:
    return _relu_max(x, 0)


def _sign(x: Any) -> Any:
    return sub(to(_compare("gt")(x, 0), "int32"), to(_compare("lt")(x, 0), "int32")) if wrap(x).type not in FLOATS else Expr("sign", wrap(x).type, (wrap(x),))


def _is_finite(x: Any) -> Any:
    return _compare("lt")(absolute(x), math.inf)


def _zeros(value: float) -> Callable[..., Any]:
    return lambda x, *_, **__: cast(const(value), wrap(x).type)


def reduce(x: Any, op: Callable[[Any, Any], Any], *args: Any, **kwargs: Any) -> Any:
    """A reduction over the one short dimension of a partly indexed tensor, left to right."""
    x = _lower(x)
    if not isinstance(x, Vector):
        raise VariantError("a reduction needs a partly indexed tensor with one short trailing dimension left, e.g. (p[q_idx] * p[kv_idx]).sum(-1).")
    for dim in (*args, kwargs.get("dim")):
        if dim not in (None, -1, 0, (-1,), [-1]):
            raise VariantError(f"reduction over dimension {dim}: only the last (-1) is left.")
    total = x.items[0]
    for item in x.items[1:]:
        total = op(total, item)
    return total


def _mean(x: Any, *args: Any, **kwargs: Any) -> Any:
    x = _lower(x)
    return _true_divide(reduce(x, add, *args, **kwargs), len(x.items))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": add, "sub": sub, "subtract": sub, "mul": mul, "multiply": mul, "div": _true_divide, "divide": _true_divide, "true_divide": _true_divide,
    "floor_divide": floordiv, "remainder": mod, "fmod": fmod, "pow": power, "float_power": power, "neg": negate, "negative": negate,
    "rsub": lambda a, b, **kw: sub(b, a, **kw), "abs": absolute, "absolute": absolute, "square": lambda x: mul(x, x), "reciprocal": lambda x: _true_divide(1.0, x),
    "minimum": minimum, "maximum": maximum, "fmin": minimum, "fmax": maximum, "clamp": clamp, "clip": clamp,
    "clamp_min": lambda x, min: clamp(x, min), "clamp_max": lambda x, max: clamp(x, None, max), "where": where,  # noqa: A006
    "eq": _compare("eq"), "ne": _compare("ne"), "not_equal": _compare("ne"), "lt": _compare("lt"), "less": _compare("lt"), "le": _compare("le"),
    "less_equal": _compare("le"), "gt": _compare("gt"), "greater": _compare("gt"), "ge": _compare("ge"), "greater_equal": _compare("ge"),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": lifted(lambda x: Expr("not", BOOL, (truth(wrap(x)),))),
    "bitwise_and": band, "bitwise_or": bor, "bitwise_xor": bxor, "bitwise_not": invert,
    "bitwise_left_shift": _shift("shl"), "bitwise_right_shift": _shift("shr"), "relu": _relu, "silu": lambda x, **_: mul(x, FUNCTIONS["sigmoid"](x)),
    "gelu": _gelu, "softplus": _softplus, "logsigmoid": lambda x: negate(_softplus(negate(x))), "sign": _sign, "sgn": _sign,
    "leaky_relu": lambda x, negative_slope=0.01, **_: where(_compare("gt")(x, 0), x, mul(x, negative_slope)),
    "elu": lambda x, alpha=1.0, **_: where(_compare("gt")(x, 0), x, mul(FUNCTIONS["expm1"](minimum(x, 0)), alpha)),
    "relu6": lambda x, **_: clamp(x, 0, 6), "hardtanh": lambda x, min_val=-1.0, max_val=1.0, **_: clamp(x, min_val, max_val),
    "atan2": _float_op("atan2"),
    "isnan": lambda x: _compare("ne")(x, x), "isinf": lambda x: _compare("eq")(absolute(x), math.inf), "isfinite": _is_finite,
    "to": to, "type": to, "type_as": to, "float": lambda x: lifted(lambda v: cast(wrap(v), SINGLE))(x), "double": _to("float64"), "half": _to("float16"), "bfloat16": _to("bfloat16"),
    "int": _to("int32"), "long": _to("int64"), "short": _to("int16"), "bool": _to("bool"), "detach": lambda x: Expr("detach", wrap(x).type, (wrap(x),)),
    "clone": lambda x, **_: x, "contiguous": lambda x, **_: x, "zeros_like": _zeros(0), "ones_like": _zeros(1),
    "full_like": lambda x, value, **_: cast(wrap(value), wrap(x).type), "lerp": lambda a, b, w: add(a, mul(w, sub(b, a))),
    "addcmul": lambda x, a, b, value=1: add(x, mul(mul(a, b), value)),
    "sum": lambda x, *a, **kw: reduce(x, add, *a, **kw), "prod": lambda x, *a, **kw: reduce(x, mul, *a, **kw), "mean": _mean,
    "amax": lambda x, *a, **kw: reduce(x, maximum, *a, **kw), "amin": lambda x, *a, **kw: reduce(x, minimum, *a, **kw),
    "any": lambda x, *a, **kw: reduce(to(x, "bool"), bor, *a, **kw), "all": lambda x, *a, **kw: reduce(to(x, "bool"), band, *a, **kw),
    "dot": lambda a, b: reduce(mul(a, b), add), "inner": lambda a, b: reduce(mul(a, b), add),
    "max": lambda x, *a, **kw: maximum(x, *a) if a and not isinstance(a[0], int) else reduce(x, maximum, *a, **kw),
    "min": lambda x, *a, **kw: minimum(x, *a) if a and not isinstance(a[0], int) else reduce(x, minimum, *a, **kw),
    **{name: _unary_real(name) for name in UNARY_REAL}, **{name: _rounding(name) for name in ROUNDING},
}  # fmt: skip
FUNCTIONS["sum"].__doc__ = "left to right over the last dimension"

_OPERATORS = {
    "add": add, "sub": sub, "mul": mul, "truediv": _true_divide, "floordiv": floordiv, "mod": mod, "pow": power,
    "and": band, "or": bor, "xor": bxor, "lshift": _shift("shl"), "rshift": _shift("shr"),
}  # fmt: skip
_COMPARISONS = {name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _install(cls: type) -> type:
    for name, function in _OPERATORS.items():
        setattr(cls, f"__{name}__", lambda a, b, f=function: f(a, b))
        setattr(cls, f"__r{name}__", lambda a, b, f=function: f(b, a))
    for name, function in _COMPARISONS.items():
        setattr(cls, f"__{name}__", lambda a, b, f=function: f(a, b))
    cls.__neg__, cls.__abs__, cls.__invert__, cls.__pos__ = negate, absolute, invert, lambda x: x  # type: ignore[attr-defined]
    cls.__divmod__ = lambda a, b: (floordiv(a, b), mod(a, b))  # type: ignore[attr-defined]
    cls.__hash__ = object.__hash__  # type: ignore[assignment]
    return cls


_install(Expr)


class _Proxy:
    """Attributes that a Vector and an Indexed share with a traced scalar."""

    __slots__ = ()
    __bool__ = Expr.__bool__
    __iter__ = Expr.__iter__
    __array_ufunc__ = Expr.__array_ufunc__
    __setitem__ = Expr.__setitem__
    __torch_function__ = Expr.__torch_function__

    def __getattr__(self, name: str) -> Any:
        function = FUNCTIONS.get(name)
        if function is None or name.startswith("__"):
            raise AttributeError(f"a partly indexed tensor has no attribute {name!r}")
        return lambda *args, **kwargs: function(self, *args, **kwargs)


@_install
class Vector(_Proxy):
    """A short trailing dimension of a partly indexed tensor, unrolled."""

    __slots__ = ("items",)

    def __init__(self, items: list):
        self.items = items

    @property
    def dtype(self) -> Any:
        return self.items[0].dtype

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Vector(self.items[index])
        if isinstance(index, numbers.Integral):
            return self.items[int(index)]
        raise VariantError("the unrolled dimension of a partly indexed tensor takes Python numbers only.")


@_install
class Indexed(_Proxy):
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
        if self.capture.shape is None:
            raise VariantError(f"the sizes of flashgen.input({self.capture.name!r}) are not known while tracing.")
        return tuple(n for n, i in zip(self.capture.shape, self.indices) if i is None)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        free = [d for d, i in enumerate(self.indices) if i is None]
        explicit = sum(1 for i in index if i is not Ellipsis)
        if explicit > len(free):
            raise VariantError(f"too many indices: {explicit} for a captured tensor with {len(free)} dimension(s) left.")
        if Ellipsis in [i if i is Ellipsis else None for i in index]:
            at = next(n for n, i in enumerate(index) if i is Ellipsis)
            index = index[:at] + (slice(None),) * (len(free) - explicit) + index[at + 1 :]
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
        if isinstance(i, bool) or i is None:
            raise VariantError(f"index {i!r}: captured tensors are indexed by integers.")
        if isinstance(i, numbers.Integral) and int(i) < 0 and self.capture.shape is not None:
            i = int(i) + self.capture.shape[dim]
        e = wrap(i, static=True)
        if e.type not in (INT, LONG):
            raise VariantError(f"index of type {e.type}: captured tensors are indexed by integers; convert with .to(torch.int32).")
        return e

    def lower(self) -> Any:
        """A scalar load if fully indexed, else the unrolled trailing dimension."""
        free = [d for d, i in enumerate(self.indices) if i is None]
        if not free:
            return self.scalar()
        if len(free) > 1:
            raise VariantError(f"a captured tensor of {self.capture.ndim} dimensions is used with {len(free)} left: index it down to a scalar.")
        n = self.shape[0]
        if n > MAX_UNROLLED or n == 0:
            raise VariantError(f"a trailing dimension of {n} cannot be unrolled: the limit is {MAX_UNROLLED}. Precompute the product, or move it into q and k.")
        pick = lambda j: tuple(const(j) if i is None else i for i in self.indices)  # noqa: E731
        return Vector([Expr("load", self.capture.type, pick(j), self.capture) for j in range(n)])

    def scalar(self) -> Expr:
        left = sum(i is None for i in self.indices)
        if left:
            raise VariantError(f"a captured tensor with {left} dimension(s) left is used as a number: index all of its {self.capture.ndim} dimensions.")
        return Expr("load", self.capture.type, self.indices, self.capture)


_PLAIN_NAMES = {f"__{op}__": f for op, f in {**_OPERATORS, **_COMPARISONS}.items()} | {
    f"__r{op}__": (lambda a, b, f=f: f(b, a)) for op, f in _OPERATORS.items()
}
_PLAIN_NAMES |= {"__neg__": negate, "__abs__": absolute, "__invert__": invert}


def call_torch(func: Any, args: tuple, kwargs: dict) -> Any:
    """A torch function or tensor method called with at least one traced value."""
    name = getattr(func, "__name__", str(func))
    if name == "__getitem__":
        return as_captured(args[0])[args[1]]
    function = _PLAIN_NAMES.get(name) or FUNCTIONS.get(name.rstrip("_") if not name.startswith("_") else name)
    if function is None:
        raise VariantError(f"torch.{name} cannot be traced in a score or mask function; supported: {', '.join(sorted(FUNCTIONS))}.")
    if name.endswith("_") and not name.startswith("_"):
        raise VariantError(f"{name} writes in place: score and mask functions are pure; use {name.rstrip('_')}.")
    kwargs.pop("out", None)
    return function(*args, **kwargs)


_builtin_lock = threading.RLock()


@contextmanager
def _traced_builtins() -> Any:
    """Python's min and max compare with ``if``; while tracing they build nodes for traced values and are the usual functions otherwise."""

    def pairwise(usual: Callable[..., Any], op: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 and not kwargs and any(isinstance(a, (Expr, Vector, Indexed)) for a in args):
                total = args[0]
                for a in args[1:]:
                    total = op(total, a)
                return total
            return usual(*args, **kwargs)

        return function

    with _builtin_lock:
        usual_min, usual_max = builtins.min, builtins.max
        builtins.min, builtins.max = pairwise(usual_min, minimum), pairwise(usual_max, maximum)
        try:
            yield
        finally:
            builtins.min, builtins.max = usual_min, usual_max


def _capture_mode() -> Any:
    """Watches torch operations on real tensors inside a trace, so that what they make is derived anew at each call and never goes stale."""
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = kwargs or {}
            flat = [*args, *kwargs.values()]
            flat += [x for a in flat if isinstance(a, (tuple, list)) for x in a]
            if any(isinstance(a, (Expr, Vector, Indexed)) for a in flat):
                return call_torch(func, args, kwargs)
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and any(isinstance(a, Tensor) for a in flat) and _tracer.captures is not None:
                known = lambda x: _tracer.captures.get(id(x), x) if isinstance(x, Tensor) else type(x)(map(known, x)) if type(x) in (tuple, list) else x  # type: ignore[union-attr]  # noqa: E731
                capture = Capture(result, recipe=(func, known(args), {n: known(x) for n, x in kwargs.items()}))
                capture.keep = result  # type: ignore[attr-defined]
                _tracer.captures.setdefault(id(result), capture)
            return result

    return Mode()


def trace(function: Callable[..., Any], leaves: Sequence[Expr], *, what: str) -> Expr:
    """Call a user's function with symbols; the result as an Expr. Errors of the user's own code pass through unchanged."""
    with _traced_builtins(), _capture_mode():
        result = _lower(function(*leaves))
    if isinstance(result, Vector):
        raise VariantError(f"the {what} function returned a vector of {len(result.items)} values; it must return one value per (query, key) pair.")
    if result is None:
        raise VariantError(f"the {what} function returned None: it must return its {'new score' if what == 'score' else 'condition'}.")
    return wrap(result)


@contextmanager
def tracing(inputs: dict[str, Any]) -> Any:
    """One trace: captures are shared between its functions; ``inputs`` maps names of flashgen.input to tensors (or nothing, before any call)."""
    before = (_tracer.captures, _tracer.inputs)
    _tracer.captures, _tracer.inputs = {}, inputs
    try:
        yield _tracer.captures
    finally:
        _tracer.captures, _tracer.inputs = before
