"""Score and mask functions, one per construct of the language, for the tests of the tracer and of the printer."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F

import flashgen

G = torch.Generator().manual_seed(3)
NEG = float("-inf")


def floats(*shape):
    return torch.randn(shape, generator=G, dtype=torch.float64)


def ints(high, *shape, dtype=torch.int32, low=0):
    return torch.randint(low, high, shape, generator=G).to(dtype)


TABLE = {"t": floats(4, 40), "u": floats(2, 4, 19), "row": floats(23, 3), "w": floats(3), "zero_d": floats(), "f16": floats(4).half(),
"bf": floats(4).bfloat16()}
IDS, DOC, LONGS = ints(19, 23), ints(4, 2, 23), ints(1000, 23, dtype=torch.int64, low=-1000)
FLAGS, BYTES, OFFSETS = ints(2, 23, dtype=torch.bool), ints(200, 23, dtype=torch.uint8), ints(9, dtype=torch.int64)


class Slope:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, s, b, h, q, k):
        return s - self.factor * (q - k)


def partial_target(factor, s, b, h, q, k):
    return s * factor + h


def with_defaults(s, b, h, q, k, factor=0.75, table=TABLE["t"]):
    return s * factor + table[h, k]


INDICES = {
    "add sub neg": lambda s, b, h, q, k: s + (q - k) - (-h) + (+b),
    "reflected": lambda s, b, h, q, k: 3 - q + 2 * k + s * (5.0 - s),
    "floordiv of negatives": lambda s, b, h, q, k: s + (q - k) // 3 + (k - q) // 8,
    "mod of negatives": lambda s, b, h, q, k: s + (q - k) % 5 + (k - q) % 4,
    "negative divisor": lambda s, b, h, q, k: s + (q - k) // -3 + (q - k) % -5,
    "traced divisor": lambda s, b, h, q, k: s + torch.div(q - 9, k + 1, rounding_mode="floor") + (q - 9) % (k + 1),
    "truncated division": lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="trunc") + torch.div(q - k, 2.5, rounding_mode="trunc"),
    "fmod of integers": lambda s, b, h, q, k: s + torch.fmod(q - k, 3),
    "floor division by a float": lambda s, b, h, q, k: s + (q - k) // 2.5 + s // 0.75,
    "mod by a float": lambda s, b, h, q, k: s % 0.75 + (q - k) % 2.5 + torch.remainder(s, -0.5) + torch.fmod(s, 0.3),
    "true division": lambda s, b, h, q, k: s + (q - k) / 7 + 1 / (k + 1) + s / (h + 1),
    "shifts": lambda s, b, h, q, k: s + ((q - k) >> 2) + (k << 3) + (1 << h),
    "bits": lambda s, b, h, q, k: s + ((q - k) & 7) + (q | 5) + (k ^ q) + (~q) + ((q - k) & 6),
    "powers": lambda s, b, h, q, k: s**2 + (q - k) ** 3 + s**3 + (s * s + 1) ** 0.5 + (s * s + 1) ** -1.5 + s**0 + 2**h + 2.0 ** (-h),
    "abs": lambda s, b, h, q, k: s.abs() + abs(q - k) + torch.abs(s - 1),
    "min max": lambda s, b, h, q, k: min(s, 1.0) + max(q, k, 5) + min((q, k)) + max(s, q - k),
    "python functions of numbers": lambda s, b, h, q, k: s + max(2, 3) * min([4, 1]) + math.exp(0.5) + sum([q, k]),
    "python loops": lambda s, b, h, q, k: functools.reduce(lambda x, n: x + n * h, range(4), s),
    "comparisons": lambda s, b, h, q, k: torch.where((q < k) | (q >= k + 3) | (s > 0.5), s, torch.where(q == k, 1.0, torch.where(q != h, 2.0, s * 2))),
    "chained condition": lambda s, b, h, q, k: torch.where((q <= k) & (k <= q + 4) & ~(h == 1), s, NEG),
    "bool arithmetic": lambda s, b, h, q, k: s + (q > k) * 2.0 + (q > k) + ((q > k) + (h == 0)) * (k > 3) + (q > k) * h,
    "bool xor": lambda s, b, h, q, k: torch.where((q > k) ^ (h == 0), s, 0.0) + torch.logical_xor(q > k, b > 0),
    "bool compared": lambda s, b, h, q, k: torch.where((q > k) == (h > 1), s, -s),
    "logical functions": lambda s, b, h, q, k: torch.where(torch.logical_and(torch.logical_not(q), k) | torch.logical_or(q > 4, s), s, 7.0),
    "conversions": lambda s, b, h, q, k: s.to(torch.int32) + (q - k).to(torch.float32) * 0.5 + (q > k).to(torch.int64) + s.to(s.dtype) + q.type(torch.int64),
    "conversion methods": lambda s, b, h, q, k: s.long() + s.int() + s.bool() + (q - k).float() / 3 + (q - k).to(s) + q.type_as(s),
    "floor ceil round trunc": lambda s, b, h, q, k: s.floor() + torch.ceil(s) + torch.round(s * 2.5) + torch.trunc(s) + (q - k).floor(),
    "compiler constants": lambda s, b, h, q, k: torch.where(s == 0.0, torch.zeros_like(s), s) + torch.ones_like(q) + torch.full_like(s, 2.5),
    "infinities": lambda s, b, h, q, k: torch.where(k > q, -math.inf, s) + torch.where(q == k, math.inf, 0.0),
    "numpy numbers": lambda s, b, h, q, k: np.float64(0.5) * s + np.int64(3) + s * np.float32(0.25) + np.float64(2.0) - q,
    "large integers": lambda s, b, h, q, k: torch.where((q.long() + 2**40) * 3 > (k.long() + 2**40) * 3, s, -s),
    "float32 inside": lambda s, b, h, q, k: torch.where(s > 0, s.float(), q / 3) + torch.maximum(s.float(), s * s) * s.float(),
    "float32 functions": lambda s, b, h, q, k: torch.tanh(s.float()) * s.float() + s.float().abs().pow(1.5),
    "detach clone": lambda s, b, h, q, k: s.detach() + s.clone() + s.contiguous(),
}  # fmt: skip
FLOATING = {
    name: lambda s, b, h, q, k, f=f: f(s)
    for name, f in {
        "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "tanh": torch.tanh, "sin": torch.sin, "cos": lambda s: s.cos(),
        "tan": lambda s: (s * 0.3).tan(),
        "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "erf": torch.erf, "erfc": torch.erfc, "sigmoid": torch.sigmoid,
        "expit": torch.special.expit,
        "logs": lambda s: torch.log(s.abs() + 1) + torch.log2(s.abs() + 1) + torch.log1p(s.abs()) + torch.log10(s.abs() + 1),
        "roots": lambda s: torch.sqrt(s.abs()) + torch.rsqrt(s.abs() + 0.1), "asin acos": lambda s: torch.asin(torch.tanh(s)) + torch.acos(torch.tanh(s)),
        "atan2": lambda s: torch.atan2(s, s * s - 1), "square": torch.square, "reciprocal": lambda s: torch.reciprocal(s + 7),
        "sign": lambda s: torch.sign(s) + s.sgn(),
        "clamp": lambda s: s.clamp(-1, 0.5) + torch.clamp(s, min=0) + s.clip(max=1.0) + s.clamp_min(0.25) + s.clamp_max(0.75),
        "minimum": lambda s: torch.minimum(s, s * s) + torch.maximum(s, -s) + torch.fmin(s, s * s) + torch.fmax(s, -s),
        "relu": lambda s: torch.relu(s) + F.relu(s - 1) + F.relu6(s * 5) + F.leaky_relu(s) + F.elu(s) + F.hardtanh(s),
        "gelu": lambda s: F.gelu(s) + F.gelu(s, approximate="tanh"), "silu": F.silu,
        "softplus": lambda s: F.softplus(s) + F.logsigmoid(s) + F.softplus(s, beta=2),
        "mish": lambda s: F.mish(s) + F.softsign(s) + F.tanhshrink(s), "pow": lambda s: torch.pow(s.abs(), 1.5) + torch.pow(s, 2) + torch.pow(2.0, s),
        "isnan": lambda s: torch.where(torch.isnan(s / s), 1.0, s) + torch.where(torch.isinf(1 / s), 2.0, 0.0) + torch.where(torch.isfinite(1 / s), 1.0, 0.0),
        "nan_to_num": lambda s: torch.nan_to_num(s / s, nan=3.0), "lerp": lambda s: torch.lerp(s, s * s, 0.25),
        "logaddexp": lambda s: torch.logaddexp(s, s * 2) + torch.logaddexp2(s, s * -3),
        "elu": lambda s: F.selu(s) + F.celu(s, alpha=0.7) + F.elu(s, alpha=2.0), "hard": lambda s: F.hardsigmoid(s * 4) + F.hardswish(s * 4),
        "shrink": lambda s: F.hardshrink(s) + F.softshrink(s, 0.25) + F.threshold(s, 0.1, -2.0),
        "inverse hyperbolic": lambda s: torch.asinh(s * 3) + torch.acosh(s.abs() + 1.01) + torch.atanh(torch.tanh(s) * 0.9) + torch.asinh(s * 1e12),
        "xlogy": lambda s: torch.xlogy(s, s.abs() + 0.1) + torch.special.xlogy(2.0, s * s + 1),
        "copysign": lambda s: torch.copysign(s * s, s) + torch.copysign(2.0 + s, s - 1) * torch.signbit(s),
        "hypot": lambda s: torch.hypot(s, s + 1), "frac": torch.frac, "addcmul": lambda s: torch.addcmul(s, s, s, value=0.5),
        "add alpha": lambda s: torch.add(s, s, alpha=3),
        "rsub": lambda s: torch.rsub(s, 3), "logit": lambda s: torch.logit(torch.sigmoid(s)),
    }.items()
}  # fmt: skip
CAPTURES = {
    "indexing": lambda s, b, h, q, k: s + TABLE["t"][h, k] + TABLE["u"][b, h, q],
    "relative index": lambda s, b, h, q, k: s + TABLE["t"][h, (q - k).clamp(-10, 10) + 10],
    "chained indexing": lambda s, b, h, q, k: s + TABLE["u"][b][h][q] + TABLE["u"][b, h][q] + TABLE["u"][1][h, q],
    "index of an index": lambda s, b, h, q, k: s + TABLE["t"][h, IDS[k]] + TABLE["row"][IDS[IDS[k]], 1],
    "negative constants": lambda s, b, h, q, k: s + TABLE["u"][-1, -2, q] + TABLE["w"][-1],
    "ellipsis and colons": lambda s, b, h, q, k: s + TABLE["u"][..., q][b, h] + TABLE["u"][:, h][b, q] + TABLE["u"][:, :, q][b][h],
    "partial indexing": lambda s, b, h, q, k: s + (TABLE["row"][q] * TABLE["row"][k]).sum(-1) + (TABLE["row"][q] - TABLE["row"][k]).square().sum(dim=-1),
    "partial and a vector": lambda s, b, h, q, k: s + (TABLE["row"][q] * TABLE["w"]).sum() + torch.dot(TABLE["row"][k], TABLE["w"]) + TABLE["row"][q].mean(),
    "other reductions": lambda s, b, h, q, k: TABLE["row"][q].amax(-1) + TABLE["row"][q].amin(-1) + TABLE["row"][k].prod(-1) + TABLE["row"][k].max() * s,
    "counting": lambda s, b, h, q, k: s + (TABLE["row"][q] > TABLE["row"][k]).sum(-1) + torch.any(TABLE["row"][q] > 0) + (TABLE["row"][k] > -1).all(-1),
    "element of a part": lambda s, b, h, q, k: s + TABLE["row"][q][1] + TABLE["row"][q][-1] + TABLE["row"][k][1:].sum(-1),
    "leading dimension left": lambda s, b, h, q, k: s + TABLE["row"].T[:, q].sum(0),
    "0-d": lambda s, b, h, q, k: s * TABLE["zero_d"] + OFFSETS,
    "half precisions": lambda s, b, h, q, k: s + TABLE["f16"][h].to(s.dtype) * TABLE["bf"][h].to(s.dtype),
    "int64": lambda s, b, h, q, k: s + LONGS[k] // 7 + LONGS[q] % 16 + (LONGS[q] - LONGS[k]) + torch.where(LONGS[k] > q, 1, 0),
    "bool and uint8": lambda s, b, h, q, k: torch.where(FLAGS[q] | FLAGS[k], s, 0.0) + BYTES[k].to(torch.int32) * 2 + BYTES[q] + FLAGS[q],
    "derived inside": lambda s, b, h, q, k: s + (TABLE["t"] * 2)[h, k] + torch.softmax(TABLE["t"], -1)[h, q] + TABLE["row"][:, 1][q] + TABLE["zero_d"].exp(),
    "derived tuples": lambda s, b, h, q, k: s + TABLE["row"].unbind(1)[2][q] + torch.max(TABLE["t"], dim=1)[0][h] + TABLE["t"].sort(-1).values[h, k],
    "made inside": lambda s, b, h, q, k: s + torch.arange(40)[k] * 0.5 + torch.tensor(0.25, dtype=torch.float64, device=s.device),
    "sizes": lambda s, b, h, q, k: s / TABLE["t"].shape[0] + TABLE["t"].size(1) + len(TABLE["w"]),
    "closure": lambda s, b, h, q, k: (lambda factor: s * factor)(TABLE["w"][0]),
    "partial": functools.partial(partial_target, 0.5), "callable object": Slope(0.125), "defaults": with_defaults,
    "mask inside a score": lambda s, b, h, q, k: torch.where(flashgen.causal_top_left(b, h, q, k), s, NEG),
}  # fmt: skip
CONSTRUCTS = INDICES | FLOATING | CAPTURES
MASKS = {
    "bool capture": lambda b, h, q, k: FLAGS[q] | ~FLAGS[k],
    "integer as condition": lambda b, h, q, k: (q - k) & 4,
    "float comparison": lambda b, h, q, k: (q / 8 - k / 8).abs() <= 1,
    "float capture": lambda b, h, q, k: TABLE["t"][h, k] > 0.1,
    "documents": lambda b, h, q, k: (DOC[b][q] == DOC[b][k]) & (q >= k),
    "int64": lambda b, h, q, k: LONGS[q] <= LONGS[k],
    "partial": lambda b, h, q, k: (TABLE["row"][q] * TABLE["row"][k]).sum(-1) > 0,
    "any": lambda b, h, q, k: (TABLE["row"][q] > TABLE["row"][k]).any(-1),
    "number": lambda b, h, q, k: 1, "false": lambda b, h, q, k: False, "numpy bool": lambda b, h, q, k: np.True_,
}  # fmt: skip
