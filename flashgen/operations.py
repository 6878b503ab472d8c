"""Operations of the tracing language: arithmetic, comparisons, torch's pointwise functions, reductions over a short unrolled dimension.

Operands -> Expr. Example: ``maximum(q - k, 0)``. Every operation is a node of the user's own order; floats are never simplified, so they keep
their rounding. Numbers are run-time slots when added, multiplied or compared, and constants when they divide integers, shift, or are exponents.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from .capture import BOOL, FLOATS, INT, LONG, RANK, SINGLE, STORAGE, dtype_name, is_tensor
from .errors import DtypeError, VariantError
from .expression import FUNCTIONS, OPERATORS, Expr, Indexed, Input, Operand, Vector, as_captured, cast, const, wrap

UNARY_REAL = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "sigmoid",
)  # fmt: skip
ROUNDING = ("floor", "ceil", "trunc", "round")
_MOST_SHIFT = {INT: 30, LONG: 62}  # largest power of two of a type


def common(*xs: Expr, least: str = BOOL) -> tuple[str, tuple[Expr, ...]]:
    """The operands in their common type, torch's promotion."""
    kind = max((*(x.kind for x in xs), least), key=RANK.__getitem__)
    return kind, tuple(cast(x, kind) for x in xs)


def lower(x: Any) -> Any:
    """A captured tensor as a scalar load, or as a Vector where one short dimension is left."""
    if isinstance(x, (Input, Indexed)) or is_tensor(x):
        return as_captured(x).lower()
    return x


def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply an operation element by element when an operand is a partly indexed tensor with one short dimension left."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        operands = [lower(a) for a in args]
        lengths = {len(a.items) for a in operands if isinstance(a, Vector)}
        if not lengths:
            return function(*operands, **kwargs)
        if len(lengths - {1}) > 1:
            raise VariantError(f"partly indexed tensors of different trailing lengths {sorted(lengths)} cannot be combined.")
        pick = lambda a, i: a.items[i % len(a.items)] if isinstance(a, Vector) else a  # noqa: E731 - a length of 1 broadcasts
        return Vector([function(*(pick(a, i) for a in operands), **kwargs) for i in range(max(lengths))])

    return apply


def truth(x: Expr) -> Expr:
    """x != 0 as a bool."""
    return x if x.kind == BOOL else Expr("ne", BOOL, (x, cast(const(0), x.kind)))


def _arith(op: str) -> Callable[..., Any]:
    @lifted
    def function(a: Any, b: Any, *, alpha: Any = 1) -> Expr:
        if alpha != 1:
            b = mul(b, alpha)
        kind, pair = common(wrap(a), wrap(b))
        if kind == BOOL:
            if op == "sub":
                raise VariantError("subtraction of two booleans: use ^ or convert one with .to(torch.int32).")
            return Expr({"add": "or", "mul": "and"}[op], BOOL, pair)
        return Expr(op, kind, pair)

    return function


def _compare(op: str) -> Callable[..., Any]:
    return lifted(lambda a, b: Expr(op, BOOL, common(wrap(a), wrap(b))[1]))


def _is_const(x: Expr, value: bool) -> bool:
    return x.op == "const" and x.data is value


def _bits(op: str) -> Callable[..., Any]:
    @lifted
    def function(a: Any, b: Any) -> Expr:
        kind, (x, y) = common(wrap(a, static=True), wrap(b, static=True))
        if kind in FLOATS:
            raise VariantError(f"bitwise {op} of floating point values: compare first, `(a > 0) & (b > 0)`.")
        if kind == BOOL and op != "xor":  # an open end of a window is a constant
            for one, other in ((x, y), (y, x)):
                if _is_const(one, op == "and"):
                    return other
        if op == "and" and kind != BOOL and y.op == "const" and y.data >= 0 and y.data & (y.data + 1) == 0 and y.data < 2**30:
            return Expr("mod", kind, (x, cast(const(y.data + 1), kind)))  # low bits: intervals and bounds know mod
        return Expr(op, kind, (x, y))

    return function


def _logical(op: str) -> Callable[..., Any]:
    return lifted(lambda a, b: _bits(op)(truth(wrap(a)), truth(wrap(b))))


def _shift(op: str) -> Callable[..., Any]:
    @lifted
    def function(a: Any, b: Any) -> Expr:
        kind, pair = common(wrap(a, static=True), wrap(b, static=True), least=INT)
        if kind in FLOATS:
            raise VariantError("shifts need integers.")
        if pair[1].op == "const":
            if not 0 <= pair[1].data < 63:
                raise VariantError(f"shift by {pair[1].data}: must be from 0 to 62.")
            if pair[1].data <= _MOST_SHIFT[kind]:  # intervals and bounds know multiples and quotients
                return Expr({"shl": "mul", "shr": "floordiv"}[op], kind, (pair[0], cast(const(2**pair[1].data), kind)))
        return Expr(op, kind, pair)

    return function


