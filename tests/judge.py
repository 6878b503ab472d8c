"""The numeric judge over the case tables, through the public interface: what the CPU, GPU and build tests share.

``variant_problems`` runs one case of cases_variants (forward, lse, max and every gradient against fp64, beside an eager run in the same dtype);
``fault_problems`` one of cases_faults. Both return a list of what is wrong, empty when the case passes.
"""

from __future__ import annotations

import functools
import operator

import cases_faults
import cases_variants
import torch

import flashgen as fg

AVAILABLE_LATER = ("paged-split",)  # kinds of fault cases that need features of later versions
HALF = (torch.float16, torch.bfloat16)


def attention(
    q, k, v, *, layout="bhsd", scale=None, causal=None, window=None, align=None, softcap=0.0, alibi_slopes=None, sinks=None, attn_mask=None, bias=None,
    key_padding_mask=None, seqused_k=None, score_fn=None, mask_fn=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    return_lse=False, num_splits=0, deterministic=False, dropout_p=0.0, seed=None, family=None,
):  # fmt: skip
    """The call contract of cases_faults, spelled in flashgen's interface."""
    bottom_right = (causal or align or "bottom_right") == "bottom_right"
    masks, scores = [], []
    if causal:
        masks.append(fg.causal if bottom_right else fg.causal_top_left)
    if window is not None:
        left, right = ((-1 if w is None else w) for w in window)
        if bottom_right:
            masks.append(fg.sliding_window(left=left, right=right))
        else:
            masks += [fg.mask(lambda b, h, i, j: j >= i - left)] if left >= 0 else []
            masks += [fg.mask(lambda b, h, i, j: j <= i + right)] if right >= 0 else []
    if attn_mask is not None:
        masks.append(fg.from_dense(attn_mask))
    if key_padding_mask is not None:
        masks.append(fg.from_dense(key_padding_mask[:, None, None, :]))
    if mask_fn is not None:
        masks.append(fg.mask(mask_fn))
    if softcap:
        scores.append(fg.softcap(softcap))
    if score_fn is not None:
        scores.append(fg.score(score_fn))
    if alibi_slopes is not None:
        if bottom_right:
            scores.append(fg.alibi(alibi_slopes))
        else:
            one = alibi_slopes.dim() == 1
            scores.append(fg.score(lambda s, b, h, i, j: s - (alibi_slopes[h] if one else alibi_slopes[b, h]) * abs(i - j)))
    if bias is not None:
        scores.append(fg.bias(bias))
    mask = functools.reduce(operator.and_, masks) if masks else None
    score = functools.reduce(operator.rshift, scores) if scores else None
    variant = fg.Variant(head_dim=(q.shape[-1], v.shape[-1]), mask=mask, score=score, scale=scale, sink=sinks is not None)
    kernel = fg.compile(variant, deterministic=deterministic or None, family=family, plan={"kv_splits": num_splits} if num_splits else None)
    extra = {"return_aux": return_lse, "dropout_p": dropout_p, "seed": seed}
    if sinks is not None:
        extra["sink"] = sinks
    if cu_seqlens_q is not None:
        result = kernel.varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **extra)
    else:
        if seqused_k is not None:
            extra["seqlens_k"] = torch.as_tensor(seqused_k, dtype=torch.int32, device=q.device)
        result = kernel(q, k, v, layout={"bhsd": "bhld", "bshd": "blhd"}[layout], **extra)
    return (result[0], result[1].lse) if return_lse else result


def stretched(case, stretch):
    """Longer sequences and head dim 64, so that a case spans several tiles; the table itself is small."""
    if stretch == 1:
        return {}
    shape = cases_variants.instantiate(case).shape
    over = dict(D=64, Dv=64) if shape["D"] == shape["Dv"] == 16 else {}
    return over if case.fixed_shape else over | dict(Lq=stretch * shape["Lq"] + 3, Lk=stretch * shape["Lk"] + 3)


