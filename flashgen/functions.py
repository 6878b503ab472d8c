"""Composite torch functions of the tracing language, made of ``operations``; slopes at kinks are torch's.

Importing this completes FUNCTIONS. Example: ``FUNCTIONS["gelu"](s)`` is s * 0.5 * (1 + erf(s * sqrt(0.5))).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .capture import FLOATS, SINGLE
from .errors import VariantError
from .expression import FUNCTIONS, Expr, Vector, cast, const, wrap
from .operations import (
    _above,
    _below,
    _clamp_high,
    absolute,
    add,
    clamp,
    divide,
    lifted,
    logical_and,
    logical_or,
    lower,
    maximum,
    minimum,
    mul,
    negate,
    power,
    reduce,
    sub,
    to,
    where,
)  # fmt: skip

_exp, _exp2, _expm1, _log, _log1p, _log2 = (FUNCTIONS[name] for name in ("exp", "exp2", "expm1", "log", "log1p", "log2"))
_sqrt, _erf, _tanh, _sigmoid, _trunc = (FUNCTIONS[name] for name in ("sqrt", "erf", "tanh", "sigmoid", "trunc"))
_eq, _ne, _lt, _gt, _le, _ge = (FUNCTIONS[name] for name in ("eq", "ne", "lt", "gt", "le", "ge"))


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inner = mul(const(math.sqrt(2 / math.pi)), add(x, mul(const(0.044715), mul(mul(x, x), x))))
        return mul(mul(const(0.5), x), add(const(1.0), _tanh(inner)))
    return mul(mul(x, const(0.5)), add(const(1.0), _erf(mul(x, const(math.sqrt(0.5))))))


def _softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    """max(y, 0) + log1p(exp(-|y|)), which never overflows; both kinks at 0 cancel."""
    y = mul(x, beta) if beta != 1 else x
    soft = add(maximum(y, const(0.0)), _log1p(_exp(negate(absolute(y)))))
    return divide(soft, beta) if beta != 1 else soft


@lifted
def _sign(x: Any) -> Any:
    x = wrap(x)
    return Expr("sign", x.kind, (x,)) if x.kind in FLOATS else cast(sub(to(_gt(x, const(0)), "int32"), to(_lt(x, const(0)), "int32")), x.kind)


def _log_add_exp(a: Any, b: Any) -> Any:
    """max + log1p(exp(-|a - b|)), with two infinities of one sign kept."""
    top = maximum(a, b)
    return where(_eq(absolute(top), const(math.inf)), top, add(top, _log1p(_exp(negate(absolute(sub(a, b)))))))


def _log_add_exp2(a: Any, b: Any) -> Any:
    top, distance = maximum(a, b), absolute(sub(a, b))
    return where(_eq(absolute(top), const(math.inf)), top, add(top, mul(_log1p(_exp2(negate(distance))), const(1 / math.log(2)))))


_LARGE = 1e8  # from here on x^2 + 1 and x^2 - 1 round to x^2, and before long x^2 overflows


def _asinh(x: Any) -> Any:
    """log(x + sqrt(x^2 + 1)) by log1p, which keeps small arguments."""
    size = absolute(x)
    a = minimum(size, const(_LARGE))
    small = _log1p(add(a, divide(mul(a, a), add(const(1.0), _sqrt(add(mul(a, a), const(1.0)))))))
    found = where(_gt(size, const(_LARGE)), add(_log(size), const(math.log(2))), small)
    return where(_lt(x, const(0)), negate(found), where(_eq(x, const(0)), x, found))  # at 0 the slope of x, where that of |x| is 0


def _acosh(x: Any) -> Any:
    """log(x + sqrt(x^2 - 1)), likewise by what x exceeds 1 by."""
    over = sub(minimum(x, const(_LARGE)), const(1.0))
    return where(_gt(x, const(_LARGE)), add(_log(x), const(math.log(2))), _log1p(add(over, _sqrt(mul(over, add(over, const(2.0)))))))


def _xlogy(a: Any, b: Any) -> Any:
    nothing = logical_and(_eq(a, const(0)), logical_or(_le(b, const(0)), _eq(b, const(math.inf))))
    return where(nothing, const(0.0), mul(a, _log(b)))


def _signbit(x: Any) -> Any:
    return logical_or(_lt(x, const(0)), logical_and(_eq(x, const(0)), _lt(divide(const(1.0), x), const(0))))


def _elu(x: Any, alpha: Any = 1.0, **_: Any) -> Any:
    return where(_gt(x, const(0)), x, mul(_expm1(_clamp_high(x, const(0))), alpha))


def _celu(x: Any, alpha: Any = 1.0, **_: Any) -> Any:
    return where(_gt(x, const(0)), x, mul(_expm1(divide(_clamp_high(x, const(0)), alpha)), alpha))


def _hardswish(x: Any, **_: Any) -> Any:
    inside = mul(x, divide(add(x, const(3.0)), const(6.0)))
    return where(_lt(x, const(-3)), const(0.0), where(_le(x, const(3)), inside, x))


def _softshrink(x: Any, lambd: Any = 0.5) -> Any:
    return where(_gt(x, lambd), sub(x, lambd), where(_lt(x, negate(const(lambd))), add(x, lambd), mul(x, const(0.0))))


def _mean(x: Any, *args: Any, **kwargs: Any) -> Any:
    x = lower(x)
    return divide(reduce(x, add, *args, **kwargs), const(float(len(x.items)) if isinstance(x, Vector) else 1.0))


def _extreme(name: str, pairwise: Callable[..., Any]) -> Callable[..., Any]:
    def function(x: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or (args and isinstance(args[0], int)):
            raise VariantError(f"torch.{name} over a dimension returns values and indices: use torch.a{name}.")
        return pairwise(x, *args) if args else reduce(x, pairwise)

    return function


def _nan_to_num(x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    largest = 3.4028234663852886e38  # of float32
    high, low = (largest if posinf is None else posinf), (-largest if neginf is None else neginf)
    return where(_ne(x, x), nan, where(_eq(x, const(math.inf)), const(high), where(_eq(x, const(-math.inf)), const(low), x)))


def _dot(a: Any, b: Any) -> Any:
    return reduce(mul(a, b), add)


def _new_full(x: Any, size: Any, value: Any, dtype: Any = None, **_: Any) -> Any:
    """A scalar constant of x's type, or of ``dtype``."""
    if tuple(size) != ():
        raise VariantError(f"a new tensor of shape {tuple(size)} in a score or mask function: only scalars, shape (), are traced.")
    return to(const(value), x.dtype if dtype is None else dtype)


