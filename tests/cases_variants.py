"""Score/mask-modification corpus with an independent fp64 reference.

Every case builds FlexAttention-signature callables
    score_mod(score, b, h, q_idx, kv_idx) -> score
    mask_mod(b, h, q_idx, kv_idx)         -> bool
written from formulas.

Use from a test:
    from cases_variants import CASES, instantiate, reference_attention, judge_mean_ratio
    run  = instantiate(CASES["alibi"], dtype=torch.bfloat16, device="cuda")          # tensors under test
    gold = run.golden()                                                             # fp64 out, lse, max (+ .grads())

Conventions: captured float tensors are first rounded to the dtype under test, so that test and fp64 golden see the same
numbers. Empty rows give out=0, lse=-inf. Mods use elementwise ops + advanced indexing only, so they run scalar (0-d index
tensors), under vmap (flex eager) and broadcast ([B,1,1,1],[1,H,1,1],[1,1,Lq,1],[1,1,1,Lk]). Where chained indexing breaks
the broadcast form, the case gives `ref_score` beside `score`.
"""
# ruff: noqa: E731, RUF005, SIM
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

NEG = float("-inf")


# ----------------------------------------------------------------------------------------------------------------- context
class Ctx:
    """Gives a case its shape, device, dtype and reproducible captured tensors."""

    def __init__(self, B, Hq, Hkv, Lq, Lk, D, Dv, dtype, through, device, seed):
        self.B, self.Hq, self.Hkv, self.Lq, self.Lk, self.D, self.Dv = B, Hq, Hkv, Lq, Lk, D, Dv
        self.dtype, self.through, self.device, self.seed = dtype, through, device, seed
        self.captured: dict[str, torch.Tensor] = {}
        self.want_grad: set[str] = set()

    def _gen(self, name):
        return torch.Generator().manual_seed((self.seed * 7919 + sum(ord(c) * (i + 1) for i, c in enumerate(name))) % (2**31))

    def f(self, name, *size, scale=1.0, grad=False, fp32=False, positive=False):
        """float capture; rounded through the dtype under test (or fp32) and cast to the working dtype."""
        x = torch.randn(*size, generator=self._gen(name), dtype=torch.float64) * scale
        if positive:
            x = x.abs() + 0.25
        return self._keep(name, x, grad, fp32)

    def const(self, name, values, grad=False, fp32=False):
        return self._keep(name, torch.as_tensor(values, dtype=torch.float64), grad, fp32)

    def _keep(self, name, x, grad, fp32):
        mid = torch.float32 if fp32 else self.through
        out = mid if self.dtype != torch.float64 else torch.float64
        x = x.to(mid).to(out).to(self.device)
        if grad:
            x.requires_grad_(True)
            self.want_grad.add(name)
        self.captured[name] = x
        return x

    def i(self, name, low, high, size):
        x = torch.randint(low, high, size, generator=self._gen(name), dtype=torch.int32).to(self.device)
        self.captured[name] = x
        return x

    def ic(self, name, values, dtype=torch.int32):
        x = torch.as_tensor(values, dtype=dtype, device=self.device)
        self.captured[name] = x
        return x

    def bool_(self, name, size, p=0.5):
        x = (torch.rand(*size, generator=self._gen(name)) < p).to(self.device)
        self.captured[name] = x
        return x

    def doc_ids(self, name, n_docs, length):
        cut = torch.randperm(length - 1, generator=self._gen(name))[: n_docs - 1].sort().values + 1
        off = torch.cat([torch.zeros(1, dtype=torch.long), cut, torch.tensor([length])]).to(torch.int32)
        ids = torch.repeat_interleave(torch.arange(n_docs, dtype=torch.int32), off[1:] - off[:-1])
        return self.ic(name + "_id", ids), self.ic(name + "_off", off)


@dataclass
class Mods:
    score: Callable | None = None
    mask: Callable | None = None
    ref_score: Callable | None = None  # broadcast-safe twin of `score` when `score` chains indices


@dataclass
class Case:
    name: str
    build: Callable[[Ctx], Mods]
    needs: frozenset
    shape: dict = field(default_factory=dict)
    origin: str = ""
    fixed_shape: bool = False  # grid-like cases: only B/H/D may be changed

CASES: dict[str, Case] = {}
DEFAULT = dict(B=2, Hq=4, Hkv=4, Lq=48, Lk=48, D=16, Dv=16)


def case(name, needs="", origin="", fixed_shape=False, **shape):
    def deco(fn):
        assert name not in CASES, name
        CASES[name] = Case(name, fn, frozenset(needs.split()), shape, origin, fixed_shape)
        return fn

    return deco


def slope(h, H):
    return torch.exp2(-(h + 1) * (8.0 / H))


# ------------------------------------------------------------------------------- A. score mods without captured tensors
@case("identity", origin="pt")
def _(c):
    return Mods(lambda s, b, h, q, k: s)


@case("times_two", origin="pt")
def _(c):
    return Mods(lambda s, b, h, q, k: s + s)


@case("squared", "score_nonlin", origin="pt", Lq=40, Lk=72)
def _(c):
    return Mods(lambda s, b, h, q, k: s.square())


@case("causal_as_score", "where", origin="pt")
def _(c):
    return Mods(lambda s, b, h, q, k: torch.where(k > q, NEG, s))


@case("anti_causal_as_score", "where", origin="pt", Lq=37, Lk=37)
def _(c):
    return Mods(lambda s, b, h, q, k: torch.where(k < q, NEG, s))


