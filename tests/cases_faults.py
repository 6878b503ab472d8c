"""Neutral attention test inputs, written from scratch for flashgen.

Every case restates, in our own words and with our own synthetic numbers, an input shape / layout / option
combination that some public report said goes wrong in an attention kernel. Each case names the reports it comes from. No code or text of the reports is used here.

Contract of an implementation under test ("attn"):

    attn(q, k, v, **kw) -> out                     # or (out, lse) when kw['return_lse'] is true

dense layouts   layout='bhsd' (default) or 'bshd'
options         scale, causal in {None,'top_left','bottom_right'}, window=(left,right) (-1 = open, both ends
                inclusive, counted from the aligned diagonal), align (for window/alibi when causal is None),
                softcap, alibi_slopes (H,)|(B,H), sinks (Hq,), attn_mask (bool, True = attend), bias (float, added
                after softcap), key_padding_mask (B,Sk; True = real key), seqused_k (B,), score_fn(s,b,h,i,j),
                mask_fn(b,h,i,j), num_splits, deterministic, dropout_p, seed, q_descale/k_descale/v_descale
varlen          q:(Tq,Hq,D) with cu_seqlens_q, cu_seqlens_k; LSE is (Hq,Tq)
paged           k,v:(pages,page_size,Hk,D) with block_table (B,P) and seqused_k (B,)

Conventions the reference fixes (the project may choose others, but must then choose them on purpose):
  * s = scale*(q.k); s = softcap*tanh(s/softcap); s = score_fn(s); s += alibi + bias; mask; softmax.
  * alibi(i,j) = -slope*|i + off - j| with off = 0 (top_left) or len_k-len_q (bottom_right).
  * a row with no visible key gives out = 0, lse = -inf (lse = sink if there is a sink), all its gradients 0.
  * a masked key contributes nothing, whatever its bit pattern (NaN, Inf) is.
  * lse is natural-log, float32, shape (B,Hq,Sq).
"""
# ruff: noqa
from __future__ import annotations
import math, zlib, itertools
import torch

F8 = getattr(torch, "float8_e4m3fn", None)
BF, HF, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# ----------------------------------------------------------------------------------------------------------------
# fp64 reference
# ----------------------------------------------------------------------------------------------------------------
def _vec(x, B, H, dev):
    x = torch.as_tensor(x, device=dev).double()
    if x.dim() == 0:
        return x.view(1, 1, 1, 1)
    return x.view(1, H, 1, 1) if x.dim() == 1 else x.view(B, H, 1, 1)


def visible(B, Hq, Sq, Sk, dev, *, causal=None, window=None, align=None, attn_mask=None, bias=None,
            key_padding_mask=None, seqused_k=None, mask_fn=None):
    """Boolean (B,Hq,Sq,Sk): which (row, key) pairs take part in the softmax."""
    align = causal or align or "bottom_right"
    lenk = torch.full((B,), Sk, device=dev) if seqused_k is None else torch.as_tensor(seqused_k, device=dev).long()
    off = (lenk - Sq) if align == "bottom_right" else torch.zeros(B, dtype=torch.long, device=dev)
    i = torch.arange(Sq, device=dev).view(1, 1, Sq, 1)
    j = torch.arange(Sk, device=dev).view(1, 1, 1, Sk)
    d = i + off.view(B, 1, 1, 1)                       # aligned diagonal position of each row
    vis = (j < lenk.view(B, 1, 1, 1)).expand(B, 1, Sq, Sk).clone()
    if causal:
        vis &= j <= d
    if window is not None:
        l, r = window
        if l is not None and l >= 0:
            vis &= j >= d - l
        if r is not None and r >= 0:
            vis &= j <= d + r
    if key_padding_mask is not None:
        vis &= key_padding_mask.to(dev).view(B, 1, 1, Sk)
    vis = vis.expand(B, Hq, Sq, Sk)
    if attn_mask is not None:
        m = attn_mask.to(dev)
        assert m.dtype == torch.bool
        vis = vis & m.expand(B, Hq, Sq, Sk)
    if bias is not None:
        vis = vis & (bias.detach().to(dev).double() != -math.inf).expand(B, Hq, Sq, Sk)
    if mask_fn is not None:
        b = torch.arange(B, device=dev).view(B, 1, 1, 1)
        h = torch.arange(Hq, device=dev).view(1, Hq, 1, 1)
        vis = vis & mask_fn(b, h, i, j).expand(B, Hq, Sq, Sk)
    return vis


def ref_dense(q, k, v, *, scale=None, causal=None, window=None, align=None, softcap=0.0, alibi_slopes=None, sinks=None,
              attn_mask=None, bias=None, key_padding_mask=None, seqused_k=None, score_fn=None, mask_fn=None,
              drop_mask=None, dropout_p=0.0, q_descale=None, k_descale=None, v_descale=None):
    """q (B,Hq,Sq,D), k (B,Hk,Sk,D), v (B,Hk,Sk,Dv) in float64 (differentiable) -> out, lse, P(unnormalised mask applied)."""
    q, k, v = q.double(), k.double(), v.double()
    dev = q.device
    B, Hq, Sq, D = q.shape
    Hk, Sk, Dv = k.shape[1], k.shape[2], v.shape[3]
    if Hk == 0 or Hq % max(Hk, 1):
        raise ValueError("query heads must be a multiple of key/value heads")
    if scale is None:
        scale = 1.0 / math.sqrt(D) if D else 1.0
    if q_descale is not None: q = q * torch.as_tensor(q_descale).double().to(dev)
    if k_descale is not None: k = k * torch.as_tensor(k_descale).double().to(dev)
    if v_descale is not None: v = v * torch.as_tensor(v_descale).double().to(dev)
    g = Hq // Hk
    vis = visible(B, Hq, Sq, Sk, dev, causal=causal, window=window, align=align, attn_mask=attn_mask, bias=bias,
                  key_padding_mask=key_padding_mask, seqused_k=seqused_k, mask_fn=mask_fn)
    # keys that nobody may look at are replaced by zeros, so that their bit pattern cannot matter (also in autograd)
    seen = vis.view(B, Hk, g, Sq, Sk).any(dim=3).any(dim=2) if Sq else torch.zeros(B, Hk, Sk, dtype=torch.bool, device=dev)
    k = torch.where(seen[..., None], k, torch.zeros((), dtype=F64, device=dev))
    v = torch.where(seen[..., None], v, torch.zeros((), dtype=F64, device=dev))
    kk, vv = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = scale * (q @ kk.transpose(-1, -2))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(Sq, device=dev).view(1, 1, Sq, 1)
    j = torch.arange(Sk, device=dev).view(1, 1, 1, Sk)
    if score_fn is not None:
        b = torch.arange(B, device=dev).view(B, 1, 1, 1)
        h = torch.arange(Hq, device=dev).view(1, Hq, 1, 1)
        s = score_fn(s, b, h, i, j)
    if alibi_slopes is not None:
        al = causal or align or "bottom_right"
        lk = torch.full((B,), Sk, device=dev) if seqused_k is None else torch.as_tensor(seqused_k, device=dev).long()
        off = (lk - Sq if al == "bottom_right" else torch.zeros_like(lk)).view(B, 1, 1, 1)
        s = s - _vec(alibi_slopes, B, Hq, dev) * (i + off - j).abs().double()
    if bias is not None:
        bb = bias.to(dev).double()
        s = s + torch.where(bb == -math.inf, torch.zeros((), dtype=F64, device=dev), bb)
    neg = torch.full((), -math.inf, dtype=F64, device=dev)
    s = torch.where(vis, s, neg)
    snk = None if sinks is None else _vec(sinks, B, Hq, dev)
    m = s.detach().amax(-1, keepdim=True) if Sk else torch.full((B, Hq, Sq, 1), -math.inf, dtype=F64, device=dev)
    if snk is not None:
        m = torch.maximum(m, snk.detach().expand_as(m))
    m = torch.where(m == -math.inf, torch.zeros_like(m), m)
    p = torch.where(vis, torch.exp(s - m), torch.zeros((), dtype=F64, device=dev))
    l = p.sum(-1, keepdim=True)
    if snk is not None:
        l = l + torch.exp(snk - m)
    ok = l > 0
    ls = torch.where(ok, l, torch.ones_like(l))
    P = p / ls
    if drop_mask is not None:
        P = P * drop_mask.double() / (1.0 - dropout_p)
    bad = ~torch.isfinite(vv)
    out = P @ torch.where(bad, torch.zeros_like(vv), vv)
    if bool(bad.any()):                                   # only rows that really see a non-finite value may get it
        for b_, h_, j_ in torch.nonzero(bad.any(-1)).tolist():
            add = P[b_, h_, :, j_, None] * torch.where(bad[b_, h_, j_], vv[b_, h_, j_], torch.zeros_like(vv[b_, h_, j_]))
            out = out.clone()
            out[b_, h_] = torch.where(vis[b_, h_, :, j_, None], out[b_, h_] + add, out[b_, h_])
    lse = torch.where(ok, m + torch.log(ls), neg).squeeze(-1)
    return out, lse, P