FUNCTIONS |= {
    "new_full": _new_full, "new_zeros": lambda x, size, **kw: _new_full(x, size, 0, **kw), "new_ones": lambda x, size, **kw: _new_full(x, size, 1, **kw),
    "rsub": lambda a, b, **kw: sub(b, a, **kw), "square": lambda x: mul(x, x), "reciprocal": lambda x: divide(const(1.0), x), "sign": _sign,
    "clamp_min": lambda x, min: clamp(x, min), "clamp_max": lambda x, max: clamp(x, None, max),
    "fmin": lambda a, b: where(logical_or(_le(a, b), _ne(b, b)), a, b), "fmax": lambda a, b: where(logical_or(_ge(a, b), _ne(b, b)), a, b),
    "max": _extreme("max", maximum), "min": _extreme("min", minimum), "mean": _mean, "dot": _dot, "inner": _dot,
    "isnan": lambda x: _ne(x, x), "isinf": lambda x: _eq(absolute(x), const(math.inf)), "isfinite": lambda x: _lt(absolute(x), const(math.inf)),
    "isneginf": lambda x: _eq(x, const(-math.inf)), "isposinf": lambda x: _eq(x, const(math.inf)), "nan_to_num": _nan_to_num,
    "relu": lambda x, **_: _above(x, const(0)), "relu6": lambda x, **_: _below(_above(x, const(0)), const(6)),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, **_: _below(_above(x, min_val), max_val),
    "leaky_relu": lambda x, negative_slope=0.01, **_: where(_gt(x, const(0)), x, mul(x, negative_slope)),
    "elu": _elu, "celu": _celu, "selu": lambda x, **_: mul(_elu(x, 1.6732632423543772), const(1.0507009873554805)),
    "hardsigmoid": lambda x, **_: divide(_below(_above(add(x, const(3.0)), const(0)), const(6)), const(6.0)), "hardswish": _hardswish,
    "threshold": lambda x, threshold, value, **_: where(_le(x, threshold), value, x), "softshrink": _softshrink,
    "hardshrink": lambda x, lambd=0.5: where(_le(absolute(x), lambd), const(0.0), x),
    "asinh": _asinh, "acosh": _acosh, "atanh": lambda x: mul(sub(_log1p(x), _log1p(negate(x))), const(0.5)), "logaddexp2": _log_add_exp2, "xlogy": _xlogy,
    "signbit": _signbit, "copysign": lambda a, b: where(_signbit(b), negate(absolute(a)), absolute(a)),
    "silu": lambda x, **_: mul(x, _sigmoid(x)), "gelu": _gelu, "softplus": _softplus, "log_sigmoid": lambda x: negate(_softplus(negate(x))),
    "mish": lambda x, **_: mul(x, _tanh(_softplus(x))), "softsign": lambda x: divide(x, add(const(1.0), absolute(x))), "tanhshrink": lambda x: sub(x, _tanh(x)),
    "logit": lambda x: _log(divide(x, sub(const(1.0), x))), "expit": _sigmoid, "erfc": lambda x: sub(const(1.0), _erf(x)),
    "logaddexp": _log_add_exp, "hypot": lambda a, b: _sqrt(add(mul(a, a), mul(b, b))), "frac": lambda x: sub(x, _trunc(x)),
    "log10": lambda x: mul(_log2(x), const(math.log10(2))), "lerp": lambda a, b, weight: add(a, mul(weight, sub(b, a))),
    "addcmul": lambda x, a, b, value=1: add(x, mul(mul(a, b), value)), "addcdiv": lambda x, a, b, value=1: add(x, mul(divide(a, b), value)),
    "float": lifted(lambda x: cast(wrap(x), SINGLE)), "float_power": lambda a, b: power(to(a, "float32"), b),
}  # fmt: skip
FUNCTIONS |= {method: lambda x, name=name, **_: to(x, name) for method, name in {
    "double": "float64", "half": "float16", "bfloat16": "bfloat16", "int": "int32", "long": "int64", "short": "int16", "bool": "bool",
}.items()}  # fmt: skip
FUNCTIONS |= {alias: FUNCTIONS[name] for alias, name in {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "negative": "neg", "absolute": "abs", "clip": "clamp", "sgn": "sign",
    "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "type": "to", "type_as": "to", "arctan2": "atan2",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "fix": "trunc", "logsigmoid": "log_sigmoid",
    "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "_threshold": "threshold",
}.items()}  # fmt: skip
