"""Do the emitted sm90 kernels keep packed sequences apart, when their threads run on the host?

Like ``test_sm90_emulated`` and its like of the backward, with several sequences of very different lengths in one tensor, beside each one alone.
"""

from __future__ import annotations

import math

import pytest
import test_sm90_backward_emulated as backward
import torch
from test_sm90_emulated import CAUSAL, Case, emulate

import flashgen
from flashgen.reference import reference

SKEWED = ((300, 1, 0, 40, 129, 3), (300, 130, 7, 40, 0, 5))  # rows and keys of each sequence
MANY = (tuple(n % 3 for n in range(60)), tuple(n % 4 for n in range(60)))
SEARCHED = flashgen.Variant(mask=flashgen.causal & (flashgen.sliding_window(left=40, right=0) | flashgen.mask(lambda b, h, q, k: k < 4)))
NARROW = flashgen.Variant(mask=lambda b, h, q, k: (q - k < 9) & (k <= q), score=flashgen.softcap(2.0))  # rows past the keys see none
SHORT = ((90, 20, 128, 127, 200, 1), (20, 100, 128, 3, 128, 128))  # most of them fit one block of keys
CASES = (
    (Case("full, 128", head_dim=(128, 128), heads=(2, 1)), SKEWED),
    (Case("causal, stored by TMA", CAUSAL, heads=(4, 2)), SKEWED),
    (Case("causal, stored from registers", CAUSAL, plan={"store_registers": 1}), SKEWED),
    (Case("window, 256", flashgen.Variant(mask=flashgen.causal & flashgen.sliding_window(left=70, right=0)), (256, 256)), SKEWED),
    (Case("ALiBi", flashgen.Variant(score=flashgen.alibi()), heads=(2, 2), max_scores=True), SKEWED),
    (Case("first keys and a window: tiles are searched", SEARCHED, heads=(2, 1)), SKEWED),
    (Case("many short ones", CAUSAL, (16, 16), heads=(2, 2)), MANY),
    (Case("first keys and a window, short ones", SEARCHED, (128, 128), heads=(2, 1)), SHORT),
    (Case("soft-cap and a window, short ones", NARROW, (128, 128), heads=(2, 2)), SHORT),
)
SPARE = 5  # rows after the last sequence


def offsets(lengths):
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0).to(torch.int32)


def make(lengths, heads, dim, dtype, generator):
    """A packed tensor as one batch item (1, heads, rows, dim); rows of no sequence are NaN."""
    t = torch.randn(1, sum(lengths) + SPARE, heads, dim, generator=generator).to(dtype)
    t[:, sum(lengths) :] = math.nan
    return t.transpose(1, 2)


@pytest.mark.parametrize(("case", "lengths"), CASES, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("poisoned", [False, True], ids=["", "a neighbour of NaN"])
def test_the_forward_keeps_sequences_apart(case, lengths, poisoned, tmp_path):
    generator = torch.Generator().manual_seed(1)
    (heads, kv_heads), (dim_qk, dim_v), (q_lens, k_lens) = case.heads, case.head_dim, lengths
    q, k, v = (make(n, h, d, case.dtype, generator) for n, h, d in ((q_lens, heads, dim_qk), (k_lens, kv_heads, dim_qk), (k_lens, kv_heads, dim_v)))
    cu_q, cu_k = offsets(q_lens), offsets(k_lens)
    if poisoned:
        q[:, :, cu_q[3] : cu_q[4]], k[:, :, cu_k[3] : cu_k[4]], v[:, :, cu_k[3] : cu_k[4]] = math.nan, math.nan, math.nan
    out, lse, top = emulate(case, q, k, v, tmp_path, (cu_q, cu_k))
    rounding = 2**-8 if case.dtype == torch.bfloat16 else 2**-11
    for n in range(len(q_lens)):
        if poisoned and n == 3:
            continue
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        wanted, wanted_lse, wanted_top = reference(case.variant, q[:, :, rows].double(), k[:, :, keys].double(), v[:, :, keys].double())
        assert (out[:, :, rows].double() - wanted).norm() <= rounding * wanted.norm(), n
        seen = wanted_lse > -math.inf
        assert (lse[:, :, rows][~seen] == -math.inf).all() and torch.allclose(lse[:, :, rows][seen].double(), wanted_lse[seen], atol=1e-4), n
        if case.max_scores:
            assert torch.allclose(top[:, :, rows].double(), wanted_top, atol=1e-4), n
    assert (out[:, :, cu_q[-1] :] == 0).all() and (lse[:, :, cu_q[-1] :] == -math.inf).all(), "rows of no sequence"


BACKWARD = (
    (backward.Case("full, 128, grouped heads", head_dim=(128, 128), heads=(2, 1)), SKEWED),
    (backward.Case("causal", CAUSAL, heads=(2, 2)), SKEWED),
    (backward.Case("causal, added from registers, a gradient of lse", CAUSAL, (128, 128), plan={"dq_staged": 0}, dlse=True), SKEWED),
    (backward.Case("deterministic soft-cap", flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(2.0)), deterministic=True), SKEWED),
    (backward.Case("wide", CAUSAL, (256, 256), heads=(2, 1)), SKEWED),
    (backward.Case("only dq", CAUSAL, wanted=("dq",)), SKEWED),
    (backward.Case("first keys and a window", SEARCHED, heads=(2, 1), deterministic=True), SKEWED),
    (backward.Case("many short ones", CAUSAL, (16, 16), heads=(2, 2)), MANY),
)