def ref_attn(q, k, v, *, layout="bhsd", cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, return_lse=False,
             deterministic=False, num_splits=0, max_seqlen_q=None, max_seqlen_k=None, seed=None, **kw):
    """Reference with the whole contract of `attn`, in float64, differentiable. Returns (out64, lse64)."""
    _validate(q, k, v, layout, cu_seqlens_q, cu_seqlens_k, block_table, kw)
    if cu_seqlens_q is not None:
        cq, ck = [int(x) for x in cu_seqlens_q], [int(x) for x in cu_seqlens_k]
        Hq, Dv = q.shape[1], v.shape[2]
        outs, lses = [], []
        for s in range(len(cq) - 1):
            sub = {a: b for a, b in kw.items()}
            o, l, _ = ref_dense(q[cq[s]:cq[s + 1]].transpose(0, 1)[None], k[ck[s]:ck[s + 1]].transpose(0, 1)[None],
                                v[ck[s]:ck[s + 1]].transpose(0, 1)[None], **sub)
            outs.append(o[0].transpose(0, 1)); lses.append(l[0])
        tail = q.shape[0] - cq[-1]                         # rows that belong to no sequence: defined as 0 / -inf
        outs.append(torch.zeros(tail, Hq, Dv, dtype=F64, device=q.device))
        lses.append(torch.full((Hq, tail), -math.inf, dtype=F64, device=q.device))
        return torch.cat(outs, 0), torch.cat(lses, 1)
    if block_table is not None:
        B, P = block_table.shape
        page = k.shape[1]
        need = (torch.as_tensor(kw["seqused_k"]) + page - 1) // page
        if int(need.max()) > P:
            raise ValueError("block_table has too few columns for seqused_k")
        bt = block_table.long().clone()
        for b in range(B):                                 # unused table entries may hold anything
            bt[b, int(need[b]):] = 0
        k = k[bt].flatten(1, 2).transpose(1, 2)
        v = v[bt].flatten(1, 2).transpose(1, 2)
        q_ = q if layout == "bhsd" else q.transpose(1, 2)
        o, l, _ = ref_dense(q_, k, v, **kw)
        return (o if layout == "bhsd" else o.transpose(1, 2)), l
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    o, l, _ = ref_dense(q, k, v, **kw)
    return (o.transpose(1, 2) if layout == "bshd" else o), l


def _validate(q, k, v, layout, cq, ck, bt, kw):
    """The errors a careful front end gives, before any launch."""
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError("dtype mismatch")
    if not (q.device == k.device == v.device):
        raise ValueError("device mismatch")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError("q/k head dim mismatch")
    ha = {"bhsd": 1, "bshd": 2}[layout] if cq is None else 1
    kh = ha if bt is None else 2
    Hq, Hk, Hv = q.shape[ha], k.shape[kh], v.shape[kh]
    if Hk != Hv or Hk == 0 or Hq % Hk:
        raise ValueError("heads: Hq must be a multiple of Hk == Hv")
    if cq is None and bt is None:
        sa = 2 if layout == "bhsd" else 1
        if k.shape[sa] != v.shape[sa]:
            raise ValueError("k/v length mismatch")
        if not (q.shape[0] == k.shape[0] == v.shape[0]):
            raise ValueError("batch mismatch")
    m = kw.get("attn_mask")
    if m is not None and m.dtype != torch.bool:
        raise TypeError("attn_mask must be bool; pass additive masks as bias")
    b = kw.get("bias")
    if b is not None and not b.is_floating_point():
        raise TypeError("bias must be floating point")


# ----------------------------------------------------------------------------------------------------------------
# case table
# ----------------------------------------------------------------------------------------------------------------
CASES: list[dict] = []
_NONE = object()


def case(id, kind, build, expected="fp64-ref", *, dev="any", grads="qkv", src=(), note="", mem=0, lse=False,
         tol=None, optional=False):
    """expected: 'fp64-ref' | 'error:<hint>' | 'ref-or-error' | 'zeros' | 'system'
    grads: which of q,k,v (and b=bias, s=sinks, l=through lse) must match too; '' = forward only."""
    assert id not in {c["id"] for c in CASES}, id
    CASES.append(dict(id=id, kind=kind, build=build, expected=expected, dev=dev, grads=grads,
                      src=list(src), note=note, mem=mem, lse=lse, tol=tol, optional=optional))


class G:
    """Deterministic per-case random source; all tensors are synthetic."""
    def __init__(self, id, device):
        self.g = torch.Generator().manual_seed(zlib.crc32(id.encode()))
        self.device = device
    def n(self, *shape, dtype=F32, std=1.0, mean=0.0):
        return (torch.randn(*shape, generator=self.g) * std + mean).to(dtype).to(self.device)
    def u(self, *shape, lo=0.0, hi=1.0, dtype=F32):
        return (torch.rand(*shape, generator=self.g) * (hi - lo) + lo).to(dtype).to(self.device)
    def perm(self, n):
        return torch.randperm(n, generator=self.g).to(self.device)
    def qkv(self, B, H, Sq, D, Sk=None, Hk=None, Dv=None, dtype=BF, std=1.0, layout="bhsd"):
        Sk, Hk, Dv = (Sq if Sk is None else Sk), (Hk or H), (Dv or D)
        if layout == "bhsd":
            sh = (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv)
        else:
            sh = (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv)
        return tuple(self.n(*s, dtype=dtype, std=std) for s in sh)


def simple(id, kind, *dims, kwf=None, dtype=BF, std=1.0, **cs):
    """case with random q,k,v of dims = dict(B,H,Sq,D,...) and kwargs from kwf(gen,q,k,v)."""
    d = dims[0]
    def build(device="cpu"):
        g = G(id, device)
        q, k, v = g.qkv(dtype=dtype, std=std, **d)
        return q, k, v, (kwf(g, q, k, v) if kwf else {})
    case(id, kind, build, **cs)


D0 = dict(B=2, H=4, Sq=33, D=64)

# --- empty rows / masks ------------------------------------------------------------------------------------------
def _rows_empty(g, q, k, v):
    m = torch.rand(1, 1, q.shape[2], k.shape[2], generator=g.g).gt(0.4)
    m[..., 5:9, :] = False; m[..., -1, :] = False
    return dict(attn_mask=m.to(q.device))
simple("empty-rows-bool", "empty-rows", D0, kwf=_rows_empty, lse=True, src=["pytorch#103963", "pytorch#103749", "rten#1321"])
simple("empty-head", "empty-rows", dict(B=1, H=3, Sq=5, D=16), dtype=F32, lse=True, src=["pytorch#160064"],
       kwf=lambda g, q, k, v: dict(attn_mask=torch.tensor([False, True, True]).view(1, 3, 1, 1).expand(1, 3, 5, 5).clone().to(q.device)))
simple("sink-no-keys", "empty-rows", dict(B=2, H=2, Sq=4, D=64, Sk=128), lse=True, grads="qkvs", src=["flash-attention#2752", "cudnn-frontend#333"],
       kwf=lambda g, q, k, v: dict(seqused_k=torch.tensor([0, 128]), sinks=torch.tensor([0.5, 100.0], device=q.device)),
       note="batch 0: out 0, lse 0.5/100; finite sink 100 must not overflow")
simple("first-kv-tiles-masked", "empty-rows", dict(B=1, H=2, Sq=3, D=64, Sk=700), dtype=F32, src=["executorch#10466"],
       kwf=lambda g, q, k, v: dict(bias=torch.where((torch.arange(700) >= 515) & (torch.arange(700) <= 575), 0.0, -math.inf)
                                   .view(1, 1, 1, 700).expand(1, 1, 3, 700).to(q.device)))
simple("finfo-min-columns", "empty-rows", dict(B=2, H=3, Sq=441, D=64), dtype=F32, src=["pytorch#109517"],
       kwf=lambda g, q, k, v: dict(bias=torch.where(torch.arange(441) < 128, torch.finfo(F32).min, 0.0).view(1, 1, 1, 441)
                                   .expand(2, 3, 441, 441).to(q.device)))
simple("neg-inf-bias-mixed", "empty-rows", dict(B=2, H=2, Sq=70, D=32), lse=True, src=["flash-attention#76"],
       kwf=lambda g, q, k, v: dict(bias=torch.where(torch.rand(2, 1, 70, 70, generator=g.g) < .5, -math.inf, torch.randn(2, 1, 70, 70, generator=g.g))
                                   .index_fill(2, torch.tensor([0, 69]), -math.inf).to(q.device)))
simple("key-padding-one-item-empty", "empty-rows", dict(B=4, H=1, Sq=5, D=8), dtype=F32, src=["pytorch#24816", "pytorch#27968"],
       kwf=lambda g, q, k, v: dict(key_padding_mask=(torch.arange(5)[None] < torch.tensor([5, 4, 1, 0])[:, None]).to(q.device)), lse=True)

# --- causal alignment --------------------------------------------------------------------------------------------
for name, al, sq, sk in [("br-q-gt-k", "bottom_right", 130, 65), ("br-q-lt-k", "bottom_right", 65, 130),
                               ("tl-q-lt-k", "top_left", 65, 130),
                               ("br-decode-1", "bottom_right", 1, 97)]:
    simple("causal-" + name, "causal-align", dict(B=2, H=2, Sq=sq, D=64, Sk=sk), kwf=lambda g, q, k, v, al=al: dict(causal=al), lse=True,
           src=["flash-attention#1778", "flash-attention#282", "pytorch#108108", "pytorch#144858"])
simple("local-q-gt-k-empty", "causal-align", dict(B=1, H=2, Sq=200, D=64, Sk=70), lse=True, src=["flash-attention#1778", "flash-attention#2046"],
       kwf=lambda g, q, k, v: dict(window=(16, 4)))

# --- numerics ----------------------------------------------------------------------------------------------------
def _lowlogits(id, level, Sq, Sk, D, dtype, kw):
    def build(device="cpu"):
        g = G(id, device)
        q, k, v = g.n(1, 1, Sq, D, dtype=dtype, std=.1), g.n(1, 1, Sk, D, dtype=dtype, std=.1), g.n(1, 1, Sk, D, dtype=dtype)
        q[..., 0] = 448.0                                  # big on the q side: then dq is well conditioned (rows of dS sum to 0)
        k[..., 0] = (level * math.sqrt(D) / float(q[0, 0, 0, 0]))
        return q, k, v, kw(Sq, Sk, device)
    return build