def _division(op: str) -> Callable[..., Any]:
    """Floor division and floored modulus, as in Python and torch; C's remainder."""

    @lifted
    def function(a: Any, b: Any) -> Expr:
        kind, pair = common(wrap(a), wrap(b, static=isinstance(b, numbers.Integral)), least=INT)
        if pair[1].op == "const" and pair[1].data == 0:
            raise VariantError(f"{'//' if op in ('floordiv', 'truncdiv') else '%'} by zero.")
        if op == "fmod" and kind not in FLOATS:
            return sub(pair[0], mul(Expr("truncdiv", kind, pair), pair[1]))
        return Expr(op, kind, pair)

    return function


def _float_op(op: str) -> Callable[..., Any]:
    """An operation on floating point values; integers become float32."""

    @lifted
    def function(*args: Any) -> Expr:
        kind, operands = common(*map(wrap, args), least=SINGLE)
        return Expr(op, kind, operands)

    return function


_quotient, _pow = _float_op("div"), _float_op("pow")


@lifted
def _truncated_quotient(a: Any, b: Any) -> Any:
    if wrap(a).kind not in FLOATS and wrap(b).kind not in FLOATS:
        return truncdiv(a, b)
    return FUNCTIONS["trunc"](_quotient(a, b))


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return _quotient(a, b)
    if rounding_mode not in ("floor", "trunc"):
        raise VariantError(f"rounding_mode={rounding_mode!r}: None, 'floor' or 'trunc'.")
    return floordiv(a, b) if rounding_mode == "floor" else _truncated_quotient(a, b)


def _rounding(op: str) -> Callable[..., Any]:
    return lifted(lambda x: Expr(op, wrap(x).kind, (wrap(x),)) if wrap(x).kind in FLOATS else wrap(x))


@lifted
def absolute(x: Any) -> Expr:
    x = wrap(x)
    return x if x.kind == BOOL else Expr("abs", x.kind, (x,))


@lifted
def negate(x: Any) -> Expr:
    x = wrap(x)
    if x.kind == BOOL:
        raise VariantError("- of a boolean: use ~ for logical not.")
    return Expr("neg", x.kind, (x,))


@lifted
def invert(x: Any) -> Expr:
    x = wrap(x)
    if x.kind in FLOATS:
        raise VariantError("~ of a floating point value: compare first, `~(a > 0)`.")
    return const(not x.data) if x.kind == BOOL and x.op == "const" else Expr("not", x.kind, (x,))


def _extreme(op: str, tie: str = "half") -> Callable[..., Any]:
    """``tie`` says where the gradient goes when both are equal, as in torch: half to each (maximum), to the first (clamp), to the second (relu)."""

    @lifted
    def function(a: Any, b: Any) -> Expr:
        kind, pair = common(wrap(a), wrap(b))
        return Expr({"minimum": "and", "maximum": "or"}[op], kind, pair) if kind == BOOL else Expr(op, kind, pair, tie)

    return function


@lifted
def where(condition: Any, a: Any, b: Any) -> Expr:
    kind, (x, y) = common(wrap(a), wrap(b))
    return Expr("where", kind, (truth(wrap(condition)), x, y))


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """min(max(x, min), max); the slope at a bound is that of x."""
    x = x if min is None else _clamp_low(x, min)
    return x if max is None else _clamp_high(x, max)


def power(a: Any, b: Any) -> Any:
    if isinstance(b, numbers.Real) and not isinstance(b, bool):
        wrap(b, static=True)  # refuses what no kernel can hold
        return lifted(lambda x: _power_of(wrap(x), b))(a)
    return lifted(_power_by)(a, b)