def variant_problems(case, *, dtype, device, stretch=1, family=None):
    run = cases_variants.instantiate(case, dtype=dtype, device=device, grad=True, **stretched(case, stretch))
    kernel = fg.compile(fg.Variant(head_dim=(run.shape["D"], run.shape["Dv"]), mask=run.mods.mask, score=run.mods.score), family=family)
    out, aux = kernel(run.q, run.k, run.v, return_aux=True)
    names = ["dq", "dk", "dv"] + ["d:" + n for n in sorted(run.ctx.want_grad)]
    leaves = [run.q, run.k, run.v] + [run.ctx.captured[n] for n in sorted(run.ctx.want_grad)]
    grads = torch.autograd.grad(out, leaves, run.dout(dtype).to(out.dtype), allow_unused=True)
    got = {"out": out, "lse": aux.lse, "max": aux.max_scores, **dict(zip(names, grads))}
    gold = run.golden(grads=True)
    yard = run.golden(grads=True, work=dtype) if dtype != torch.float64 else gold
    problems = []
    for name, g in got.items():
        if gold.get(name) is None:
            continue
        if g is None:
            problems.append(f"{name}: no gradient")
            continue
        ref = gold[name].detach()
        problems += _compare(name, g.detach(), ref, ref if yard.get(name) is None else yard[name].detach(), dtype)
    return problems


def _compare(name, got, ref, yard, dtype):
    inf = ~torch.isfinite(ref)
    if not inf.equal(~torch.isfinite(got)) or not torch.equal(got[inf].double(), ref[inf].double()):
        return [f"{name}: finite where it should not be, or the reverse"]
    if dtype == torch.float64:
        finite = ~inf
        error = float((got - ref)[finite].abs().max()) if finite.any() else 0.0
        return [] if not finite.any() or error <= 1e-9 * max(1.0, float(ref[finite].abs().max())) else [f"{name}: max err {error:.2e}"]
    floor = 1e-3 if name in ("lse", "max") and dtype != torch.float32 else 0.0
    ok, e_got, e_ref = cases_variants.judge_mean_ratio(ref, yard, got, dtype)
    if name in ("dq", "dk") and dtype in HALF:  # delta = rowsum(dO * O) comes from an O rounded to 16 bits
        ok = ok or e_got <= 1.5 * e_ref + 1e-7
    if float(ref.abs().nan_to_num(posinf=0).max()) < 1e-9 and name.startswith("d"):  # a gradient that is exactly zero: only rounding is left
        floor = 2 * torch.finfo(dtype).eps
    if not ok and name.startswith("d:"):  # a sum of many rounded terms: the wider rule for learned tensors
        ok = cases_variants.judge_rmse_bias(ref, yard, got, dtype)[0]
    return [] if ok or e_got <= floor else [f"{name}: mean err {e_got:.2e} vs eager {e_ref:.2e}"]


def fault_problems(case, *, device, family=None):
    attend = functools.partial(attention, family=family)
    if case["expected"].startswith("error"):
        q, k, v, kw = case["build"](device=device)
        kw = {n: x for n, x in kw.items() if n not in ("grad_out", "params")}
        try:
            attend(q, k, v, **kw)
        except fg.FlashgenError:
            return []
        return ["no error raised"]
    crashes = []

    def watched(*args, **kw):
        try:
            return attend(*args, **kw)
        except fg.FlashgenError:
            raise
        except Exception as e:
            crashes.append(f"raised {type(e).__name__} (not a FlashgenError): {str(e)[:150]}")
            raise

    return cases_faults.check(case, watched, device=device) or crashes


def fault_cases(device, memory):
    """The fault cases that can run on a device within so many bytes."""
    where = torch.device(device).type
    return [c for c in cases_faults.CASES if c["dev"] in ("any", where) and c["mem"] <= memory and c["kind"] not in ("fp8", *AVAILABLE_LATER)]