_tril = lambda Sq, Sk, device: dict(attn_mask=torch.ones(1, 1, Sq, Sk, dtype=torch.bool, device=device).tril())
case("logits-below-minus-5e4", "numerics", _lowlogits("a1", -6.0e4, 9, 77, 128, BF, lambda a, b, c: {}), src=["flashinfer#4267", "flashinfer#4401"],
     lse=True, note="a finite 'minus infinity' of -5e4 in the running max returns zeros", grads="v")
case("lse-below-minus-88-sq1", "numerics", tol=dict(fwd=2e-2, bwd=0.15), build=_lowlogits("a3", -122.0, 1, 128, 128, BF, lambda a, b, c: {}), src=["cudnn-frontend#1072"],
     note="padded query rows with lse<-88 must not reach dk/dv")
def _f16_over(device="cpu"):
    g = G("f16over", device)
    q, k, v = g.qkv(1, 2, 65, 64, dtype=HF)
    q, k = q * 40, k * 40                                  # q.k far over 65504 before scaling
    q[:, :, :, :8] = 150; k[:, :, :10, :8] = 150
    return q, k, v, {}
case("fp16-qk-over-65504", "numerics", _f16_over, src=["pytorch#60939", "metal-flash-attention#8"], lse=True, grads="v")
for sc in (-0.125,):
    simple(f"scale-{sc}", "numerics", dict(B=1, H=2, Sq=100, D=64), kwf=lambda g, q, k, v, sc=sc: dict(scale=sc, causal="bottom_right"), lse=True,
           src=["pytorch#105202", "cudnn-frontend#804"], note="masking before scaling turns -inf into NaN (0) or +inf (<0)")
simple("softcap-saturated", "numerics", dict(B=2, H=2, Sq=129, D=64), std=4.0, kwf=lambda g, q, k, v: dict(softcap=15.0, causal="bottom_right"), lse=True,
       src=["flash-attention#2402", "flash-attention#1033", "tokamax#1121"], note="ds must carry 1-tanh^2; masked entries must not")
simple("fp32-not-tf32", "numerics", dict(B=1, H=2, Sq=96, D=64), dtype=F32, kwf=lambda g, q, k, v: dict(causal="bottom_right"),
       src=["pytorch#161022", "pytorch#138556"], tol=dict(fwd=2e-5, bwd=1e-4), note="float32 in means ieee float32 unless the caller opted in to tf32")
def _subn(device="cpu"):
    g = G("subn", device)
    q, k, _ = g.qkv(1, 1, 40, 32, dtype=HF)
    v = (g.n(1, 1, 40, 32) * 2e-6).to(HF)                  # mostly fp16 subnormals (<6.1e-5)
    return q, k, v, {}
case("fp16-subnormal-values", "numerics", _subn, grads="", tol=dict(fwd=3e-2, bwd=1), note="flush-to-zero would return 0; error is normalised by max|ref|")
def _vbig(device="cpu"):
    g = G("vbig", device)
    q, k, _ = g.qkv(1, 1, 30, 32, Sk=600, dtype=HF, std=.2)
    v = torch.full((1, 1, 600, 32), 60000.0, dtype=HF, device=device); v[:, :, ::2] = -v[:, :, ::2]; v[:, :, 300:] = 60000.0
    return q, k, v, {}
simple("bf16-p-rounding-long", "numerics", dict(B=1, H=1, Sq=8, D=64, Sk=4099), std=.05, grads="", note="near uniform P over many keys; row sum must be fp32")

# --- NaN / Inf where nobody looks --------------------------------------------------------------------------------
def _poison(id, val_k, val_v, mk):
    def build(device="cpu"):
        g = G(id, device)
        q, k, v = g.qkv(2, 2, 20, 64, Sk=128)
        kw, keys = mk(device)
        k[:, :, keys] = val_k; v[:, :, keys] = val_v
        return q, k, v, kw
    return build
_dead = torch.arange(128) >= 97
case("nan-masked-bool", "poison", _poison("p1", math.nan, math.nan, lambda d: (dict(attn_mask=(~_dead).view(1, 1, 1, 128).expand(1, 1, 20, 128).to(d)), _dead)),
     src=["pytorch#101967"])
case("nan-past-seqused", "poison", _poison("p2", math.nan, math.nan, lambda d: (dict(seqused_k=torch.tensor([97, 97])), _dead)), lse=True,
     src=["flash-attention#1745", "flash-attention#2374", "vllm#936", "aiter#5401"])
case("inf-k-under-neg-inf-bias", "poison", _poison("p4", math.inf, 1.0, lambda d: (dict(bias=torch.where(_dead, -math.inf, 0.0).view(1, 1, 1, 128).to(d)), _dead)),
     src=["Wan2GP#1628"], note="Inf or NaN score plus -inf must still mean masked", grads="qv")
def _future(device="cpu"):
    g = G("future", device)
    q, k, v = g.qkv(1, 2, 96, 64)
    k[:, :, 70:] = math.nan; v[:, :, 70:] = math.nan
    return q, k, v, dict(causal="bottom_right")
def _page_tail(device="cpu"):
    g = G("ptail", device)
    q = g.n(3, 4, 1, 64, dtype=BF)
    kp, vp = g.n(12, 16, 2, 64, dtype=BF), g.n(12, 16, 2, 64, dtype=BF)
    lens = torch.tensor([17, 1, 40]); bt = g.perm(12)[:9].view(3, 3).int()
    for b in range(3):
        for p in range(3):
            for t in range(16):
                if p * 16 + t >= int(lens[b]):
                    kp[bt[b, p], t] = math.nan; vp[bt[b, p], t] = math.inf
    return q, kp, vp, dict(block_table=bt, seqused_k=lens)
case("paged-tail-garbage", "paged-split", _page_tail, grads="", lse=True, src=["vllm#47305", "aiter#5401"])

# --- tile boundaries ---------------------------------------------------------------------------------------------
simple("s1025-causal-relbias-bwd", "tile-edge", dict(B=1, H=1, Sq=1025, D=64), src=["pytorch#153799"],
       kwf=lambda g, q, k, v: dict(causal="bottom_right", score_fn=lambda s, b, h, i, j: s + (i - j)))
simple("s137-causal", "tile-edge", dict(B=1, H=2, Sq=137, D=64), kwf=lambda g, q, k, v: dict(causal="bottom_right"), src=["attention-gym#50", "pytorch#159247"])
def _stride0_mod32(device="cpu"):
    g = G("s0m32", device)
    q = g.n(1, 8, 65, 512, dtype=BF)
    k1, v1 = g.n(1, 1, 65, 512, dtype=BF), g.n(1, 1, 65, 512, dtype=BF)
    m = torch.ones(1, 1, 65, 65, dtype=torch.bool, device=device).tril()
    return q, k1.expand(1, 8, 65, 512), v1.expand(1, 8, 65, 512), dict(attn_mask=m)
simple("sq1-sk257-d32", "tile-edge", dict(B=1, H=1, Sq=1, D=32, Sk=257), kwf=lambda g, q, k, v: dict(scale=1 / 32), src=["flash-attention#1076", "pytorch#131257"])
simple("sq100-gqa2", "tile-edge", dict(B=1, H=2, Sq=100, D=128, Hk=1), src=["pytorch#185349", "flash-attention#708"])
for s in (1, 2, 31, 127):
    simple(f"tiny-s{s}", "tile-edge", dict(B=2, H=2, Sq=s, D=64), kwf=lambda g, q, k, v: dict(causal="top_left"))
simple("buffer-shorter-than-tile", "tile-edge", dict(B=1, H=1, Sq=128, D=16, Sk=128), dtype=F32, src=["pytorch#150321"],
       kwf=lambda g, q, k, v: dict(mask_fn=lambda b, h, i, j: (j < 127) & (j <= i),
                                   score_fn=lambda s, b, h, i, j, t=g.n(127): s + t[j.clamp(max=126)]),
       note="kernel must not read table[127..]; emitted code sees table of exactly 127 entries (run under compute-sanitizer)")
simple("s4250-not-32", "tile-edge", dict(B=1, H=1, Sq=330, D=64), kwf=lambda g, q, k, v: dict(causal="bottom_right"), src=["jvp_flash_attention#13"], note="330 % 32 = 10")

# --- head dims ---------------------------------------------------------------------------------------------------
for d in (8, 40, 72, 96, 160, 192, 256):
    simple(f"d{d}", "head-dim", dict(B=1, H=2, Sq=67, D=d), kwf=lambda g, q, k, v: dict(causal="bottom_right"),
           src=["flash-attention#2896", "flash-attention#2698", "FasterTransformer#89", "pytorch#164931"])
simple("d31-odd", "head-dim", dict(B=1, H=2, Sq=20, D=31), src=["attention-gym#127", "pytorch#110630"])
for dq, dv in [(64, 128), (128, 512), (128, 64)]:
    simple(f"dqk{dq}-dv{dv}", "head-dim", dict(B=1, H=2, Sq=50, D=dq, Dv=dv),
           src=["pytorch#133674", "flash-attention#753", "native-sparse-attention-triton#27"])
simple("mla-576-512", "head-dim", dict(B=1, H=16, Sq=2, D=576, Sk=200, Hk=1, Dv=512), grads="", src=["flashinfer#3125"])