def _power_of(x: Expr, exponent: Any) -> Expr:
    """A fixed exponent; x ** 2 is x * x."""
    if float(exponent).is_integer() and 0 <= exponent <= 16:
        if exponent == 0:
            return cast(const(1), x.kind if x.kind != BOOL else INT)
        half = _power_of(x, exponent // 2) if exponent > 1 else x
        square = mul(half, half) if exponent > 1 else x
        return mul(square, x) if exponent > 1 and exponent % 2 else square
    if exponent == 0.5:
        return FUNCTIONS["sqrt"](x)
    return _pow(x, const(float(exponent)))


def _power_by(a: Any, b: Any) -> Expr:
    """A traced exponent. Integers stay integers, as in torch, which only powers of two can."""
    base, exponent = wrap(a, static=isinstance(a, numbers.Real)), wrap(b)
    if base.kind in FLOATS or exponent.kind in FLOATS:
        return _pow(base, exponent)
    if base.op == "const" and base.data == 2:
        return where(_compare("ge")(exponent, const(0)), FUNCTIONS["bitwise_left_shift"](const(1), exponent), const(0))
    raise VariantError("an integer to a traced integer power: write a floating base (10.0 ** k_idx) or convert one side with .to(torch.float32).")


def to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Conversion to a dtype; devices and memory formats mean nothing here."""
    for target in (*args, *kwargs.values()):
        if isinstance(target, Operand) or is_tensor(target):
            return to(x, target.dtype)
        name = dtype_name(target)
        if name in STORAGE:
            return _converted(x, STORAGE[name])
        if type(target).__name__ == "dtype":
            raise DtypeError(f"conversion to {name}: supported are {', '.join(STORAGE)}.")
    return x


@lifted
def _converted(x: Any, kind: str) -> Expr:
    return truth(wrap(x)) if kind == BOOL else cast(wrap(x), kind)


add, sub, mul = _arith("add"), _arith("sub"), _arith("mul")
floordiv, mod, fmod, truncdiv = _division("floordiv"), _division("mod"), _division("fmod"), _division("truncdiv")
minimum, maximum = _extreme("minimum"), _extreme("maximum")
_clamp_low, _clamp_high = _extreme("maximum", "first"), _extreme("minimum", "first")
_above, _below = _extreme("maximum", "second"), _extreme("minimum", "second")  # no slope at the bound
band, bor, bxor = _bits("and"), _bits("or"), _bits("xor")
logical_and, logical_or, logical_not = _logical("and"), _logical("or"), lifted(lambda x: invert(truth(wrap(x))))


def _fill(value: float) -> Callable[..., Any]:
    return lifted(lambda x, **_: cast(const(value), wrap(x).kind))


def reduce(x: Any, op: Callable[[Any, Any], Any], dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    """A reduction over the one short dimension of a partly indexed tensor, left to right."""
    x = lower(x)
    if not isinstance(x, Vector):
        raise VariantError("a reduction needs a partly indexed tensor with one short trailing dimension left, e.g. (p[q_idx] * p[kv_idx]).sum(-1).")
    if dim not in (None, -1, 0, (-1,), [-1], (0,), [0]):
        raise VariantError(f"reduction over dimension {dim}: only the last (-1) is left.")
    total = x.items[0]
    for item in x.items[1:]:
        total = op(total, item)
    return Vector([total]) if keepdim else total


def counted(x: Any) -> Any:
    """Booleans count as 0 and 1 in sums and products."""
    return lifted(lambda v: cast(wrap(v), INT) if wrap(v).kind == BOOL else wrap(v))(x)


_OPERATORS = {
    "add": add, "sub": sub, "mul": mul, "truediv": divide, "floordiv": floordiv, "mod": mod, "pow": power, "and": band, "or": bor, "xor": bxor,
    "lshift": _shift("shl"), "rshift": _shift("shr"),
}  # fmt: skip
COMPARISONS = {name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(b, a)


OPERATORS |= {f"__{name}__": function for name, function in {**_OPERATORS, **COMPARISONS}.items()}
OPERATORS |= {f"__r{name}__": _swapped(function) for name, function in _OPERATORS.items()}
OPERATORS |= {"__neg__": negate, "__abs__": absolute, "__invert__": invert, "__pos__": lambda x: x, "__divmod__": lambda a, b: (floordiv(a, b), mod(a, b))}


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(self, *args)


for _name, _function in OPERATORS.items():
    setattr(Operand, _name, _method(_function))

FUNCTIONS |= COMPARISONS
FUNCTIONS |= {name: _float_op(name) for name in UNARY_REAL} | {name: _rounding(name) for name in ROUNDING}
FUNCTIONS |= {
    "add": add, "sub": sub, "mul": mul, "div": divide, "floor_divide": floordiv, "remainder": mod, "fmod": fmod, "pow": power, "neg": negate, "abs": absolute,
    "minimum": minimum, "maximum": maximum, "clamp": clamp, "where": where, "atan2": _float_op("atan2"),
    "logical_and": logical_and, "logical_or": logical_or, "logical_xor": _logical("xor"), "logical_not": logical_not,
    "bitwise_and": band, "bitwise_or": bor, "bitwise_xor": bxor, "bitwise_not": invert, "bitwise_left_shift": _OPERATORS["lshift"],
    "bitwise_right_shift": _OPERATORS["rshift"], "to": to, "detach": lifted(lambda x: Expr("detach", wrap(x).kind, (wrap(x),))),
    "clone": lambda x, **_: x, "contiguous": lambda x, **_: x, "zeros_like": _fill(0), "ones_like": _fill(1),
    "full_like": lifted(lambda x, value, **_: cast(wrap(value), wrap(x).kind)),
    "sum": lambda x, *a, **kw: reduce(counted(x), add, *a, **kw), "prod": lambda x, *a, **kw: reduce(counted(x), mul, *a, **kw),
    "amax": lambda x, *a, **kw: reduce(x, maximum, *a, **kw), "amin": lambda x, *a, **kw: reduce(x, minimum, *a, **kw),
    "any": lambda x, *a, **kw: reduce(to(x, "bool"), bor, *a, **kw), "all": lambda x, *a, **kw: reduce(to(x, "bool"), band, *a, **kw),
}  # fmt: skip