@case("rel_distance", origin="pt", Lq=33, Lk=65)
def _(c):
    return Mods(lambda s, b, h, q, k: s + q - k)


@case("rel_distance_causal", "where", origin="pt")
def _(c):
    return Mods(lambda s, b, h, q, k: torch.where(k > q, NEG, s + q - k))


@case("alibi", "trans", origin="pt attn-gym")
def _(c):
    return Mods(lambda s, b, h, q, k: s - (q - k) * slope(h, c.Hq))


@case("alibi_causal_block", "trans", origin="attn-gym bench")
def _(c):
    return Mods(lambda s, b, h, q, k: s - (q - k) * slope(h, c.Hq), lambda b, h, q, k: k <= q)


@case("trig_nested", "score_nonlin trans", origin="pt")
def _(c):
    return Mods(lambda s, b, h, q, k: s.cos().sin() + b.tan())




@case("silu_score", "score_nonlin trans", origin="pt")
def _(c):
    return Mods(lambda s, b, h, q, k: s * torch.sigmoid(s))


@case("drop_odd_keys", "where mod", origin="pt")
def _(c):
    return Mods(lambda s, b, h, q, k: torch.where((k % 2) == 1, NEG, s))


@case("compose_rel_then_anticausal", "where", origin="pt")
def _(c):
    first = lambda s, b, h, q, k: s + (q - k)
    second = lambda s, b, h, q, k: torch.where(q <= k, s, NEG)
    return Mods(lambda s, b, h, q, k: second(first(s, b, h, q, k), b, h, q, k))


@case("softcap", "score_nonlin trans", origin="pt-flash attn-gym", Lq=57, Lk=57)
def _(c):
    return Mods(lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0))


@case("softcap_causal_gqa", "score_nonlin trans", origin="gemma2", Hq=8, Hkv=2, Lq=61, Lk=61)
def _(c):
    return Mods(lambda s, b, h, q, k: 30.0 * torch.tanh(s * (1 / 30.0)), lambda b, h, q, k: k <= q)


@case("head_linear_shift", origin="pt-flash")
def _(c):
    return Mods(lambda s, b, h, q, k: s + 0.1 * h)


@case("distance_decay", "idx_float", origin="pt-flash", Lq=65, Lk=65)
def _(c):
    def score(s, b, h, q, k):
        d = q - k
        return s / (1.0 + 1e-4 * (d * d))

    return Mods(score)


@case("floor_div_of_indices", "intdiv", origin="pt")
def _(c):
    return Mods(lambda s, b, h, q, k: s - torch.div(q, k + 1, rounding_mode="floor"))


@case("log_where_positive", "score_nonlin where trans nan_hazard", origin="pt", Lq=41, Lk=41)
def _(c):
    return Mods(lambda s, b, h, q, k: torch.where(s > 0, torch.log(s.clamp(min=1e-6)), s), lambda b, h, q, k: k <= q)




@case("window_with_offset_as_score", "where", origin="pt-decode", Lq=8, Lk=80)
def _(c):
    return Mods(lambda s, b, h, q, k: torch.where(q + 40 < k, NEG, s))


@case("gelu_instead_of_softmax", "score_nonlin trans", origin="attn-gym", Lq=24, Lk=24)
def _(c):
    return Mods(lambda s, b, h, q, k: torch.log(F.gelu(s) + 1.0))


@case("relu_instead_of_softmax", "score_nonlin trans", origin="attn-gym", Lq=24, Lk=24)
def _(c):
    return Mods(lambda s, b, h, q, k: torch.log(s.clamp(min=0) + 1.0))




@case("kerple_power", "idx_float trans", origin="own (KERPLE)")
def _(c):
    def score(s, b, h, q, k):
        d = (q - k).abs().to(s.dtype)
        return s - 0.3 * torch.log1p(0.5 * (h + 1) * d)

    return Mods(score)


@case("score_threshold_mask", "where score_dep_mask", origin="own")
def _(c):
    return Mods(lambda s, b, h, q, k: torch.where((s < -0.4) & (q != k), NEG, s))


# -------------------------------------------------------------------------------- B. score mods with captured tensors
@case("head_scale", "loads", origin="pt")
def _(c):
    t = c.f("head_scale", c.Hq, positive=True)
    return Mods(lambda s, b, h, q, k: t[h] * s)


@case("bias_of_every_axis", "loads", origin="pt", Lq=45, Lk=45)
def _(c):
    tq, tb, th = c.f("tq", c.Lq), c.f("tb", c.B), c.f("th", c.Hq)
    return Mods(lambda s, b, h, q, k: s + tq[q] + tb[b] + th[h])


@case("bias_qk", "loads", origin="pt", Lq=35, Lk=51)
def _(c):
    t = c.f("t", c.Lq, c.Lk)
    return Mods(lambda s, b, h, q, k: s + t[q, k])


@case("bias_bqk", "loads", origin="pt")
def _(c):
    t = c.f("t", c.B, c.Lq, c.Lk)
    return Mods(lambda s, b, h, q, k: s + t[b, q, k])


@case("bias_bhqk", "loads", origin="pt", Lq=37, Lk=53)
def _(c):
    t = c.f("t", c.B, c.Hq, c.Lq, c.Lk)
    return Mods(lambda s, b, h, q, k: s + t[b, h, q, k])


@case("rel_table", "loads", origin="pt")
def _(c):
    t = c.f("t", c.Lq + c.Lk)
    return Mods(lambda s, b, h, q, k: s + t[q - k + c.Lk])