# --- GQA ---------------------------------------------------------------------------------------------------------
simple("gqa-3-over-2", "gqa", dict(B=1, H=3, Sq=8, D=32, Hk=2), expected="error:heads", grads="", src=["flash-linear-attention#1029"])
simple("gqa-6-over-2-bwd", "gqa", dict(B=2, H=6, Sq=77, D=64, Hk=2), kwf=lambda g, q, k, v: dict(causal="bottom_right"), src=["native-sparse-attention-triton#27"])
simple("gqa-d256-batch2-bwd", "gqa", dict(B=2, H=16, Sq=64, D=256, Hk=2), std=2.0, kwf=lambda g, q, k, v: dict(causal="bottom_right"), src=["TransformerEngine#3216"])
simple("gqa-short-prompt", "gqa", dict(B=2, H=8, Sq=3, D=64, Sk=3, Hk=1), kwf=lambda g, q, k, v: dict(causal="bottom_right"), src=["flash-attention#708"],
       note="Sq < group size; packing heads into the M tile")

# --- strides, layout, alignment ----------------------------------------------------------------------------------
def _lay(id, f, kind="layout", **cs):
    def build(device="cpu"):
        return f(G(id, device), device)
    case(id, kind, build, **cs)
_lay("v-only-noncontig", lambda g, d: (g.n(1, 4, 62, 128, dtype=BF), g.n(1, 4, 62, 128, dtype=BF), g.n(1, 62, 4 * 128, dtype=BF).view(1, 62, 4, 128).transpose(1, 2), {}),
     src=["ROCm/pytorch#3230", "FlagGems#5896", "torch-spyre#4331"])
def _packed(g, d):
    x = g.n(2, 50, 3, 4, 64, dtype=BF)
    return (*[t for t in x.unbind(2)], dict(layout="bshd", causal="bottom_right"))
_lay("packed-qkv-unbind", _packed, src=["flashinfer#311", "xformers#449"])
_lay("last-dim-transposed", lambda g, d: (g.n(1, 2, 64, 40, dtype=BF).transpose(2, 3), g.n(1, 2, 64, 40, dtype=BF).transpose(2, 3), g.n(1, 2, 64, 40, dtype=BF).transpose(2, 3), {}),
     src=["pytorch#187506"])
def _mis(dt):
    def f(g, d):
        n = 2 * 2 * 64 * 64
        st = g.n(n + 8, dtype=dt)
        return tuple(st[o:o + n].view(2, 2, 64, 64) for o in (1, 2, 3)) + ({},)
    return f
_lay("storage-offset-fp32", _mis(F32), src=["pytorch#183484", "qkan#26"], note="contiguous views whose data_ptr % 16 != 0")
def _row_stride(g, d):                                     # row stride 65 elements: no row but the first is 16-byte aligned
    mk = lambda: g.n(1, 2, 40, 65, dtype=BF)[..., :64]
    return mk(), mk(), mk(), dict(causal="bottom_right")
_lay("row-stride-odd", _row_stride, src=["vllm#41257", "pytorch#170813"])
def _kslice(g, d):
    q = g.n(1, 2, 256, 64)
    K, V = g.n(1, 2, 256, 64), g.n(1, 2, 256, 64)
    return q, K[:, :, :-128], V[:, :, :-128], {}
_lay("kv-sliced-seq", _kslice, src=["pytorch#146377"], note="dk must be laid out for the slice, then scattered by autograd into K.grad")
_lay("kv-expanded-heads", lambda g, d: (g.n(2, 8, 33, 64, dtype=BF), g.n(2, 1, 33, 64, dtype=BF).expand(2, 8, 33, 64), g.n(2, 1, 33, 64, dtype=BF).expand(2, 8, 33, 64), {}),
     src=["pytorch#191937"])
def _go(kindof):
    def f(g, d):
        q, k, v = g.qkv(2, 4, 30, 64)
        if kindof == "expanded": go = torch.ones((), dtype=BF, device=d).expand(2, 4, 30, 64)
        elif kindof == "transposed": go = g.n(2, 30, 4, 64, dtype=BF).transpose(1, 2)
        elif kindof == "last": go = g.n(2, 4, 64, 30, dtype=BF).transpose(2, 3)
        else: go = g.n(2, 30, 4 * 64 + 24, dtype=BF)[..., :256].view(2, 30, 4, 64).transpose(1, 2)
        return q, k, v, dict(causal="bottom_right", grad_out=go)
    return f
_lay("gradout-expanded", _go("expanded"), kind="grad-layout", src=["pytorch#195813", "ROCm/flash-attention#40"], note="what .sum().backward() sends")
_lay("gradout-transposed", _go("transposed"), kind="grad-layout", src=["flash-attention#355", "pytorch#133671"])
_lay("gradout-cat-view", _go("cat"), kind="grad-layout", src=["flash-attention#2611"], note="view of cat([attn, mlp]) gradient; row stride wider than H*D")
_lay("layout-ambiguous-bshd", lambda g, d: (g.n(2, 8, 8, 16, dtype=BF), g.n(2, 8, 8, 16, dtype=BF), g.n(2, 8, 8, 16, dtype=BF), dict(layout="bshd", causal="bottom_right")),
     src=["flash-attention#1812", "flash-attention#566"], note="S == H: only the declared layout tells; output must have the input's layout")
for sk in (43,):
    _lay(f"bias-unaligned-{sk}", lambda g, d, sk=sk: (*g.qkv(2, 4, 43, 64, Sk=sk), dict(bias=g.n(2, 4, 43, sk, dtype=BF))), kind="bias",
         src=["xformers#813", "xformers#808", "diffusers#9637", "pytorch#121943"])
for nm, shp in [("key-only", (2, 1, 1, 50)), ("head-only", (1, 4, 1, 1)), ("batch0", (1, 4, 30, 50))]:
    _lay(f"bias-bcast-{nm}", lambda g, d, shp=shp: (*g.qkv(2, 4, 30, 64, Sk=50), dict(bias=g.n(*shp))), kind="bias", grads="qkvb",
         src=["pytorch#120810", "xformers#783", "flash-sparse-attention#193"], note="dbias must be summed back to the broadcast shape")
_lay("bias-only-needs-grad", lambda g, d: (*g.qkv(1, 2, 33, 64, dtype=F32), dict(bias=g.n(1, 2, 33, 33))), kind="bias", grads="b",
     src=["pytorch#148476", "pytorch#188302"], note="q,k,v do not require grad; lse must still be saved")
_lay("bias-expanded-stride0", lambda g, d: (*g.qkv(2, 2, 20, 64, Sk=24), dict(bias=g.n(1, 1, 1, 24).expand(2, 2, 20, 24))), kind="bias", src=["xformers#683"])
_lay("mask-float01-is-additive", lambda g, d: (*g.qkv(1, 1, 8, 16, dtype=F32), dict(bias=torch.ones(8, 8, device=d).tril())), kind="bias",
     src=["pytorch#103963"], note="0/1 floats are added, not a mask")

simple("mask-and-causal-together", "bias", dict(B=1, H=2, Sq=40, D=64, Sk=60), src=["pytorch#187801", "onnx#8068"], lse=True,
       kwf=lambda g, q, k, v: dict(causal="bottom_right", attn_mask=torch.rand(1, 1, 40, 60, generator=g.g).gt(.4).to(q.device)),
       note="intersection of both, or a clear error; never one of them silently dropped")
_lay("gradout-tiny-fp16", lambda g, d: (*g.qkv(1, 2, 50, 64, dtype=HF), dict(grad_out=(g.n(1, 2, 50, 64) * 3e-6).to(HF))), kind="grad-layout", grads="v",
     src=["flash-attention#381"], note="subnormal fp16 gradients: dv accumulates in fp32 and is rounded once", tol=dict(fwd=3e-3, bwd=4e-2))

# --- captured buffers (score function with tensors) --------------------------------------------------------------
def _cap(f, S=60, D=64, dtype=F32):
    def build(device="cpu"):
        g = G("cap" + f.__name__, device)
        q, k, v = g.qkv(1, 2, S, D, dtype=dtype)
        kw, params = f(g, S)
        kw["params"] = params                              # tensors whose gradient is checked as well
        return q, k, v, kw
    return build
def _reltable(g, S):
    t = g.n(2 * S).requires_grad_()
    return dict(score_fn=lambda s, b, h, i, j: s + t[i - j + S].to(s.dtype)), [t]
def _scalar_add(g, S):
    t = torch.tensor(0.3, device=g.device).requires_grad_()
    return dict(score_fn=lambda s, b, h, i, j: s + t.to(s.dtype) * (i > j)), [t]
def _scalar_mul(g, S):
    t = torch.tensor(1.7, device=g.device).requires_grad_()
    return dict(score_fn=lambda s, b, h, i, j: s * t.to(s.dtype)), [t]
def _unused(g, S):
    t = torch.ones(2, device=g.device).requires_grad_()
    def f(s, b, h, i, j):
        _ = t[h]
        return s
    return dict(score_fn=f), [t]
def _head_gate(g, S):
    t = g.n(2).requires_grad_()
    return dict(score_fn=lambda s, b, h, i, j: s * torch.sigmoid(t[h].to(s.dtype)), causal="bottom_right"), [t]
for f, src in [(_reltable, "pytorch#134802"), (_scalar_mul, "pytorch#145208"),
                     (_unused, "pytorch#166722")]:
    case("captured" + f.__name__.replace("_", "-"), "captured", _cap(f), grads="qkvp", src=[src, "attention-gym#20"])

# --- which gradients ---------------------------------------------------------------------------------------------
for need in ("q", "k", "v", "qk"):
    simple("grad-only-" + need, "which-grad", dict(B=1, H=4, Sq=40, D=64, Hk=2), grads=need, src=["pytorch#136101"])
