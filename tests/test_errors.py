"""Is every misuse of a call caught before a launch, by flashgen's own error that says what, the limit and the remedy?"""

from __future__ import annotations

import pytest
import torch

import flashgen as fg


def t(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def call(q=None, k=None, v=None, *, variant=None, **kw):
    q = t(2, 4, 8, 16) if q is None else q
    k = t(2, 2, 8, 16) if k is None else k
    v = t(2, 2, 8, 16) if v is None else v
    return fg.compile(variant or fg.Variant())(q, k, v, **kw)


def packed(q=None, k=None, v=None, cu=(0, 3, 8), **kw):
    cu = torch.tensor(cu, dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} | kw
    return fg.compile(kw.pop("variant", fg.Variant())).varlen(
        t(8, 4, 16) if q is None else q,
        t(8, 2, 16) if k is None else k,
        t(8, 2, 16) if v is None else v,
        **{n: x for n, x in options.items() if n != "variant"},
    )


FLAGS = torch.tensor([True, False, True])


def by_head(table):
    return lambda s, b, h, q, k: torch.where(k < q, s + table[h.long()], s)


def by_item(table):
    return lambda s, b, h, q, k: s + table[q, b]


CASES = {
    "q is no tensor": (lambda: call([1, 2]), fg.VariantError, "q is a list"),
    "rank": (lambda: call(t(4, 8, 16)), fg.ShapeError, "4 dimensions"),
    "mixed dtypes": (lambda: call(t(2, 4, 8, 16, dtype=torch.bfloat16)), fg.DtypeError, "autocast"),
    "integer dtype": (lambda: call(*(torch.ones(1, 1, 4, 8, dtype=torch.int32) for _ in range(3))), fg.DtypeError, "int32"),
    "complex dtype": (lambda: call(*(torch.ones(1, 1, 4, 8, dtype=torch.complex64) for _ in range(3))), fg.DtypeError, "complex64"),
    "head dim of k": (lambda: call(k=t(2, 2, 8, 8)), fg.ShapeError, "head_dim 16 and k 8"),
    "head dim of the variant": (lambda: call(variant=fg.Variant(head_dim=32)), fg.ShapeError, "the variant is for head_dim"),
    "head dim too large": (lambda: call(*(t(1, 1, 2, 600) for _ in range(3))), fg.ShapeError, "head_dim=600.*576.*Split the heads"),
    "head dim zero": (lambda: call(t(1, 1, 2, 0), t(1, 1, 2, 0), t(1, 1, 2, 8)), fg.ShapeError, "head_dim=0"),
    "head dim in the variant": (lambda: fg.Variant(head_dim=1024), fg.ShapeError, "head_dim=1024: the limit is"),
    "heads": (lambda: call(k=t(2, 3, 8, 16), v=t(2, 3, 8, 16)), fg.ShapeError, "multiple of kv heads"),
    "heads of k and v": (lambda: call(k=t(2, 4, 8, 16)), fg.ShapeError, "k has 4 heads and v 2"),
    "lengths of k and v": (lambda: call(k=t(2, 2, 9, 16)), fg.ShapeError, "k has length 9 and v 8"),
    "batch": (lambda: call(k=t(3, 2, 8, 16), v=t(3, 2, 8, 16)), fg.ShapeError, "batch sizes"),
    "layout": (lambda: call(layout="bshd"), fg.VariantError, "'bhld' or 'blhd'"),
    "sink without a sink variant": (lambda: call(sink=t(4)), fg.VariantError, r"Variant\(sink=True\)"),
    "sink missing": (lambda: call(variant=fg.Variant(sink=True)), fg.VariantError, "pass sink="),
    "sink shape": (lambda: call(variant=fg.Variant(sink=True), sink=t(2)), fg.ShapeError, "one logit per query head"),
    "sink dtype": (lambda: call(variant=fg.Variant(sink=True), sink=torch.ones(4, dtype=torch.int32)), fg.DtypeError, "floating"),
    "sink in the variant": (lambda: fg.Variant(sink=t(4)), fg.VariantError, "True or False"),
    "return_aux": (lambda: call(return_aux=("lsee",)), fg.VariantError, "return_aux"),
    "dropout range": (lambda: call(dropout_p=1.5), fg.VariantError, "probability in 0..1"),
    "seed": (lambda: call(seed=-1), fg.VariantError, "seed"),
    "seqlens_k dtype": (lambda: call(seqlens_k=torch.tensor([3, 4])), fg.DtypeError, "int32"),
    "seqlens_k shape": (lambda: call(seqlens_k=torch.tensor([3], dtype=torch.int32)), fg.ShapeError, "seqlens_k"),
    "seqlens_k value": (lambda: call(seqlens_k=torch.tensor([3, 9], dtype=torch.int32)), fg.ShapeError, "seqlens_k holds 9"),
    "seqlens_k list": (lambda: call(seqlens_k=[3, 4]), fg.VariantError, "int32 tensor"),
    "unknown input": (lambda: call(inputs={"t": t(3)}), fg.VariantError, "not of this variant: t"),
    "missing input": (lambda: call(variant=fg.Variant(score=fg.bias(fg.input("t", ndim=2)))), fg.VariantError, "missing: t"),
    "input rank": (lambda: call(variant=fg.Variant(score=fg.bias(fg.input("t", ndim=2))), inputs={"t": t(3)}), fg.ShapeError, "ndim=2"),
    "bias shape": (lambda: call(variant=fg.Variant(score=fg.bias(t(2, 4, 8, 7)))), fg.ShapeError, "dimension 3 is 7"),
    "bias dtype": (lambda: fg.bias(torch.ones(8, 8, dtype=torch.bool)), fg.DtypeError, "from_dense"),
    "mask dtype": (lambda: fg.from_dense(t(8, 8)), fg.DtypeError, "bias"),
    "mask shape": (lambda: call(variant=fg.Variant(mask=fg.from_dense(torch.ones(3, 1, 8, 8, dtype=torch.bool)))), fg.ShapeError, "dimension 0 is 3"),
    "block mask shape": (lambda: call(variant=fg.Variant(mask=fg.block_sparse(torch.ones(3, 2, dtype=torch.bool), 4))), fg.ShapeError, "number of blocks"),
    "document too short": (lambda: call(variant=fg.Variant(mask=fg.document(torch.zeros(5, dtype=torch.int32)))), fg.ShapeError, "at least"),
    "alibi heads": (lambda: call(variant=fg.Variant(score=fg.alibi(t(3)))), fg.ShapeError, "number of query heads"),
    "table short of heads": (
        lambda: call(variant=fg.Variant(score=by_head(t(2)))),
        fg.ShapeError,
        "dimension 0 is indexed by h and holds 2, there are 4 query heads",
    ),
    "mask short of heads": (lambda: call(variant=fg.Variant(mask=lambda b, h, q, k: (k <= q) & FLAGS[h])), fg.ShapeError, "indexed by h and holds 3"),
    "table short of items": (
        lambda: call(variant=fg.Variant(score=by_item(t(8, 1)))),
        fg.ShapeError,
        "dimension 1 is indexed by b and holds 1, there are 2 batch",
    ),
    "table short of sequences": (lambda: packed(cu=(0, 2, 3, 8), variant=fg.Variant(score=by_item(t(8, 2)))), fg.ShapeError, "holds 2, there are 3 batch"),
    "input short of heads": (
        lambda: call(variant=fg.Variant(score=by_head(fg.input("t", ndim=1))), inputs={"t": t(3)}),
        fg.ShapeError,
        "indexed by h and holds 3",
    ),
    "flex table short of heads": (lambda: fg.flex_attention(*3 * [t(1, 4, 8, 16)], score_mod=by_head(t(3))), fg.ShapeError, "indexed by h and holds 3"),
    "even relative table": (lambda: fg.relative_bias(t(8)), fg.ShapeError, "odd"),
    "scale": (lambda: fg.Variant(scale=float("nan")), fg.VariantError, "finite"),
    "scale type": (lambda: fg.Variant(scale="big"), fg.VariantError, "scale"),
    "score as mask": (lambda: fg.Variant(mask=fg.softcap(3.0)), fg.VariantError, "score="),
    "mask as score": (lambda: fg.Variant(score=fg.causal), fg.VariantError, "mask="),
    "not a variant": (lambda: fg.compile(fg.causal), fg.VariantError, "takes a flashgen.Variant"),
    "target": (lambda: fg.compile(fg.Variant(), target="sm75"), fg.DeviceError, "the targets are"),
    "family": (lambda: fg.compile(fg.Variant(), family="sm70"), fg.VariantError, "the families are"),
    "family of another device": (lambda: fg.compile(fg.Variant(), family="sm80")(t(1, 1, 4, 8), t(1, 1, 4, 8), t(1, 1, 4, 8)), fg.VariantError, "cpu"),
    "gpu target on cpu tensors": (
        lambda: fg.compile(fg.Variant(), target="sm80")(t(1, 1, 4, 8), t(1, 1, 4, 8), t(1, 1, 4, 8)),
        fg.DeviceError,
        "target='sm80'",
    ),
    "plan field": (lambda: fg.compile(fg.Variant(), plan={"block_m": 64})(t(1, 1, 4, 8), t(1, 1, 4, 8), t(1, 1, 4, 8)), fg.VariantError, "no such field"),
    "plan value": (lambda: fg.compile(fg.Variant(), plan={"block_q": "64"}), fg.VariantError, "integers"),
    "which": (lambda: fg.compile(fg.Variant()).source(which="both"), fg.VariantError, "'forward' or 'backward'"),
    "varlen rank": (lambda: packed(q=t(1, 8, 4, 16)), fg.ShapeError, "3 dimensions"),
    "offsets fall": (lambda: packed(cu=(0, 5, 3)), fg.ShapeError, "never fall"),
    "offsets past the end": (lambda: packed(cu=(0, 5, 9)), fg.ShapeError, "8 rows"),
    "offsets start": (lambda: packed(cu=(1, 5, 8)), fg.ShapeError, "start at 0"),
    "offsets dtype": (lambda: packed(cu_seqlens_q=torch.tensor([0, 8])), fg.DtypeError, "int32"),
    "sequence counts": (lambda: packed(cu_seqlens_k=torch.tensor([0, 8], dtype=torch.int32)), fg.ShapeError, "sequences"),
    "max_seqlen too small": (lambda: packed(max_seqlen_q=2), fg.ShapeError, "longest sequence has 5"),
    "dense mask in varlen": (lambda: packed(variant=fg.Variant(mask=fg.from_dense(torch.ones(8, 8, dtype=torch.bool)))), fg.ShapeError, "packed sequences"),
    "paged": (
        lambda: fg.compile(fg.Variant()).paged(t(1, 1, 1, 8), t(1, 1, 1, 8), t(1, 1, 1, 8), block_table=None, seqlens_k=None),
        fg.VariantError,
        "not available",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_misuse(name):
    attempt, kind, text = CASES[name]
    with pytest.raises(kind, match=text):
        attempt()


def test_a_table_may_be_short_where_a_condition_guards_the_index():
    few, many = t(2), torch.randn(4)
    many[:2] = few
    guarded = lambda table: lambda s, b, h, q, k: torch.where(h < 2, s + table[torch.clamp(h, max=1)], s)  # noqa: E731
    plain = lambda table: lambda s, b, h, q, k: torch.where(h < 2, s + table[h], s)  # noqa: E731
    q, k, v = t(2, 4, 8, 16), t(2, 2, 8, 16), t(2, 2, 8, 16)
    outs = [call(q, k, v, variant=fg.Variant(score=f)) for f in (guarded(few), plain(few), plain(many))]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    own = fg.mask(lambda b, h, q, k: h < 2)
    outs = [call(q, k, v, variant=fg.Variant(mask=own, score=lambda s, b, h, q, k, table=table: s + table[h])) for table in (few, many)]
    assert torch.equal(*outs)
    outs = [call(q, k, v, variant=fg.Variant(mask=lambda b, h, q, k, n=n: (h < 2) & FLAGS[:n][h])) for n in (2, 3)]
    assert torch.equal(*outs)
    assert call(variant=fg.Variant(score=lambda s, b, h, q, k: s + few[h // 2])).shape == (2, 4, 8, 16)


def test_a_table_short_of_heads_is_an_error_under_compile():
    with pytest.raises(Exception, match="indexed by h and holds 3"):
        torch.compile(lambda q: fg.flex_attention(q, q, q, score_mod=by_head(FLAGS.float())), backend="aot_eager", fullgraph=True)(t(1, 4, 8, 16))


def test_kinds_are_also_the_builtin_errors():
    assert issubclass(fg.ShapeError, ValueError) and issubclass(fg.DtypeError, TypeError)
    assert all(issubclass(k, fg.FlashgenError) for k in (fg.VariantError, fg.ShapeError, fg.DtypeError, fg.DeviceError, fg.CompileError))