@pytest.mark.parametrize(("case", "lengths"), BACKWARD, ids=lambda x: getattr(x, "name", ""))
@pytest.mark.parametrize("poisoned", [False, True], ids=["", "a neighbour of NaN"])
def test_the_backward_keeps_sequences_apart(case, lengths, poisoned, tmp_path):
    generator = torch.Generator().manual_seed(1)
    (heads, kv_heads), (dim_qk, dim_v), (q_lens, k_lens) = case.heads, case.head_dim, lengths
    sizes = ((q_lens, heads, dim_qk), (k_lens, kv_heads, dim_qk), (k_lens, kv_heads, dim_v), (q_lens, heads, dim_v))
    q, k, v, dout = (make(n, h, d, case.dtype, generator) for n, h, d in sizes)
    cu_q, cu_k = offsets(q_lens), offsets(k_lens)
    out, lse, dlse = torch.full_like(dout, math.nan), torch.full(q.shape[:3], math.nan), torch.randn(q.shape[:3], generator=generator) * case.dlse
    wanted = {name: torch.full_like(t, math.nan, dtype=torch.double) for name, t in (("dq", q), ("dk", k), ("dv", v))}
    parts = [(slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])) for n in range(len(q_lens))]
    for rows, keys in parts:
        leaves = [t.double().requires_grad_() for t in (q[:, :, rows], k[:, :, keys], v[:, :, keys])]
        alone, alone_lse, _ = reference(case.variant, *leaves)
        out[:, :, rows], lse[:, :, rows] = alone.detach(), alone_lse.detach()
        seen = alone_lse > -math.inf
        total = (alone * dout[:, :, rows].double()).sum() + torch.where(seen, alone_lse * dlse[:, :, rows].double(), 0.0).nan_to_num().sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        for name, at, g in zip(("dq", "dk", "dv"), (rows, keys, keys), found):
            wanted[name][:, :, at] = 0.0 if g is None else g
    if poisoned:
        for t, at in ((q, parts[3][0]), (dout, parts[3][0]), (k, parts[3][1]), (v, parts[3][1])):
            t[:, :, at] = math.nan
    got = backward.emulate(case, {"q": q, "k": k, "v": v, "out": out, "dout": dout}, lse, dlse, tmp_path, (cu_q, cu_k))
    rounding = 2**-7 if case.dtype == torch.bfloat16 else 2**-10
    for name, g in got.items():
        assert (g[:, :, (cu_q if name == "dq" else cu_k)[-1] :] == 0).all(), f"{name} of no sequence"
        for n, (rows, keys) in enumerate(parts):
            at = rows if name == "dq" else keys
            expected = wanted[name][:, :, at]
            if not (poisoned and n == 3):
                assert (g[:, :, at].double() - expected).norm() <= rounding * (expected.norm() + 1), (name, n)  # short ones have few values to be wrong in