simple("grad-sinks-only", "which-grad", dict(B=1, H=4, Sq=40, D=64, Hk=2), kwf=lambda g, q, k, v: dict(sinks=g.n(4), causal="bottom_right"), grads="s", src=["Primus-Turbo#458", "cudnn-frontend#421"])
simple("grad-through-lse", "which-grad", dict(B=1, H=2, Sq=40, D=64), kwf=lambda g, q, k, v: dict(causal="bottom_right"), grads="qkl", lse=True, dtype=F32,
       src=["flash-attention#1817", "flash-attention#1137", "flash-attention#889"], note="dS += P*dlse, or lse must be marked non-differentiable; never silent zeros")

# --- empty tensors -----------------------------------------------------------------------------------------------
simple("batch0", "empty-tensor", dict(B=0, H=4, Sq=30, D=64, Sk=16), src=["flash-attention#1159", "pytorch#166318"])
simple("sq0", "empty-tensor", dict(B=2, H=2, Sq=0, D=64, Sk=16), src=["flash-attention#2776"], lse=True, note="dk = dv = 0")
simple("sk0-causal", "empty-tensor", dict(B=2, H=2, Sq=5, D=64, Sk=0), expected="zeros", kwf=lambda g, q, k, v: dict(causal="bottom_right"), lse=True,
       src=["flash-attention#2470"], note="a scheduler dividing by seqlen_k must not crash the host")
def _d0(device="cpu"):
    g = G("d0", device)
    return torch.empty(1, 2, 4, 0, device=device), torch.empty(1, 2, 6, 0, device=device), g.n(1, 2, 6, 8), {}
case("dqk0", "empty-tensor", _d0, expected="ref-or-error", grads="v", src=["pytorch#184914"], note="no query/key features: mean of V", optional=True)

# --- windows -----------------------------------------------------------------------------------------------------
def _onehot(id, S, **kw):
    def build(device="cpu"):
        g = G(id, device)
        q, k = g.n(1, 1, S, 64, dtype=F32, std=.1), g.n(1, 1, S, 64, dtype=F32, std=.1)
        v = torch.eye(S, device=device).view(1, 1, S, S)[..., :]
        return q, k, v, dict(kw)
    return build
case("window-counts-w8", "window", _onehot("w8", 64, window=(7, 0)), src=["transformers#39408", "transformers#29623", "axlearn#1009", "zml#763"],
     note="V = identity shows the visible set: exactly min(i+1,8) keys per row")
case("window-full-equals-causal", "window", _onehot("wf", 64, window=(63, 0)), src=["flash-attention#1133"], note="left = S-1 is the causal mask")
case("window-right-only", "window", _onehot("wr", 64, window=(-1, 3)), src=["flash-attention#2046"])
simple("window-w-gt-s", "window", dict(B=1, H=2, Sq=50, D=64), kwf=lambda g, q, k, v: dict(window=(4096, 0)))
simple("window-q-lt-k", "window", dict(B=1, H=2, Sq=17, D=64, Sk=300), kwf=lambda g, q, k, v: dict(window=(64, 0)), lse=True, src=["ROCm/aiter#3742"])

# --- alibi -------------------------------------------------------------------------------------------------------
simple("alibi-noncausal-sq-ne-sk", "alibi", dict(B=2, H=4, Sq=30, D=64, Sk=100), src=["flash-attention#907", "flash-attention#1585"],
       kwf=lambda g, q, k, v: dict(alibi_slopes=torch.tensor([.5, .25, .125, .0625], device=q.device)), lse=True)
simple("alibi-12-heads-slice", "alibi", dict(B=1, H=3, Sq=64, D=64), kwf=lambda g, q, k, v: dict(alibi_slopes=torch.tensor([2 ** -(8 * (n + 1) / 12) for n in (6, 7, 8)], device=q.device), causal="bottom_right"),
       src=["flashinfer#1606", "flash-attention#540"], note="heads 6..8 of 12: slopes come from the caller, not from the local head count")
simple("alibi-per-batch", "alibi", dict(B=2, H=2, Sq=40, D=64), kwf=lambda g, q, k, v: dict(alibi_slopes=g.u(2, 2)), src=["flash-attention#1585"])

# --- varlen ------------------------------------------------------------------------------------------------------
def _vl(id, lq, lk, H=2, Hk=None, D=64, tail=0, dtype=BF, **kw):
    def build(device="cpu"):
        g = G(id, device)
        cu = lambda x: torch.tensor([0] + list(itertools.accumulate(x)), dtype=torch.int32, device=device)
        q = g.n(sum(lq) + tail, H, D, dtype=dtype); k = g.n(sum(lk) + tail, Hk or H, D, dtype=dtype); v = g.n(sum(lk) + tail, Hk or H, D, dtype=dtype)
        return q, k, v, dict(cu_seqlens_q=cu(lq), cu_seqlens_k=cu(lk), max_seqlen_q=max(lq), max_seqlen_k=max(lk), **kw)
    return build
case("varlen-zero-q-middle", "varlen", _vl("v1", [0, 12, 8, 0], [25, 17, 9, 30], H=4, Hk=1, causal="bottom_right"), lse=True,
     src=["flash-attention#2562", "flash-attention#1713", "flash-attention#2421"], note="keys of a sequence without queries: dk = dv = 0")
case("varlen-zero-k", "varlen", _vl("v2", [5, 6, 7], [5, 0, 7], causal="bottom_right"), lse=True, src=["flash-attention#1155", "flash-attention#2842"],
     note="LSE of the empty one is -inf in ITS slot, neighbours untouched")
case("varlen-max1-gqa", "varlen", _vl("v3", [0, 1, 0, 1], [0, 3, 0, 5], H=9, Hk=3, causal="bottom_right", scale=1.0), src=["flash-attention#1537"])
case("varlen-tail-rows", "varlen", _vl("v5", [9, 4], [9, 4], tail=5), src=["flash-attention#1661", "ROCm/flash-attention#175"], lse=True,
     note="rows past cu_seqlens[-1]: out and gradients defined (0), not left as allocated")
case("varlen-causal-mixed", "varlen", _vl("v6", [7, 70, 1], [130, 33, 64], causal="bottom_right"), lse=True, src=["flash-attention#282", "flash-attention#1298"])