@case("chained_index_bq", "loads chained", origin="pt")
def _(c):
    t = c.f("t", c.B, c.Lq)
    return Mods(lambda s, b, h, q, k: s + t[b][q], ref_score=lambda s, b, h, q, k: s + t[b, q])


@case("chained_index_const_bh_q", "loads chained", origin="pt")
def _(c):
    t = c.f("t", 3, c.B, c.Hq, c.Lq)
    return Mods(lambda s, b, h, q, k: s + t[0][b, h][q], ref_score=lambda s, b, h, q, k: s + t[0, b, h, q])




@case("scalar_int_tensor", "loads", origin="pt")
def _(c):
    t = c.ic("t", 3)
    return Mods(lambda s, b, h, q, k: s + t)


@case("sam_decomposed_rel_pos", "loads intdiv mod coord2d", origin="pt/SAM", Lq=48, Lk=48, fixed_shape=True)
def _(c):
    W = 8
    rh, rw = c.f("rh", c.B, c.Hq, c.Lq, c.Lk // W), c.f("rw", c.B, c.Hq, c.Lq, W)
    return Mods(lambda s, b, h, q, k: s + rh[b, h, q, k // W] + rw[b, h, q, k % W])


@case("euclid_distance_gate", "loads reduction trans", origin="pt")
def _(c):
    p, ls = c.f("p", max(c.Lq, c.Lk), 3, fp32=True), c.f("ls", c.Hq, positive=True, fp32=True)

    def score(s, b, h, q, k):
        d = (p[q] - p[k]).square().sum(-1)
        return s * torch.exp(-torch.sqrt(d + 1e-6) / ls[h])

    return Mods(score)


@case("cpb_gated_bias", "loads where_cast trans", origin="pt", Lq=18, Lk=18, fixed_shape=True)
def _(c):
    n, reg = c.Lq, 2
    tab, idx = c.f("tab", 49, c.Hq), c.i("idx", 0, 49, (n, n))
    mu, gam, cut = c.f("mu", 2, c.B, c.Hq, n), c.f("gam", c.Hq), c.ic("cut", reg)

    def score(s, b, h, q, k):
        on = ((q >= cut) & (k >= cut)).to(s.dtype)
        return s + on * torch.sigmoid(gam[h]) * (mu[0, b, h, q] + mu[1, b, h, k]) * tab[idx[q, k], h]

    return Mods(score)


@case("graph_distance_bias", "loads learn indirect", origin="attn-gym graphormer")
def _(c):
    d = c.i("dist", 0, 6, (c.B, c.Lq, c.Lk))
    t = c.f("t", c.Hq, 6, grad=True)
    return Mods(lambda s, b, h, q, k: s + t[h, d[b, q, k]])




@case("mla_rope_dot", "loads reduction", origin="attn-gym mla", Hq=4, Hkv=1, Lq=20, Lk=28)
def _(c):
    R = 8
    qr, kr = c.f("qr", c.B, c.Hq, c.Lq, R), c.f("kr", c.B, 1, c.Lk, R)
    return Mods(lambda s, b, h, q, k: s + 0.25 * (qr[b, h, q] * kr[b, h // c.Hq, k]).sum(-1))


@case("sandwich", "loads", origin="attn-gym")
def _(c):
    n = max(c.Lq, c.Lk)
    w = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    d = torch.arange(-(n - 1), n, dtype=torch.float64).abs()
    t = c.const("t", torch.cos(d[:, None] * w).sum(-1), fp32=True)
    r = c.const("r", [c.Hq / (8.0 * (j + 1)) for j in range(c.Hq)], fp32=True)
    return Mods(lambda s, b, h, q, k: s + r[h] * t[q - k + (n - 1)])


@case("alibi_slope_buffer", "loads", origin="pt-flash", Lq=67, Lk=67)
def _(c):
    t = c.f("slopes", c.Hq, scale=0.2, positive=True)
    return Mods(lambda s, b, h, q, k: s + t[h] * (k - q))


@case("strided_view_capture", "loads strided", origin="pt-flash")
def _(c):
    base = c.f("base", c.Hq, 3)
    view = base[:, 1]
    return Mods(lambda s, b, h, q, k: s + view[h])


@case("four_buffers", "loads", origin="pt-flash")
def _(c):
    a, x, y, z = c.f("a", c.Hq), c.f("x", c.Lq), c.f("y", c.Lk), c.f("z", c.B)
    return Mods(lambda s, b, h, q, k: s + a[h] + (x[q] - y[k]) + z[b])


@case("fp8_dequant_scale", "loads", origin="pt-decode", Lq=1, Lk=64, Hq=8, Hkv=2)
def _(c):
    t = c.f("ks", c.B, c.Hkv, positive=True, fp32=True)
    g = c.Hq // c.Hkv
    return Mods(lambda s, b, h, q, k: s * t[b, h // g])


@case("kv_modulo_bias", "loads mod intdiv", origin="pt-flash")
def _(c):
    a, d = c.f("a", 4), c.f("d", c.Lk // 2 + 1)
    return Mods(lambda s, b, h, q, k: s + a[k % 4] + d[k // 2])


@case("bool_tensor_added", "loads", origin="pt")
def _(c):
    t = c.bool_("t", (c.B, 1, c.Lq, c.Lk))
    return Mods(lambda s, b, h, q, k: s + t[b, h - h, q, k])




@case("packed_local_causal_as_score", "loads where indirect", origin="pt njt", Lq=60, Lk=60)
def _(c):
    ids, off = c.doc_ids("d", 3, c.Lq)
    return Mods(lambda s, b, h, q, k: torch.where(q - off[ids[q]] >= k - off[ids[k]], s, NEG))


@case("paged_remap_score", "loads where indirect intdiv mod", origin="pt paged", Lq=12, Lk=64, fixed_shape=True)
def _(c):
    P = 16
    logical = c.ic("logical", [[2, 0, -1, 1], [1, -1, 0, 2]][: c.B] if c.B <= 2 else [[2, 0, -1, 1]] * c.B)

    def remap(s, b, q, k, fn):
        page = logical[b, k // P]
        lk = page * P + k % P
        return torch.where(page >= 0, fn(s, q, lk), NEG)

    return Mods(lambda s, b, h, q, k: remap(s, b, q, k, lambda s, q, lk: s - 0.05 * (q - lk)))


# ------------------------------------------------------------------------------------- C. learnable captured tensors
@case("learn_rel_abs_table", "loads learn", origin="pt learn", Lq=37, Lk=37)
def _(c):
    t = c.f("t", c.Lq + c.Lk, grad=True)
    return Mods(lambda s, b, h, q, k: s + t[(q - k).abs()])


@case("learn_bias_qk", "loads learn", origin="pt learn", Lq=37, Lk=37)
def _(c):
    t = c.f("t", c.Lq, c.Lk, grad=True)
    return Mods(lambda s, b, h, q, k: s + t[q, k])


@case("learn_bias_hqk", "loads learn", origin="pt learn", Lq=37, Lk=37)
def _(c):
    t = c.f("t", c.Hq, c.Lq, c.Lk, grad=True)
    return Mods(lambda s, b, h, q, k: s + t[h, q, k])


@case("learn_bias_bhqk", "loads learn", origin="pt learn", Lq=21, Lk=37)
def _(c):
    t = c.f("t", c.B, c.Hq, c.Lq, c.Lk, grad=True)
    return Mods(lambda s, b, h, q, k: s + t[b, h, q, k])


@case("learn_multiplicative_q", "loads learn", origin="pt learn", Lq=37, Lk=37)
def _(c):
    t = c.f("t", c.Lq, grad=True)
    return Mods(lambda s, b, h, q, k: t[q] * s)


@case("learn_clamped_window_bias", "loads learn clamp", origin="pt learn", Lq=43, Lk=43)
def _(c):
    w = 8
    t = c.f("t", 2 * w + 1, grad=True, fp32=True)
    return Mods(lambda s, b, h, q, k: s + t[(q - k).clamp(-w, w) + w])


@case("learn_key_bias", "loads learn", origin="pt learn", Lq=37, Lk=45)
def _(c):
    t = c.f("t", c.Lk, grad=True, fp32=True)
    return Mods(lambda s, b, h, q, k: s + t[k])


@case("learn_indirect", "loads learn indirect", origin="pt learn", Lq=37, Lk=37)
def _(c):
    t, o = c.f("t", c.Lq, grad=True), c.i("o", 0, c.Lq, (c.Lq,))
    return Mods(lambda s, b, h, q, k: s + t[o[q]])


@case("learn_same_table_twice", "loads learn multi_use", origin="pt learn (compiled flex raises)", Lq=37, Lk=37)
def _(c):
    t = c.f("t", max(c.Lq, c.Lk), grad=True)
    return Mods(lambda s, b, h, q, k: s + t[q] + t[k])




@case("learn_head_gate", "loads learn trans", origin="pt learn", Lq=37, Lk=37)
def _(c):
    t = c.f("t", c.Hq, grad=True, fp32=True)
    return Mods(lambda s, b, h, q, k: s * torch.sigmoid(t[h]))


@case("learn_two_tables_mixed_dtype", "loads learn", origin="pt learn", Lq=37, Lk=37)
def _(c):
    x, y = c.f("x", c.Lq, grad=True), c.f("y", c.Lk, grad=True, fp32=True)
    return Mods(lambda s, b, h, q, k: s + x[q] + y[k])


@case("learn_scalar_temperature", "loads learn scalar_grad flex_no_bwd", origin="pytorch#145208", Lq=32, Lk=32)
def _(c):
    t = c.f("t", (), grad=True, positive=True)
    return Mods(lambda s, b, h, q, k: s * t)




@case("learn_banded_bias_masked", "loads learn clamp oob_hazard", origin="pytorch#147551", Lq=40, Lk=40)
def _(c):
    w = 12
    t = c.f("t", c.B, c.Hq, c.Lq, w, grad=True)
    return Mods(lambda s, b, h, q, k: s + t[b, h, q, (q - k).clamp(0, w - 1)], lambda b, h, q, k: (k <= q) & (q - k < w))




# ------------------------------------------------------------------------------------------------------------ D. masks
def causal(b, h, q, k):
    return k <= q


@case("m_causal", origin="pt", Lq=65, Lk=65)
def _(c):
    return Mods(mask=causal)


@case("m_causal_gqa_pow2", origin="pt", Hq=8, Hkv=2)
def _(c):
    return Mods(mask=causal)


@case("m_causal_gqa_odd_ratio", origin="pytorch#143117", Hq=6, Hkv=2, Lq=9, Lk=33)
def _(c):
    return Mods(mask=lambda b, h, q, k: k <= q + (c.Lk - c.Lq))


@case("m_causal_unequal_dims", origin="pt", D=16, Dv=40, Lq=50, Lk=50)
def _(c):
    return Mods(mask=causal)


@case("m_causal_odd_head_dim", origin="pt", D=17, Dv=17, Lq=30, Lk=30)
def _(c):
    return Mods(mask=causal)


@case("m_anti_causal", origin="pt")
def _(c):
    return Mods(mask=lambda b, h, q, k: q <= k)


@case("m_sliding_window", origin="attn-gym", Lq=90, Lk=90)
def _(c):
    return Mods(mask=lambda b, h, q, k: (k <= q) & (q - k <= 17))


@case("m_sliding_symmetric", origin="own", Lq=90, Lk=90)
def _(c):
    return Mods(mask=lambda b, h, q, k: (q - k).abs() < 9)


@case("m_prefix_lm", origin="attn-gym", Lq=70, Lk=70)
def _(c):
    return Mods(mask=lambda b, h, q, k: (k < 19) | (k <= q))


@case("m_dilated_window", "mod", origin="attn-gym", Lq=64, Lk=64)
def _(c):
    def mask(b, h, q, k):
        d = (q - k).abs()
        return (d <= 20) & (d % 4 == 0)

    return Mods(mask=mask)


@case("m_longformer", "loads data_mask", origin="attn-gym", Lq=64, Lk=64)
def _(c):
    g = c.bool_("g", (max(c.Lq, c.Lk),), p=0.06)
    return Mods(mask=lambda b, h, q, k: ((q - k).abs() <= 5) | g[q] | g[k])




@case("m_document", "loads data_mask", origin="pt", Lq=63, Lk=63)
def _(c):
    ids, _off = c.doc_ids("d", 4, c.Lq)
    return Mods(mask=lambda b, h, q, k: ids[q] == ids[k])


@case("m_document_causal_local", "loads data_mask indirect", origin="attn-gym", Lq=77, Lk=77)
def _(c):
    ids, off = c.doc_ids("d", 5, c.Lq)
    return Mods(mask=lambda b, h, q, k: (ids[q] == ids[k]) & (q - off[ids[q]] >= k - off[ids[k]]))


@case("m_document_interval", "loads data_mask indirect", origin="attn-gym", Lq=77, Lk=77)
def _(c):
    ids, off = c.doc_ids("d", 5, c.Lq)
    return Mods(mask=lambda b, h, q, k: (k >= off[ids[q]]) & (k <= q))


@case("m_document_per_batch", "loads data_mask batch_mask", origin="pt-flash", Lq=64, Lk=64)
def _(c):
    ids = c.ic("ids", torch.stack([torch.arange(c.Lq) * (j + 2) // c.Lq for j in range(c.B)]))
    return Mods(mask=lambda b, h, q, k: ids[b, q] == ids[b, k])




@case("m_shared_prefix", "loads data_mask indirect", origin="attn-gym", Lq=18, Lk=18, fixed_shape=True)
def _(c):
    lens, pre = [3, 2, 2, 2, 3, 2, 2, 2], [0, 0, 0, 0, 4, 4, 4, 4]
    off = c.ic("off", torch.tensor([0] + lens).cumsum(0))
    ids = c.ic("ids", torch.repeat_interleave(torch.arange(8), torch.tensor(lens)))
    p = c.ic("p", pre)

    def mask(b, h, q, k):
        d = ids[q]
        r = p[d]
        own = (k >= off[d]) & (k <= q)
        return own | ((r != d) & (k >= off[r]) & (k < off[r + 1]))

    return Mods(mask=mask)


@case("m_batchify", "intdiv mod", origin="attn-gym", Lq=60, Lk=60)
def _(c):
    n = 12
    return Mods(mask=lambda b, h, q, k: (q // n == k // n) & (k % n <= q % n))


@case("m_padding_lengths", "loads data_mask batch_mask empty_rows", origin="pt")
def _(c):
    n = c.ic("n", [(7 * (j + 3)) % c.Lq + 1 for j in range(c.B)])
    return Mods(mask=lambda b, h, q, k: (q < n[b]) & (k < n[b]))


@case("m_key_padding_only", "loads data_mask batch_mask", origin="hf", Lq=20, Lk=44)
def _(c):
    n = c.ic("n", [(11 * (j + 2)) % c.Lk + 1 for j in range(c.B)])
    return Mods(mask=lambda b, h, q, k: k < n[b])


@case("m_causal_bidirectional_prefix", "loads data_mask batch_mask", origin="pt")
def _(c):
    n = c.i("n", 0, c.Lq, (c.B,))
    return Mods(mask=lambda b, h, q, k: (k <= q) | ((q <= n[b]) & (k <= n[b])))


@case("m_natten2d", "intdiv mod clamp coord2d", origin="attn-gym", Lq=72, Lk=72, fixed_shape=True)
def _(c):
    W, H, r = 9, 8, 2

    def mask(b, h, q, k):
        cy = (q // W).clamp(r, H - 1 - r)
        cx = (q % W).clamp(r, W - 1 - r)
        return ((cy - k // W).abs() <= r) & ((cx - k % W).abs() <= r)

    return Mods(mask=mask)


@case("m_natten2d_float_div_or", "mod idx_float coord2d", origin="pt", Lq=64, Lk=64)
def _(c):
    W = 8
    return Mods(mask=lambda b, h, q, k: ((q / W - k / W).abs() <= 1) | ((q % W - k % W).abs() <= 1))


@case("m_natten2d_tiled", "intdiv mod clamp coord2d", origin="attn-gym", Lq=96, Lk=96, fixed_shape=True)
def _(c):
    W, H, tw, th, r = 12, 8, 4, 2, 2

    def xy(i):
        t, o = i // (tw * th), i % (tw * th)
        return (t % (W // tw)) * tw + o % tw, (t // (W // tw)) * th + o // tw

    def mask(b, h, q, k):
        (qx, qy), (kx, ky) = xy(q), xy(k)
        return ((qx.clamp(r, W - 1 - r) - kx).abs() <= r) & ((qy.clamp(r, H - 1 - r) - ky).abs() <= r)

    return Mods(mask=mask)




@case("m_natten3d_causal_time", "intdiv mod clamp coord3d", origin="own", Lq=90, Lk=90, fixed_shape=True)
def _(c):
    H, W = 3, 6

    def mask(b, h, q, k):
        tq, tk = q // (H * W), k // (H * W)
        yq, yk = (q // W) % H, (k // W) % H
        xq, xk = q % W, k % W
        return (tk <= tq) & (tq - tk < 3) & ((yq - yk).abs() <= 1) & ((xq - xk).abs() <= 2)

    return Mods(mask=mask)


def _sta(i, grid, tile):
    t = i // math.prod(tile)
    n = [g // s for g, s in zip(grid, tile)]
    out = []
    for d in range(len(n)):
        out.append((t // math.prod(n[d + 1 :])) % n[d])
    return out


@case("m_sta2d_with_text", "intdiv mod clamp coord2d", origin="attn-gym", Lq=70, Lk=70, fixed_shape=True)
def _(c):
    grid, tile, kern, text = (8, 8), (2, 2), (3, 2), 6  # kernel measured in tiles
    vis = math.prod(grid)
    n = [g // s for g, s in zip(grid, tile)]

    def mask(b, h, q, k):
        ok = (q < vis) & (k < vis)
        for a, m, w, size in zip(_sta(q, grid, tile), _sta(k, grid, tile), kern, n):
            lo, hi = w // 2, w // 2 + (w % 2 - 1)
            mid = a.clamp(lo, size - 1 - hi)
            ok = ok & (m >= mid - lo) & (m <= mid + hi)
        return ok | (((q < vis) & (k >= vis)) | (q >= vis)) & (k < vis + text)

    return Mods(mask=mask)




@case("m_svg_spatial", origin="attn-gym", Lq=96, Lk=96)
def _(c):
    prompt, frame, width = 10, 20, 16
    return Mods(mask=lambda b, h, q, k: (q < prompt) | (k < prompt + frame) | ((q - k).abs() < width))


@case("m_svg_temporal", "mod", origin="attn-gym", Lq=90, Lk=90)
def _(c):
    prompt, frame, w = 10, 20, 3
    return Mods(
        mask=lambda b, h, q, k: (q < prompt)
        | (k < prompt)
        | ((torch.remainder(q - prompt, frame) - torch.remainder(k - prompt, frame)).abs() < w)
    )


@case("m_flamingo_cross", "loads data_mask indirect", origin="attn-gym", Lq=12, Lk=9, fixed_shape=True)
def _(c):
    iv = c.ic("iv", [[0, 7], [1, 7], [7, 12]])
    img = c.ic("img", [0, 0, 0, 1, 1, 1, 2, 2, 2])
    return Mods(mask=lambda b, h, q, k: (q >= iv[img[k], 0]) & (q < iv[img[k], 1]))


@case("m_block_diffusion", "intdiv mod", origin="attn-gym", Lq=96, Lk=96, fixed_shape=True)
def _(c):
    S, n = 48, 8

    def mask(b, h, q, k):
        nq, nk = q < S, k < S
        bq, bk = (q % S) // n, (k % S) // n
        return ((bq == bk) & (nq == nk)) | ((bq > bk) & nq & ~nk) | ((bq >= bk) & ~nq & ~nk)

    return Mods(mask=mask)


@case("m_tree_ancestors", "loads data_mask clamp", origin="attn-gym jetspec", Lq=7, Lk=27, fixed_shape=True)
def _(c):
    P, parent = 20, [-1, 0, 1, 1, 3, 3, 0]
    a = torch.eye(7, dtype=torch.bool)
    for j in range(1, 7):
        a[j] |= a[parent[j]]
    a = c.ic("a", a, torch.bool)
    return Mods(mask=lambda b, h, q, k: (k < P) | a[q, (k - P).clamp(0, 6)])




@case("m_topk_tiles", "loads data_mask intdiv batch_mask head_mask", origin="attn-gym vsa", Lq=64, Lk=64)
def _(c):
    n = 16
    sel = c.bool_("sel", (c.B, c.Hq, -(-c.Lq // n), -(-c.Lk // n)), p=0.4)
    return Mods(mask=lambda b, h, q, k: sel[b, h, q // n, k // n] | (q // n == k // n))


@case("m_first_half_rows_only", "empty_rows", origin="pt")
def _(c):
    return Mods(mask=lambda b, h, q, k: q < c.Lq // 2)


@case("m_nothing_visible", "empty_rows", origin="pt")
def _(c):
    return Mods(mask=lambda b, h, q, k: (k <= q) & (k > q))


@case("m_random_query_rows", "loads data_mask batch_mask empty_rows", origin="pt")
def _(c):
    r = c.bool_("r", (c.B, c.Lq))
    return Mods(mask=lambda b, h, q, k: ~r[b, q])


@case("m_per_batch_offset", "loads data_mask batch_mask", origin="pt")
def _(c):
    o = c.ic("o", [16 * j for j in range(c.B)])
    return Mods(mask=lambda b, h, q, k: q + o[b] >= k)


@case("m_decode_position", "loads data_mask", origin="pt-decode", Lq=1, Lk=75, Hq=8, Hkv=2)
def _(c):
    pos = c.ic("pos", 50)
    return Mods(mask=lambda b, h, q, k: k <= q + pos)


@case("m_decode_reverse_offset", "loads data_mask", origin="pt-decode", Lq=3, Lk=61)
def _(c):
    pos, bk, bq = c.ic("pos", 27), c.f("bk", c.Lk), c.f("bq", c.Lq)
    return Mods(lambda s, b, h, q, k: s + bk[k] + bq[q], lambda b, h, q, k: k >= q + pos)


@case("m_dense_bool_table", "loads data_mask batch_mask empty_rows", origin="pt-flash", Lq=33, Lk=49)
def _(c):
    t = c.bool_("t", (c.Lq, c.B, c.Lk))
    return Mods(mask=lambda b, h, q, k: t[q, b, k])


@case("m_head_kinds", "loads head_mask empty_rows", origin="pt-decode")
def _(c):
    t = c.ic("t", [j % c.Hq != 0 for j in range(c.Hq)], torch.bool)
    return Mods(mask=lambda b, h, q, k: t[h] & (k <= q))




@case("m_float_compare_buffers", "loads data_mask batch_mask head_mask", origin="pt-flash")
def _(c):
    x, y = c.f("x", c.Hq), c.f("y", c.B)
    return Mods(mask=lambda b, h, q, k: (k <= q) | (x[h].to(torch.float32) + y[b].to(torch.float32) > 0))


@case("m_alternate_batches", "mod batch_mask empty_rows", origin="pt", B=3)
def _(c):
    return Mods(mask=lambda b, h, q, k: (k <= q) & (b % 2 == 0))


@case("m_two_islands", origin="pt", Lq=64, Lk=64)
def _(c):
    return Mods(mask=lambda b, h, q, k: (k < 8) | (k >= 40))


@case("m_modulo_rows", "mod empty_rows", origin="pytorch#134852", Lq=80, Lk=80)
def _(c):
    return Mods(mask=lambda b, h, q, k: q % 40 < 10)




@case("m_kv_batch_broadcast_causal", "kv_broadcast", origin="pt", B=3)
def _(c):
    return Mods(mask=causal)


@case("m_paged_physical", "loads data_mask indirect intdiv mod batch_mask", origin="pt paged", Lq=6, Lk=64, fixed_shape=True)
def _(c):
    P = 16
    logical = c.ic("logical", ([[2, 0, -1, 1], [1, -1, 0, 2]] * c.B)[: c.B])

    def mask(b, h, q, k):
        page = logical[b, k // P]
        return (page >= 0) & (page * P + k % P <= q + 30)

    return Mods(mask=mask)




@case("m_causal_rel_nan_outside_batch", "loads nan_hazard", origin="pt", Lq=33, Lk=33)
def _(c):
    t = c.f("t", 2 * c.B, c.Hq, c.Lq, c.Lk)
    with torch.no_grad():
        t[c.B :] = float("nan")
    return Mods(lambda s, b, h, q, k: s + t[b, h, q, k], causal)


# ------------------------------------------------------------------------------------------------------------ reference
def _axes(B, H, Lq, Lk, device):
    ar = lambda n, pos: torch.arange(n, device=device).view([-1 if i == pos else 1 for i in range(4)])
    return ar(B, 0), ar(H, 1), ar(Lq, 2), ar(Lk, 3)


def expand_kv(x, Hq, B):
    x = x.expand(B, *x.shape[1:])
    g = Hq // x.shape[1]
    return x[:, :, None].expand(-1, -1, g, -1, -1).reshape(B, Hq, x.shape[2], x.shape[3])


def reference_attention(q, k, v, score_mod=None, mask_mod=None, scale=None, work=torch.float64, probe="broadcast"):
    """Dense attention in `work` precision. Returns out, lse, max. Differentiable in q, k, v and captured tensors.

    probe="broadcast" evaluates a mod once on broadcast index tensors; probe="scalar" calls it per element with 0-d tensors
    (slow; the semantics oracle). work=q.dtype with half inputs gives the eager low-precision yardstick.
    """
    B, Hq, Lq, D = q.shape
    scale = D**-0.5 if scale is None else scale
    q, k, v = q.to(work), expand_kv(k.to(work), Hq, B), expand_kv(v.to(work), Hq, B)
    stat = work if work in (torch.float64, torch.float32) else torch.float32
    s = torch.einsum("bhqd,bhkd->bhqk", q, k).to(stat) * scale
    Lk = k.shape[2]
    b_, h_, q_, k_ = _axes(B, Hq, Lq, Lk, q.device)
    if probe == "broadcast":
        if score_mod is not None:
            s = score_mod(s, b_, h_, q_, k_).to(stat).expand(B, Hq, Lq, Lk)
        m = None if mask_mod is None else mask_mod(b_, h_, q_, k_).expand(B, Hq, Lq, Lk)
    else:
        ints = [torch.arange(n, device=q.device) for n in (B, Hq, Lq, Lk)]
        rows, bits = [], []
        for ib in ints[0]:
            for ih in ints[1]:
                for iq in ints[2]:
                    for ik in ints[3]:
                        if score_mod is not None:
                            rows.append(score_mod(s[ib, ih, iq, ik], ib, ih, iq, ik).to(stat).reshape(()))
                        if mask_mod is not None:
                            bits.append(bool(mask_mod(ib, ih, iq, ik)))
        if rows:
            s = torch.stack(rows).view(B, Hq, Lq, Lk)
        m = torch.tensor(bits, device=q.device).view(B, Hq, Lq, Lk) if bits else None
    if m is not None:
        s = torch.where(m, s, NEG)
    top = s.detach().amax(-1, keepdim=True)
    base = torch.where(torch.isneginf(top), 0.0, top)
    p = torch.exp(s - base)
    z = p.sum(-1, keepdim=True)
    empty = z == 0
    zz = torch.where(empty, 1.0, z)
    out = torch.einsum("bhqk,bhkd->bhqd", (p / zz).to(work), v)
    lse = torch.where(empty, NEG, zz.log() + base).squeeze(-1)
    return out, lse, top.squeeze(-1)


# ------------------------------------------------------------------------------------------------------- instantiation
class Run:
    """Tensors + mods of one case in the dtype under test, and the matching fp64 golden."""

    def __init__(self, case, dtype, device, seed, grad, over):
        self.case, self.dtype, self.device, self.seed, self.grad = case, dtype, device, seed, grad
        self.shape = {**DEFAULT, **case.shape, **over}
        self.kvB = 1 if "kv_broadcast" in case.needs else self.shape["B"]
        self.ctx, self.mods = self._build(dtype)
        self.q, self.k, self.v = self._qkv(dtype, grad)
        self.gqa = self.shape["Hq"] != self.shape["Hkv"]

    def _build(self, dtype):
        through = self.dtype if self.dtype != torch.float64 else torch.float64
        ctx = Ctx(**self.shape, dtype=dtype, through=through, device=self.device, seed=self.seed)
        mods = self.case.build(ctx)
        return ctx, mods

    def _qkv(self, dtype, grad):
        s, g = self.shape, torch.Generator().manual_seed(self.seed + 17)
        sizes = [(s["B"], s["Hq"], s["Lq"], s["D"]), (self.kvB, s["Hkv"], s["Lk"], s["D"]), (self.kvB, s["Hkv"], s["Lk"], s["Dv"])]
        return [
            torch.randn(z, generator=g, dtype=torch.float64).to(self.dtype).to(dtype).to(self.device).requires_grad_(grad)
            for z in sizes
        ]

    def dout(self, dtype):
        s = self.shape
        g = torch.Generator().manual_seed(self.seed + 23)
        x = torch.randn(s["B"], s["Hq"], s["Lq"], s["Dv"], generator=g, dtype=torch.float64)
        return x.to(self.dtype).to(dtype).to(self.device)

    @property
    def ref_score(self):
        return self.mods.ref_score or self.mods.score

    def golden(self, probe="broadcast", grads=False, work=torch.float64):
        """dict(out, lse, max[, dq, dk, dv, d:<captured>]) computed in fp64 (or `work`) from the very numbers under test."""
        ctx, mods = self._build(work)
        q, k, v = self._qkv(work, grads)
        score = mods.score if probe == "scalar" else (mods.ref_score or mods.score)
        out, lse, top = reference_attention(q, k, v, score, mods.mask, work=work, probe=probe)
        res = dict(out=out.detach(), lse=lse.detach(), max=top.detach())
        if grads:
            names = ["dq", "dk", "dv"] + ["d:" + n for n in sorted(ctx.want_grad)]
            ins = [q, k, v] + [ctx.captured[n] for n in sorted(ctx.want_grad)]
            for n, x in zip(names, torch.autograd.grad(out, ins, self.dout(out.dtype), allow_unused=True)):
                res[n] = x
        return res


def instantiate(case, dtype=torch.float32, device="cpu", seed=0, grad=False, **over):
    if isinstance(case, str):
        case = CASES[case]
    if case.fixed_shape:
        bad = {"Lq", "Lk"} & set(over)
        assert not bad, f"{case.name} has a fixed grid; cannot override {bad}"
    return Run(case, dtype, device, seed, grad, over)


# ------------------------------------------------------------------------------------------------------------ judgement
def judge_mean_ratio(gold, yard, got, dtype, paged=False, strict=True):
    """PyTorch main rule. err = mean|x - gold|; strict: err(got) <= f*err(yard); the present form allows (1+f)*err + 1e-7.
    f = 1.1 half / 10 fp32 / 20 fp32 paged. `yard` = same-dtype eager result. NaN fails."""
    f = 1.1 if dtype in (torch.float16, torch.bfloat16) else (20.0 if paged else 10.0)
    fin = torch.isfinite(gold)
    e_got = (got.double() - gold.double())[fin].abs().mean().item() if fin.any() else 0.0
    e_ref = (yard.double() - gold.double())[fin].abs().mean().item() if fin.any() else 0.0
    ok = not math.isnan(e_got) and e_got <= (f * e_ref if strict else (1 + f) * e_ref) + 1e-7
    return ok, e_got, e_ref


def judge_rmse_bias(gold, yard, got, dtype):
    """PyTorch learnable-bias rule; f=1.35 enters twice (x1.82), and x10 more per factor in fp32."""
    f = 1.35 * (10.0 if dtype == torch.float32 else 1.0)
    rm = lambda x: (x.double() - gold.double()).square().mean().sqrt().item()
    return rm(got) <= rm(yard) * f * f + 1e-12, rm(got), rm(yard)


def judge_max_vs_peer(ref, peer, got, rtol=2.0):
    """FlashAttention-style rule of flex-flash tests: max err <= rtol * peer's max err + 2 * rounding noise of ref."""
    atol = 2 * ((ref + 0.3) - 0.3 - ref).abs().max().item()
    e = lambda x: (x - ref).abs().max().item()
    return e(got) <= rtol * e(peer) + atol, e(got), e(peer)