# --- paged / split -----------------------------------------------------------------------------------------------
def _paged(id, page, lens, H=4, Hk=2, D=64, Sq=1, short=False, **kw):
    def build(device="cpu"):
        g = G(id, device)
        B = len(lens); P = max(1, max((x + page - 1) // page for x in lens)) - (1 if short else 0)
        N = B * (P + 1) + 3
        q = g.n(B, H, Sq, D, dtype=BF); kp = g.n(N, page, Hk, D, dtype=BF); vp = g.n(N, page, Hk, D, dtype=BF)
        bt = g.perm(N)[:B * P].view(B, P).int()
        for b in range(B):
            bt[b, (lens[b] + page - 1) // page:] = 2 ** 30    # unused entries are rubbish
        return q, kp, vp, dict(block_table=bt, seqused_k=torch.tensor(lens), **kw)
    return build
case("paged16-ragged", "paged-split", _paged("pg1", 16, [1, 16, 17, 250]), grads="", lse=True, src=["flash-attention#1217", "flash-attention#1999"])
case("paged7-not-pow2", "paged-split", _paged("pg3", 7, [50, 9, 14]), grads="", src=["flash-attention#1999", "flash-attention#1579"])
case("paged-table-too-short", "paged-split", _paged("pg4", 16, [40, 33], short=True), expected="error:block_table", grads="", src=["flash-attention#2711"],
     note="device lengths: either check on host or clamp in kernel; never read past the table")
simple("splits-more-than-keys", "splits", dict(B=1, H=2, Sq=1, D=64, Sk=5), kwf=lambda g, q, k, v: dict(num_splits=8), grads="", lse=True,
       src=["tilelang#328", "flash-attention#2842", "sgl-kernel-xpu#487"], note="empty splits carry lse=-inf; -inf - -inf must not appear in the merge")
simple("splits-sinks-once", "splits", dict(B=1, H=2, Sq=1, D=64, Sk=500), kwf=lambda g, q, k, v: dict(num_splits=4, sinks=g.n(2)), grads="", lse=True, src=["rocm-libraries#12229"],
       note="the sink enters the merged denominator exactly once")

# --- fp8 ---------------------------------------------------------------------------------------------------------
def _fp8(id, ds):
    def build(device="cpu"):
        g = G(id, device)
        q, k, v = (g.n(2, 4, 70, 64).to(F8), g.n(2, 2, 70, 64).to(F8), g.n(2, 2, 70, 64).to(F8))
        a, b, c = ds(g)
        return q, k, v, dict(q_descale=a, k_descale=b, v_descale=c, causal="bottom_right")
    return build
if F8 is not None:
    case("fp8-scalar-descale", "fp8", _fp8("f1", lambda g: (0.5, 0.25, 3.0)), grads="", src=["flash-attention#1210"], tol=dict(fwd=8e-2, bwd=1))

# --- size limits -------------------------------------------------------------------------------------------------
simple("batch-65537", "size-limit", dict(B=65537, H=1, Sq=2, D=16), src=["flash-attention#1786", "flashinfer#3125", "MagiAttention#40"], mem=5e7)
simple("batch-x-heads-65538", "size-limit", dict(B=10923, H=6, Sq=4, D=16), src=["flash-linear-attention#172"], mem=5e7)
case("varlen-80000-seqs", "varlen", _vl("vbig", [2] * 80000, [2] * 80000, H=1, D=16), src=["flash-attention#1786"], dev="cuda", mem=1e8)
def _huge(which):
    def build(device="cpu"):
        g = G("huge" + which, device)
        big = 2 ** 31 + 2 ** 20
        if which == "batch":                               # batch stride > 2^31 elements, only a few pages are touched
            base = torch.empty(big, dtype=BF, device=device)
            q = base.as_strided((2, 1, 40, 64), (2 ** 31, 40 * 64, 64, 1)); q.copy_(g.n(2, 1, 40, 64, dtype=BF))
            k, v = g.n(2, 1, 40, 64, dtype=BF), g.n(2, 1, 40, 64, dtype=BF)
            return q, k, v, {}
        if which == "kseq":                                # key index * key stride > 2^31
            base = torch.empty(big + 2 ** 19, dtype=BF, device=device)
            k = base.as_strided((1, 1, 2 ** 14 + 3, 64), (0, 0, 2 ** 17, 1)); k.copy_(g.n(1, 1, 2 ** 14 + 3, 64, dtype=BF))
            return g.n(1, 1, 5, 64, dtype=BF), k, g.n(1, 1, 2 ** 14 + 3, 64, dtype=BF), {}
        base = torch.empty(big + 2 ** 19, dtype=BF, device=device)   # gradient of the output with a huge row stride
        go = base.as_strided((1, 1, 2 ** 14 + 3, 64), (0, 0, 2 ** 17, 1)); go.copy_(g.n(1, 1, 2 ** 14 + 3, 64, dtype=BF))
        return g.n(1, 1, 2 ** 14 + 3, 64, dtype=BF), g.n(1, 1, 5, 64, dtype=BF), g.n(1, 1, 5, 64, dtype=BF), dict(grad_out=go)
    return build
case("int32-batch-stride", "size-limit", _huge("batch"), src=["flash-attention#772", "flash-linear-attention#1080", "flash-attention#2214"], mem=4.4e9)
case("int32-gradout-stride", "size-limit", _huge("gout"), src=["flash-attention#2611", "flash-attention#1500"], mem=4.4e9)

# --- front-end errors --------------------------------------------------------------------------------------------
_lay("err-dtype-mix", lambda g, d: (g.n(1, 2, 8, 64, dtype=F32), g.n(1, 2, 8, 64, dtype=BF), g.n(1, 2, 8, 64, dtype=BF), {}), kind="errors", expected="error:dtype", grads="",
     src=["flashinfer#280", "flash-attention#732", "diffusers#6774"])
_lay("err-kv-length", lambda g, d: (g.n(1, 2, 8, 64), g.n(1, 2, 9, 64), g.n(1, 2, 10, 64), {}), kind="errors", expected="error:length", grads="", src=["flashinfer#2561"])
_lay("err-batch", lambda g, d: (g.n(2, 2, 8, 64), g.n(1, 2, 8, 64), g.n(1, 2, 8, 64), {}), kind="errors", expected="ref-or-error", grads="",
     note="no silent broadcasting of batch 1 unless it is documented")

# ----------------------------------------------------------------------------------------------------------------
# system scenarios: need CUDA, several devices or several processes. run(attn, ref) raises AssertionError on failure.
# ----------------------------------------------------------------------------------------------------------------
SYSTEM: list[dict] = []


def system(id, kind, needs, *, src=(), script=None):
    def deco(f):
        SYSTEM.append(dict(id=id, kind=kind, needs=needs, src=list(src), run=f, doc=(f.__doc__ or "").strip(), expected="system", script=script))
        return f
    return deco


def _qkv(dev, B=2, H=4, S=200, D=64, dtype=BF, seed=0, grad=False):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, S, D, generator=g).to(dtype).to(dev).requires_grad_(grad) for _ in range(3))


def _close(out, q, k, v, **kw):
    o = out[0] if isinstance(out, tuple) else out
    r, _ = ref_attn(q.detach().cpu(), k.detach().cpu(), v.detach().cpu(), **kw)
    e = norm_err(o.detach().cpu(), r)
    assert e < 2e-2, f"normalised error {e}"


@system("stream-side", "streams", "cuda", src=["SageAttention#371", "sglang#36572", "cupy#7189"])
def _s_stream(attn, dev="cuda"):
    """Inputs are produced on a side stream after a long delay kernel; attn must be ordered behind them on that stream."""
    s = torch.cuda.Stream(dev)
    qh, kh, vh = _qkv("cpu")
    bufs = [torch.zeros_like(t, device=dev) for t in (qh, kh, vh)]
    pin = [t.pin_memory() for t in (qh, kh, vh)]
    attn(*[t.to(dev) for t in (qh, kh, vh)])              # warm up (compile)
    torch.cuda.synchronize()
    with torch.cuda.stream(s):
        torch.cuda._sleep(200_000_000)
        for b, p in zip(bufs, pin): b.copy_(p, non_blocking=True)
        out = attn(*bufs)
        out = (out[0] if isinstance(out, tuple) else out).clone()
    s.synchronize()
    _close(out, qh, kh, vh)




@system("graph-capture-warm", "cuda-graph", "cuda", src=["SageAttention#371", "vllm#25358"])
def _s_graph(attn, dev="cuda"):
    """After one warm-up call, capture fwd in a CUDA graph, change the inputs in place, replay: output must follow."""
    q, k, v = _qkv(dev)
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        attn(q, k, v)
    torch.cuda.current_stream().wait_stream(s)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        o = attn(q, k, v); o = o[0] if isinstance(o, tuple) else o
    o.zero_()
    q2, k2, v2 = _qkv(dev, seed=1)
    for a, b in ((q, q2), (k, k2), (v, v2)): a.copy_(b)
    g.replay(); torch.cuda.synchronize()
    _close(o, q2, k2, v2)




@system("device-not-current", "multi-gpu", "cuda2", src=["flashinfer#452", "flashinfer#349", "flash-attention#1782", "flash-attention#2356", "FlashMLA#158"])
def _s_dev(attn, dev=None):
    """Tensors on cuda:1 while cuda:0 is current; fwd and bwd right, and the current device unchanged afterwards (cupy#6569)."""
    torch.cuda.set_device(0)
    q, k, v = _qkv("cuda:1", grad=True)
    o = attn(q, k, v); _close(o, q, k, v)
    (o[0] if isinstance(o, tuple) else o).float().sum().backward()
    assert q.grad.device == q.device and torch.cuda.current_device() == 0




@system("device-mixed-error", "multi-gpu", "cuda2", src=["flashinfer#2561"])
def _s_dev3(attn, dev=None):
    """q on cuda:0, k/v on cuda:1 -> clear error, no launch."""
    q, _, _ = _qkv("cuda:0"); _, k, v = _qkv("cuda:1")
    try: attn(q, k, v)
    except Exception: return
    raise AssertionError("no error")


@system("backward-thread-device", "multi-gpu", "cuda2", src=["pytorch#2017", "pytorch#172798"])
def _s_bwdthread(attn, dev=None):
    """autograd runs backward on another thread: device/stream must come from the tensors, never from thread-local cupy/torch state set in forward."""
    q, k, v = _qkv("cuda:1", grad=True)
    o = attn(q, k, v); o = o[0] if isinstance(o, tuple) else o
    torch.cuda.set_device(0)
    o.backward(torch.ones_like(o)); torch.cuda.synchronize("cuda:1")
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


@system("determinism-bitwise", "determinism", "any", src=["flash-attention#2244", "flash-attention#414", "flash-attention#746"])
def _s_det(attn, dev="cpu"):
    """deterministic=True: 10 runs bit-equal in out, dq, dk, dv; forward bit-equal also without the flag."""
    ref = None
    for _ in range(10):
        q, k, v = _qkv(dev, S=300, grad=True)
        o = attn(q, k, v, deterministic=True); o = o[0] if isinstance(o, tuple) else o
        o.float().square().sum().backward()
        cur = [o.detach(), q.grad, k.grad, v.grad]
        if ref is None: ref = cur
        assert all(torch.equal(a, b) for a, b in zip(ref, cur))


@system("first-call-equals-second", "autotune", "any", src=["triton#4217", "triton#781", "triton#9230", "triton#6547"])
def _s_first(attn, dev="cpu"):
    """With a cold cache the tuner runs candidates: accumulated buffers (dq with atomics) must be reset, results of call 1 == call 2."""
    res = []
    for _ in range(2):
        q, k, v = _qkv(dev, S=173, D=80, grad=True)
        o = attn(q, k, v); o = o[0] if isinstance(o, tuple) else o
        o.float().sum().backward(); res.append([o.detach(), q.grad, k.grad, v.grad])
    for a, b in zip(*res): assert norm_err(a.cpu(), b.cpu()) < 2e-2




@system("cache-key-closure", "cache", "any", src=["flash-attention#2773", "mlir-aie#2948"])
def _s_key(attn, dev="cpu"):
    """Two score functions with identical source but different captured constants / defaults must not share a kernel."""
    q, k, v = _qkv(dev)
    for c in (1.0, 2.0, 4.0):
        f = (lambda c: (lambda s, b, h, i, j: s * c))(c)
        _close(attn(q, k, v, score_fn=f), q, k, v, score_fn=f)
        def fd(s, b, h, i, j, c=c): return s * c
        _close(attn(q, k, v, score_fn=fd), q, k, v, score_fn=fd)




@system("captured-tensor-updated", "cache", "any", src=["pytorch#163314", "attention-gym#31"])
def _s_stale(attn, dev="cpu"):
    """A tensor used by mask_fn is changed in place, or the sequence length changes, between calls: the next call sees the new value
    (any block map derived from it is rebuilt, or its use is rejected)."""
    q, k, v = _qkv(dev)
    t = torch.zeros(200, dtype=torch.long, device=dev)
    for step in (50, 100, 150):
        t.zero_(); t[step:] = 1
        f = lambda b, h, i, j: t[i] == t[j]
        _close(attn(q, k, v, mask_fn=f), q, k, v, mask_fn=lambda b, h, i, j: t.cpu()[i] == t.cpu()[j])


_CHILD = """
import os, sys, torch
{setup}
from {module} import {attn} as attn
g = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 2, {S}, 64, generator=g).to({dev!r}) for _ in range(3))
o = attn(q, k, v); o = o[0] if isinstance(o, tuple) else o
s = torch.softmax((q @ k.transpose(-1, -2)) / 8, -1) @ v
assert (o.float() - s.float()).abs().max() < 2e-2
print('OK')
"""
PROCESS_SCENARIOS = [
    dict(id="cache-race-cold", kind="cache", src=["cupy#9463", "cupy#10271", "DeepGEMM#301", "flash-attention#2647", "mlir-aie#2621", "chipStar#1081"],
         doc="8 children at once on an empty cache directory, same variant; all print OK, no temp files left, cache holds one complete entry", procs=8, env={}, setup=""),
    dict(id="cache-reload", kind="cache", src=["flash-attention#2566", "arrayfire#3182"], doc="run child twice: second process loads from disk; then a third with another head dim", procs=1, env={}, setup=""),
    dict(id="cache-stale-arch", kind="cache", src=["cupy#5097", "cupy#7345", "libCEED#1587", "flash-attention#1749"],
         doc="(white box) key contains compute capability, NVRTC version, emitted source, options; a cubin for another arch is never offered", procs=1, env={}, setup=""),
    dict(id="cache-dir-readonly", kind="cache", src=["cupy#2296", "vllm#28440", "flashinfer#2093", "flashinfer#3468", "LLMFlux#124"],
         doc="cache dir and HOME not writable (chmod 555 as non-root, or path under a file): warns once, works from memory or a private temp dir", procs=1, env={"HOME": "/proc/1", "XDG_CACHE_HOME": "/proc/1"}, setup=""),
    dict(id="cache-two-users", kind="cache", src=["accelerated-computing-hub#263", "cudf#4857"], doc="an entry created 0600 by another user is unreadable: recompile, no crash; default directory is per user", procs=1, env={}, setup=""),
    dict(id="fork-after-import", kind="process", src=["cupy#3341", "pycuda#137", "nano-vllm#22"],
         doc="import flashgen and compile (CPU side) in the parent without touching CUDA, fork, use the GPU in the child", procs=1, env={}, setup="pid=None"),
    dict(id="nvrtc-no-headers", kind="process", src=["cupy#8466", "cupy#8146", "cuda-python#844"],
         doc="no CUDA toolkit headers visible (CUDA_PATH unset, empty include path): emitted source compiles, or the error says which package to install", procs=1, env={"CUDA_PATH": "", "CUDA_HOME": ""}, setup=""),
]


def child_source(sc, module, attn, dev="cpu", S=65):
    return _CHILD.format(setup=sc["setup"], module=module, attn=attn, dev=dev, S=S)


@system("threads-cold", "threads", "any", src=["triton#11494", "triton#5893", "triton#8437"])
def _s_threads(attn, dev="cpu"):
    """8 threads call the same not yet compiled variant at once, and others with different options; all results right."""
    import concurrent.futures as cf
    def job(n):
        kw = [dict(), dict(causal="bottom_right"), dict(window=(9, 0)), dict(softcap=4.0)][n % 4]
        q, k, v = _qkv(dev, S=97 + n, seed=n)
        _close(attn(q, k, v, **kw), q, k, v, **kw)
    with cf.ThreadPoolExecutor(8) as ex:
        list(ex.map(job, range(16)))


@system("autocast-mixed", "autocast", "any", src=["pytorch#168901", "diffusers#14104", "musubi-tuner#1037", "SimpleTuner#3002"])
def _s_autocast(attn, dev="cpu"):
    """Under autocast(bf16): q,k fp32 (from a norm), v bf16 -> runs in bf16, gradients come back in each input's own dtype. Outside: error."""
    t = torch.device(dev).type
    q, k, v = _qkv(dev, dtype=F32); v = v.to(BF)
    q.requires_grad_(); k.requires_grad_(); v.requires_grad_()
    with torch.autocast(t, dtype=BF):
        o = attn(q, k, v); o = o[0] if isinstance(o, tuple) else o
    assert o.dtype == BF
    o.float().sum().backward()
    assert q.grad.dtype == F32 and v.grad.dtype == BF
    try: attn(q.detach(), k.detach(), v.detach())
    except Exception: return
    raise AssertionError("mixed dtypes outside autocast must be an error")


@system("grad-modes", "autograd", "any", src=["flash-attention#1383", "flash-attention#1397", "flash-attention#2271"])
def _s_modes(attn, dev="cpu"):
    """inference_mode, no_grad and normal mode in turn with the same tensors: nothing saved in the first two, gradients in the last."""
    q, k, v = _qkv(dev, grad=True)
    with torch.inference_mode(): o = attn(q.detach(), k.detach(), v.detach()); assert not (o[0] if isinstance(o, tuple) else o).requires_grad
    with torch.no_grad(): o = attn(q, k, v); assert not (o[0] if isinstance(o, tuple) else o).requires_grad
    o = attn(q, k, v); o = o[0] if isinstance(o, tuple) else o
    assert o.requires_grad; o.float().sum().backward(); assert q.grad is not None




@system("saved-tensor-inplace", "autograd", "any")
def _s_inplace(attn, dev="cpu"):
    """An input overwritten in place between forward and backward must raise (version counter) or give the gradients of the old value."""
    q, k, v = _qkv(dev, dtype=F32, grad=True)
    kk = k * 1
    o = attn(q, kk, v); o = o[0] if isinstance(o, tuple) else o
    kk.mul_(2)
    try: o.sum().backward()
    except RuntimeError: return
    qq = q.detach().double().requires_grad_()
    r, _ = ref_attn(qq, k.detach().double(), v.detach().double())
    (g,) = torch.autograd.grad(r.sum(), qq)
    assert norm_err(q.grad, g) < 1e-3


def philox4x32(counter, key):
    """Philox4x32-10 (Salmon et al. 2011), plain integers; returns four 32-bit words."""
    c, k, M = list(counter), list(key), 0xFFFFFFFF
    for r in range(10):
        if r: k = [(k[0] + 0x9E3779B9) & M, (k[1] + 0xBB67AE85) & M]
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & M, (a >> 32) ^ c[3] ^ k[1], a & M]
    return c


@system("dropout-bits", "dropout", "any")
def _s_drop_bits(attn, dev="cpu"):
    """which entries are kept is fixed by seed and position alone (api.md): q = 0 gives equal weights, V = identity shows the bits"""
    B, H, S, p, seed = 2, 3, 20, 0.3, 0x123456789ABCDEF
    q = torch.zeros(B, H, S, 32, device=dev); v = torch.eye(S, 32, device=dev).expand(B, H, S, 32).contiguous()
    o = attn(q, q.clone(), v, dropout_p=p, seed=seed)[..., :S].cpu()
    lim = math.ceil(p * 2.0 ** 32)
    for b, h, i in itertools.product(range(B), range(H), range(S)):
        for j in range(S):
            keep = philox4x32((j // 4, i, b * H + h, 0), (seed & 0xFFFFFFFF, seed >> 32))[j % 4] >= lim
            want = keep / (S * (1 - p))
            assert abs(float(o[b, h, i, j]) - want) < 1e-5, (b, h, i, j, float(o[b, h, i, j]), want)


@system("dropout-consistent", "dropout", "any", src=["flash-attention#2088", "flash-attention#612", "flash-attention#314"])
def _s_drop(attn, dev="cpu"):
    """V = identity exposes P*mask/(1-p): same seed -> same mask, next call -> another one, dv of ones equals the column sums of that matrix,
    recompute with the same seed (checkpointing) is bit-equal, keep rate within 5 sigma, masks of different heads/batches differ."""
    q, k, _ = _qkv(dev, B=2, H=2, S=64, dtype=F32)
    v = torch.eye(64, device=dev).expand(2, 2, 64, 64).clone().requires_grad_()
    f = lambda seed: attn(q, k, v, dropout_p=0.25, seed=seed)
    o1 = f(1); o1 = o1[0] if isinstance(o1, tuple) else o1
    o2 = f(1); o2 = o2[0] if isinstance(o2, tuple) else o2
    o3 = f(2); o3 = o3[0] if isinstance(o3, tuple) else o3
    assert torch.equal(o1, o2) and not torch.equal(o1, o3)
    keep = (o1 != 0).float(); assert abs(keep.mean().item() - .75) < 5 * math.sqrt(.25 * .75 / keep.numel())
    assert not torch.equal(keep[0, 0], keep[0, 1]) and not torch.equal(keep[0, 0], keep[1, 0])
    (dv,) = torch.autograd.grad(o1, v, torch.ones_like(o1))
    assert norm_err(dv[..., 0].cpu(), o1.detach().sum(2).cpu()) < 1e-4


@system("recompile-bound", "compile-count", "any", src=["vllm#27178", "pytorch#141486", "torchtitan#3898", "keys_values#55"])
def _s_recomp(attn, dev="cpu"):
    """60 different sequence lengths, same variant: right every time. White box: number of compiled kernels stays bounded (<= a handful) and
    there is no silent switch to a slow path."""
    for S in range(1, 300, 5):
        q, k, v = _qkv(dev, B=1, H=1, S=S, D=32)
        _close(attn(q, k, v, causal="bottom_right"), q, k, v, causal="bottom_right")




@system("smem-budget", "tiler", "any", src=["pytorch#143832", "pytorch#132075", "pytorch#133254", "vllm#39018", "attention-gym#14"])
def _s_smem(attn, dev="cpu"):
    """(white box) for smem limits 48/64/99/163/227 KiB x head dims 64,128,256,512 x fp16/fp32 x fwd/bwd the tiler returns a tile that fits, or a
    clear error naming the limit; never a launch failure. Black box here: head dim 256 and 512 in fp32 just work."""
    for D in (256, 512):
        q, k, v = _qkv(dev, B=1, H=1, S=40, D=D, dtype=F32); _close(attn(q, k, v), q, k, v)


# ----------------------------------------------------------------------------------------------------------------
# checking
# ----------------------------------------------------------------------------------------------------------------
FWD = {F64: 1e-11, F32: 2e-5, HF: 3e-3, BF: 2e-2}
BWD = {F64: 1e-9, F32: 1e-4, HF: 6e-3, BF: 4e-2}
if F8 is not None: FWD[F8], BWD[F8] = 8e-2, 1.0


def norm_err(a, r):
    """max |a-r| over max |r|, with NaN/Inf pattern required to be equal; inf if shapes or patterns differ."""
    a, r = a.double(), r.double()
    if a.shape != r.shape: return math.inf
    if a.numel() == 0: return 0.0
    fa, fr = torch.isfinite(a), torch.isfinite(r)
    if not torch.equal(fa, fr): return math.inf
    if not torch.equal(torch.isposinf(a), torch.isposinf(r)) or not torch.equal(torch.isneginf(a), torch.isneginf(r)): return math.inf
    if not bool(fr.any()): return 0.0
    a, r = a.detach(), r.detach()
    return float((a - r)[fr].abs().max() / max(float(r[fr].abs().max()), 1e-30))


def reference(q, k, v, kw, grads=""):
    """fp64 outputs and the wanted gradients {name: tensor}. q,k,v are the (already rounded) inputs."""
    kw = dict(kw); go = kw.pop("grad_out", None); params = kw.pop("params", [])
    t = {n: x.detach().double().requires_grad_(n in grads) for n, x in zip("qkv", (q, k, v))}
    # keep the caller's dtypes for validation
    _validate(q, k, v, kw.get("layout", "bhsd"), kw.get("cu_seqlens_q"), kw.get("cu_seqlens_k"), kw.get("block_table"), kw)
    if "b" in grads: kw["bias"] = kw["bias"].detach().double().requires_grad_()
    if "s" in grads: kw["sinks"] = kw["sinks"].detach().double().requires_grad_()
    for p in params: p.grad = None
    out, lse = ref_attn(t["q"], t["k"], t["v"], **kw)
    res = {}
    if grads:
        w = torch.ones_like(out) if go is None else go.double()
        if go is None: w = grad_out_for(out)
        loss = torch.zeros((), dtype=F64, device=out.device)
        if "L" not in grads: loss = loss + (out * w).sum()
        if "l" in grads or "L" in grads: loss = loss + (torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse)) * grad_lse_for(lse)).sum()
        names = [n for n in "qkv" if n in grads]
        leaves = [t[n] for n in names]
        if "b" in grads: names.append("b"); leaves.append(kw["bias"])
        if "s" in grads: names.append("s"); leaves.append(kw["sinks"])
        for idx, p in enumerate(params): names.append(f"p{idx}"); leaves.append(p)
        gs = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
        res = {n: (torch.zeros_like(x, dtype=F64) if g is None else g.double()) for n, g, x in zip(names, gs, leaves)}
    return out.detach(), lse.detach(), res


def grad_out_for(out):
    g = torch.Generator().manual_seed(7)
    return torch.randn(out.shape, generator=g).to(BF).double().to(out.device)


def grad_lse_for(lse):
    g = torch.Generator().manual_seed(8)
    return torch.randn(lse.shape, generator=g).double().to(lse.device)


def check(c, attn, device="cpu"):
    """Run one case against `attn`; returns a list of problems (empty = passed)."""
    q, k, v, kw = c["build"](device=device)
    grads, exp = c["grads"], c["expected"]
    call = dict(kw); go = call.pop("grad_out", None); params = call.pop("params", [])
    leaf = {n: x.detach() for n, x in zip("qkv", (q, k, v))}
    # keep strides: a detached view keeps them
    for n in "qkv":
        if n in grads and leaf[n].is_floating_point(): leaf[n].requires_grad_()
    if "b" in grads: call["bias"] = call["bias"].detach().requires_grad_()
    if "s" in grads: call["sinks"] = call["sinks"].detach().requires_grad_()
    if c["lse"] or "l" in grads.lower(): call["return_lse"] = True
    if exp.startswith("error"):
        try: attn(leaf["q"], leaf["k"], leaf["v"], **call)
        except Exception: return []
        return ["no error raised"]
    try:
        r = attn(leaf["q"], leaf["k"], leaf["v"], **call)
    except Exception as e:
        return [] if exp == "ref-or-error" else [f"raised {type(e).__name__}: {e}"]
    out, lse = r if isinstance(r, tuple) else (r, None)
    try: ro, rl, rg = reference(q, k, v, kw, grads)
    except (ValueError, TypeError):
        if exp == "ref-or-error": return []                # the implementation accepts (and must document) more than the reference does
        raise
    probs, dt = [], q.dtype
    tf = (c["tol"] or {}).get("fwd", FWD.get(dt)); tb = (c["tol"] or {}).get("bwd", BWD.get(dt))
    if exp == "zeros" and bool((out != 0).any()): probs.append("output not zero")
    e = norm_err(out.detach(), ro)
    if not e <= tf: probs.append(f"out err {e:.3g} > {tf:g}")
    if call.get("return_lse") and lse is not None:
        el = norm_err(lse.detach(), rl)
        if not el <= max(tf, 1e-5): probs.append(f"lse err {el:.3g}")
    if grads:
        w = grad_out_for(ro) if go is None else go
        ten, gw = [], []
        if "L" not in grads: ten.append(out); gw.append(w.to(out.dtype) if go is None else go)
        if ("l" in grads or "L" in grads) and lse is not None:
            ten.append(torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))); gw.append(grad_lse_for(rl).to(lse.dtype))
        names = [n for n in "qkv" if n in grads] + [n for n in "bs" if n in grads]
        leaves = [leaf[n] for n in "qkv" if n in grads] + [call[{"b": "bias", "s": "sinks"}[n]] for n in "bs" if n in grads] + list(params)
        names += [f"p{i}" for i in range(len(params))]
        try:
            gs = torch.autograd.grad(ten, leaves, gw, allow_unused=True)
        except Exception as e:
            return probs + [f"backward raised {type(e).__name__}: {e}"]
        for n, g, x in zip(names, gs, leaves):
            g = torch.zeros_like(x) if g is None else g
            rmax = float(rg[n].abs().max()) if rg[n].numel() else 0.0
            if n == "b" and rmax < 1e-2 * float(w.abs().max()):    # e.g. one number per row/head: exact gradient is 0 (shift invariance)
                eg = float((g.double() - rg[n]).abs().max()) / float(w.abs().max())
            else:
                eg = norm_err(g, rg[n]) if rmax > 0 else float(g.abs().max() if g.numel() else 0)
            if not eg <= tb: probs.append(f"d{n} err {eg:.3g} > {tb:g}")
    return probs


# implementations used for self-test ------------------------------------------------------------------------------
def ref_impl(q, k, v, return_lse=False, dropout_p=0.0, seed=None, **kw):
    """the reference behind the attn contract (autocast aware; dtype of the result = dtype of the inputs)."""
    if torch.is_autocast_enabled(q.device.type):
        dt = torch.get_autocast_dtype(q.device.type); q, k, v = q.to(dt), k.to(dt), v.to(dt)
    if dropout_p:
        g = torch.Generator().manual_seed(seed)
        m = torch.rand(q.shape[0], q.shape[1], q.shape[2], k.shape[2], generator=g) >= dropout_p
        kw.update(drop_mask=m, dropout_p=dropout_p)
    kw.pop("params", None)
    o, l = ref_attn(q, k, v, **kw)
    o = o.to(BF if q.dtype == F8 else q.dtype)
    return (o, l.to(F64)) if return_lse else o


def sdpa_impl(q, k, v, layout="bhsd", return_lse=False, scale=None, attn_mask=None, bias=None, num_splits=0, deterministic=False, **kw):
    """torch.nn.functional.scaled_dot_product_attention with everything expressed as an additive mask. Unsupported options raise KeyError."""
    for n in ("softcap", "sinks", "cu_seqlens_q", "block_table", "q_descale", "score_fn", "alibi_slopes", "dropout_p"):
        if kw.get(n) is not None: raise KeyError(n)
    if return_lse: pass
    if layout == "bshd": q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    B, H, Sq, _ = q.shape; Sk = k.shape[2]
    m = None
    if any(kw.get(n) is not None for n in ("causal", "window", "key_padding_mask", "seqused_k", "mask_fn")) or attn_mask is not None:
        m = visible(B, H, Sq, Sk, q.device, attn_mask=attn_mask, **{n: kw.get(n) for n in ("causal", "window", "align", "key_padding_mask", "seqused_k", "mask_fn")})
    if bias is not None:
        add = bias.to(q.dtype).expand(B, H, Sq, Sk)
        m = add if m is None else torch.where(m, add, torch.full((), -math.inf, dtype=q.dtype))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    o = o.transpose(1, 2) if layout == "bshd" else o
    return o
