"""Do the emitted sm90 backward kernels compute the gradients, without deadlock, when their threads run on the host?

Like ``test_sm90_emulated``: the text that NVRTC compiles, run by the host compiler against the emulators, beside autograd in float64.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sm90_emulated import HOPPER, SEED, compiled, dropout_values, packed_values, tensor_map

import flashgen
from flashgen import abi, bounds, emit
from flashgen.analysis import analyze
from flashgen.calls import seed_tensor
from flashgen.families import Sizes, sm90, sm90_backward
from flashgen.plan import Plan, candidates
from flashgen.problem import Problem
from flashgen.reference import reference
from flashgen.tables import block_bounds


@dataclass(frozen=True)
class Case:
    name: str
    variant: Any = field(default_factory=flashgen.Variant)
    head_dim: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (1, 1)
    lengths: tuple[int, int] = (201, 300)
    dtype: torch.dtype = torch.bfloat16
    plan: dict[str, int] = field(default_factory=dict)
    wanted: tuple[str, ...] = ("dq", "dk", "dv")
    nan: bool = False  # the last key of each head is NaN in column 3
    seqlens_k: tuple[int, ...] = ()
    dlse: bool = False
    deterministic: bool = False
    shared_batch: bool = False  # keys and values of stride 0 over two batch items
    dropout_p: float = 0.0


POISON = {"float32": math.nan, "int32": 1 << 30}  # what workspaces hold before
CAUSAL = flashgen.Variant(mask=flashgen.causal)
DOCUMENTS = torch.arange(300, dtype=torch.int32) // 70
MANY = torch.arange(2600, dtype=torch.int32) // 350 % 3  # documents that come back
SINK_AND_WINDOW = flashgen.causal & (flashgen.sliding_window(left=40, right=0) | flashgen.mask(lambda b, h, q, k: k < 4))
TABLE = torch.linspace(-1, 1, 2 * 41, requires_grad=True).reshape(2, 41).detach().requires_grad_()
FEW_BLOCKS = torch.rand(2, 60, 9, generator=torch.Generator().manual_seed(2)) < 0.1  # of 48: no tile is made of whole ones
FEW_BLOCKS[0, :, 3:6] = False  # keys that no row sees
BLOCKS = flashgen.Variant(mask=flashgen.block_sparse(FEW_BLOCKS, 48))
LEARNED_TABLE = flashgen.relative_bias(TABLE)
SLOPES = torch.tensor([0.5, -0.25], requires_grad=True)
LEARNED_WAVES = flashgen.score(lambda s, b, h, q, k: s + SLOPES[h] * torch.cos(0.3 * (q - k)))
LEARNED_SCALES = flashgen.score(lambda s, b, h, q, k: s * SLOPES[h])
FROM_REGISTERS = {"dq_staged": 0, "persistent": 0, "kv_stages": 1}
DOCUMENTS_BEFORE = flashgen.Variant(mask=flashgen.causal & flashgen.document(DOCUMENTS))
CAPPED = flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(2.0))
CASES = (
    Case("full"),
    Case("full, 128", head_dim=(128, 128), lengths=(130, 200)),
    Case("added from registers", plan=FROM_REGISTERS),
    Case("dq in the same step", CAUSAL, heads=(4, 4), plan={"late": 0, "sum_bytes": 1, "sms": 1}),
    Case("dq in the same step, 128", CAUSAL, (128, 128), (4, 2), (150, 280), plan={"late": 0, "dq_staged": 1, "persistent": 0, "kv_stages": 1}),
    Case("dq in the same step, from registers", CAUSAL, heads=(3, 3), plan={"late": 0, **FROM_REGISTERS}),
    Case("dq and dv alone, dq a step later", CAUSAL, heads=(4, 4), lengths=(300, 300), plan={"sms": 1, "persistent": 1}, wanted=("dq", "dv")),
    Case("causal, grouped heads", CAUSAL, (128, 128), heads=(4, 2), lengths=(150, 150)),
    Case("one head's sum of dq after the other", CAUSAL, heads=(4, 4), plan={"sum_bytes": 1, "sms": 1}),
    Case("sums of dq from registers", CAUSAL, heads=(3, 3), plan={"sum_bytes": 1, "sms": 1, **FROM_REGISTERS}),
    Case("grouped heads' sums of dq one after the other", CAUSAL, (128, 128), heads=(10, 5), lengths=(150, 150), plan={"sum_bytes": 1, "sms": 4}),
    Case("keys one after the other, one stage", CAUSAL, heads=(4, 4), plan={"persistent": 1, "sum_bytes": 1, "sms": 1, "kv_stages": 1}),
    Case("keys one after the other, 128", CAUSAL, (128, 128), (6, 3), (150, 280), plan={"persistent": 1, "sum_bytes": 1, "sms": 2, "dq_staged": 1}),
    Case("keys that nobody sees between others", CAUSAL, heads=(4, 2), lengths=(100, 700), plan={"persistent": 1, "sms": 1}),
    Case("a block for each tile of keys", CAUSAL, heads=(4, 4), plan={"sum_bytes": 1, "sms": 1, "persistent": 0, "kv_stages": 1}),
    Case("documents, keys one after the other", DOCUMENTS_BEFORE, heads=(4, 2), lengths=(300, 300), plan={"persistent": 1, "sms": 2}),
    Case("lengths in use, keys one after the other", heads=(3, 3), seqlens_k=(177,), nan=True, plan={"persistent": 1, "sms": 1, "sum_bytes": 1}),
    Case("deterministic, keys in turn", CAUSAL, heads=(4, 2), lengths=(300, 400), deterministic=True, plan={"persistent": 1, "sms": 2, "sum_bytes": 1}),
    Case("soft-cap, keys one after the other", CAPPED, heads=(4, 2), plan={"persistent": 1, "sms": 1}),
    Case("sums of dq, masked NaN", CAUSAL, heads=(3, 3), nan=True, lengths=(201, 201), plan={"sum_bytes": 1, "sms": 1}),
    Case("causal, float16, 64", CAUSAL, lengths=(300, 431), dtype=torch.float16),
    Case("causal, more rows than keys", CAUSAL, (128, 128), lengths=(300, 100)),
    Case("window", flashgen.Variant(mask=flashgen.causal & flashgen.sliding_window(left=70, right=0)), lengths=(401, 401)),
    Case("documents", flashgen.Variant(mask=flashgen.causal & flashgen.document(DOCUMENTS)), lengths=(300, 300)),
    Case("sink and window", flashgen.Variant(mask=SINK_AND_WINDOW), lengths=(500, 500)),
    Case("deterministic sink and window", flashgen.Variant(mask=SINK_AND_WINDOW), lengths=(500, 500), deterministic=True),
    Case("few blocks", BLOCKS, (16, 16), (2, 1), lengths=(2880, 430)),
    Case("few blocks, 128", BLOCKS, (128, 128), (2, 2), lengths=(500, 430)),
    Case("deterministic blocks", flashgen.Variant(mask=flashgen.block_sparse(FEW_BLOCKS.mT, 48)), (16, 16), (2, 1), lengths=(400, 2880), deterministic=True),
    Case("wide, few blocks", BLOCKS, (136, 136), lengths=(600, 250)),
    Case("documents, many tiles", flashgen.Variant(mask=flashgen.document(MANY, DOCUMENTS)), (16, 16), lengths=(2600, 300)),
    Case("deterministic documents, many tiles", flashgen.Variant(mask=flashgen.document(DOCUMENTS, MANY)), (16, 16), lengths=(300, 2600), deterministic=True),
    Case("every third key", flashgen.Variant(mask=flashgen.dilated(3)), lengths=(150, 200)),
    Case("soft-cap", flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(2.0)), (128, 128), heads=(2, 1), lengths=(140, 140)),
    Case("ALiBi", flashgen.Variant(score=flashgen.alibi()), heads=(2, 1), lengths=(140, 140)),
    Case("learned table", flashgen.Variant(mask=flashgen.causal, score=LEARNED_TABLE), heads=(2, 2), lengths=(140, 150)),
    Case("learned table, grouped heads", flashgen.Variant(mask=SINK_AND_WINDOW, score=LEARNED_TABLE), (128, 128), heads=(2, 1), lengths=(260, 300)),
    Case("learned table, 128, staged", flashgen.Variant(mask=flashgen.causal, score=LEARNED_TABLE), (128, 128), lengths=(140, 150), plan={"dq_staged": 1}),
    Case("learned table, from registers", flashgen.Variant(mask=flashgen.causal, score=LEARNED_TABLE), lengths=(140, 150), plan={"dq_staged": 0}),
    Case("causal, 128, staged", CAUSAL, (128, 128), (2, 1), lengths=(260, 300), plan={"dq_staged": 1, "kv_stages": 1}),
    Case("no mask, 128, from registers", flashgen.Variant(), (128, 128), lengths=(140, 150), plan={"dq_staged": 0}),
    Case("learned waves", flashgen.Variant(mask=flashgen.causal, score=LEARNED_WAVES), heads=(2, 2), lengths=(200, 150)),
    Case("learned scales of scores", flashgen.Variant(mask=flashgen.causal, score=LEARNED_SCALES), heads=(2, 2), lengths=(100, 90)),
    Case("negative scale", flashgen.Variant(mask=flashgen.causal, scale=-0.1)),
    Case("masked NaN", CAUSAL, nan=True, lengths=(201, 201)),
    Case("lengths in use", head_dim=(128, 128), seqlens_k=(77,), nan=True),
    Case("a gradient of lse", CAUSAL, dlse=True),
    Case("one value, one key", lengths=(1, 1)),
    Case("no key", CAUSAL, lengths=(5, 0)),
    Case("head dims 96 and 80", CAUSAL, (96, 80), lengths=(100, 150)),
    Case("head dims 40 and 16", head_dim=(40, 16)),
    Case("soft-cap, head dim 16, float16", flashgen.Variant(score=flashgen.softcap(2.0)), (16, 16), dtype=torch.float16, lengths=(48, 40)),
    Case("documents, head dim 16", flashgen.Variant(mask=flashgen.document(DOCUMENTS)), (16, 16), lengths=(96, 80)),
    Case("shared batch", CAUSAL, shared_batch=True),
    Case("only dv", CAUSAL, wanted=("dv",)),
    Case("dk and dv", CAUSAL, wanted=("dk", "dv")),
    Case("only dq", CAUSAL, wanted=("dq",), lengths=(300, 300)),
    Case("deterministic", CAUSAL, (128, 128), heads=(4, 2), deterministic=True),
    Case("deterministic, full, lengths in use", heads=(2, 1), seqlens_k=(177,), deterministic=True),
    Case(
        "deterministic, two sections", flashgen.Variant(mask=SINK_AND_WINDOW), (128, 128), heads=(4, 2), lengths=(260, 500), deterministic=True,
        plan={"sum_bytes": 1, "sms": 1},
    ),
    Case("deterministic soft-cap", flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(2.0)), heads=(2, 1), deterministic=True),
    Case("deterministic, masked NaN", CAUSAL, nan=True, lengths=(201, 201), deterministic=True),
    Case("wide", head_dim=(256, 256), lengths=(130, 200)),
    Case("wide, causal, grouped heads", CAUSAL, (256, 256), heads=(4, 2), lengths=(150, 150)),
    Case("wide, soft-cap", flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(2.0)), (256, 256), lengths=(140, 140)),
    Case("wide, ALiBi, float16", flashgen.Variant(score=flashgen.alibi()), (192, 128), dtype=torch.float16, lengths=(140, 200)),
    Case("wide, masked NaN", CAUSAL, (192, 192), nan=True, lengths=(201, 201)),
    Case("wide, lengths in use", head_dim=(144, 200), seqlens_k=(77,), nan=True, lengths=(100, 200)),
    Case("wide, soft-cap of lengths in use", flashgen.Variant(score=flashgen.softcap(2.0)), (144, 200), seqlens_k=(77,), nan=True, lengths=(100, 200)),
    Case("lengths in use, soft-cap", flashgen.Variant(score=flashgen.softcap(2.0)), (128, 128), seqlens_k=(77,), nan=True),
    Case("wide, no key", CAUSAL, (256, 256), lengths=(5, 0)),
    Case("dropout", CAUSAL, heads=(4, 2), lengths=(150, 150), dropout_p=0.3),
    Case("dropout, soft-cap, 128", flashgen.Variant(score=flashgen.softcap(2.0)), (128, 128), lengths=(140, 140), dropout_p=0.3),
    Case("dropout, learned table", flashgen.Variant(score=flashgen.relative_bias(TABLE)), heads=(2, 2), lengths=(140, 150), dropout_p=0.3),
    Case("deterministic dropout, masked NaN", CAUSAL, nan=True, lengths=(201, 201), deterministic=True, dropout_p=0.3),
    Case("wide dropout, soft-cap", flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(2.0)), (256, 256), lengths=(140, 140), dropout_p=0.3),
    Case("wide dropout", CAUSAL, (192, 192), lengths=(140, 140), dropout_p=0.3),
)


def built(case: Case, form: Any, problem: Problem, folder: Path) -> tuple[ctypes.CDLL, Plan]:
    plan = next(c.plan for c in candidates(analyze(form), problem, HOPPER, "sm90", case.plan) if not c.rejected)
    text = emit.emit(emit.Spec(form, problem, plan, HOPPER)).text
    text = text[: text.index("// d (64 x")] + text[text.index("struct Params") :]  # without the wgmma wrappers
    text = text.replace('#include "fg/math.cuh"', '#include "fg/math.h"').replace('#include "fg/sm90/ptx.cuh"\n', "")
    text = text.replace('#include "fg/sm90/backward.cuh"\n', "").replace('#include "fg/blocks.cuh"\n', "")
    text = text.replace('#include "fg/math.h"', '#include "fg/math.h"\n#include "sm90_backward_emulator.h"')
    text = text.replace("extern __shared__ __align__(1024) char smem_bytes[];", "")
    compiled(text, folder)
    return ctypes.CDLL(str(folder / "kernel.so")), plan


def emulate(
    case: Case, tensors: dict[str, torch.Tensor], lse: torch.Tensor, dlse: torch.Tensor, folder: Path,
    offsets: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The gradients wanted. offsets: of packed sequences, whose rows are then those of one batch item."""
    traced = case.variant.trace({})
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    form, scale = traced.form, q.shape[-1] ** -0.5 if case.variant.scale is None else case.variant.scale
    slots = tuple(n for n, c in enumerate(traced.captures) if c.tensor.requires_grad)
    problem = Problem(
        str(q.dtype)[6:], q.shape[-1], v.shape[-1], which="backward", group=q.shape[1] // k.shape[1], scale_sign=(scale > 0) - (scale < 0),
        seqlens_k=bool(case.seqlens_k), dlse=case.dlse, capture_grads=slots, deterministic=case.deterministic,
        dropout=case.dropout_p > 0, layout="varlen" if offsets else "dense",
        **{n: n in case.wanted for n in ("dq", "dk", "dv")},
    )  # fmt: skip
    library, plan = built(case, form, problem, folder)
    sizes = Sizes(len(offsets[0]) - 1 if offsets else q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[2], k.shape[2])
    tensors = {**tensors, **{name: torch.full(tensors[name[1:]].shape, math.nan, dtype=q.dtype) for name in case.wanted}}
    delta, lengths = torch.full(q.shape[:3], math.nan), torch.tensor(case.seqlens_k, dtype=torch.int32)
    values: dict[str, Any] = {
        "batch": sizes.batch, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "q_len": sizes.q_len, "kv_len": sizes.kv_len, "scale": scale,
        "lse": lse.data_ptr(), "delta": delta.data_ptr(), "lse_stride_b": lse.stride(0), "lse_stride_h": lse.stride(1), "dlse": dlse.data_ptr(),
        "seqlens_k": lengths.data_ptr(), **sm90_backward.numbers(problem, plan, sizes),
    }  # fmt: skip
    held, zeros = {}, []
    for w in sm90_backward.workspaces(problem, plan, sizes):
        held[w.field] = torch.full((w.elements,), 0 if w.zeroed else POISON[w.dtype], dtype=getattr(torch, w.dtype))
        zeros += [held[w.field]] if w.kept else []
    values |= {name: t.data_ptr() for name, t in held.items()}
    for name, t in tensors.items():
        values |= {name: t.data_ptr(), f"{name}_stride_b": t.stride(0), f"{name}_stride_h": t.stride(1), f"{name}_stride_l": t.stride(2)}
    values |= {m.field: tensor_map(m, tensors[m.tensor]) for m in sm90_backward.tensor_maps(problem, plan)}
    values |= {f"float_{n}": x for n, x in enumerate(traced.floats)} | {f"int_{n}": x for n, x in enumerate(traced.ints)}
    gradients = {n: torch.zeros_like(traced.captures[n].tensor) for n in slots}
    values |= {f"grad_{n}": t.data_ptr() for n, t in gradients.items()}
    for n, c in enumerate(traced.captures):
        values[f"capture_{n}"] = c.tensor.data_ptr()
        for d in range(c.tensor.dim()):
            values |= {f"capture_{n}_stride_{d}": c.tensor.stride(d), f"capture_{n}_size_{d}": c.tensor.shape[d]}
    tables = {n: block_bounds(traced.captures[n].tensor, count) for n, count in bounds.tables(form, problem).items()}
    values |= {f"{name}_{n}": t.data_ptr() for n, pair in tables.items() for name, t in zip(("least", "most"), pair)}
    seed = seed_tensor(SEED, torch.device("cpu"))
    values |= dropout_values(case.dropout_p, seed)
    if offsets:
        values |= packed_values(offsets, sizes, values)
    packed = abi.params(form, problem, tuple(sm90.FAMILY.params(problem, plan)), sm90.FAMILY.grad_type(problem)).pack(values)
    assert len(packed) == library.params_bytes()
    for launch in sm90_backward.launches(problem, plan, sizes):
        getattr(library, f"launch_{launch.entry}")(packed, launch.grid[0], launch.threads)
    assert not any(t.any() for t in zeros), "left for the next launch as they were"
    return {**{name: tensors[name] for name in case.wanted}, **{f"grad_{n}": t for n, t in gradients.items()}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_emitted_kernels_compute_the_gradients(case, tmp_path):
    generator = torch.Generator().manual_seed(1)
    make = lambda heads, length, dim: torch.randn(1, heads, length, dim, generator=generator).to(case.dtype)  # noqa: E731
    (heads, kv_heads), (q_len, kv_len), (dim_qk, dim_v) = case.heads, case.lengths, case.head_dim
    q, k, v, dout = make(heads, q_len, dim_qk), make(kv_heads, kv_len, dim_qk), make(kv_heads, kv_len, dim_v), make(heads, q_len, dim_v)
    if case.shared_batch:
        q, k, v, dout = torch.cat((q, q.flip(2))), k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), torch.cat((dout, dout.flip(3)))
    lengths = {"seqlens_k": torch.tensor(case.seqlens_k, dtype=torch.int32)} if case.seqlens_k else {}
    lengths |= {"dropout_p": case.dropout_p, "seed": SEED} if case.dropout_p else {}
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    traced = case.variant.trace({})
    learned = [c.tensor for c in traced.captures if c.tensor.requires_grad]
    out, lse, _ = reference(case.variant, *leaves, **lengths)
    dlse = torch.randn(lse.shape, generator=generator) if case.dlse else torch.zeros_like(lse, dtype=torch.float32)
    seen = lse > -math.inf
    total = (out * dout.double()).sum() + (torch.where(seen, lse, 0.0) * torch.where(seen, dlse, 0.0).double()).sum()
    found = torch.autograd.grad(total, [*leaves, *learned], allow_unused=True)
    wanted = dict(zip(("dq", "dk", "dv"), (torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves))))
    wanted |= {f"grad_{n}": g for n, g in zip((n for n, c in enumerate(traced.captures) if c.tensor.requires_grad), found[3:])}
    if case.nan:  # beyond all rows' reach but the last one's, or beyond all
        k, v = k.clone(), v.clone()
        k[:, :, -1, 3] = v[:, :, -1, 3] = math.nan
    lse32 = lse.detach().float()
    got = emulate(case, {"q": q, "k": k, "v": v, "out": out.detach().to(case.dtype), "dout": dout}, lse32.contiguous(), dlse, tmp_path)
    rounding = 2**-7 if case.dtype == torch.bfloat16 else 2**-10
    for name, g in got.items():
        expected = wanted[name]
        if case.nan and not case.seqlens_k:  # the last row sees the NaN: it reaches dq of that row, and dk, dv of every key it sees
            if name != "dq":
                continue
            g, expected = g[:, :, :-1], expected[:, :, :-1]
        assert torch.isfinite(g).all(), name
        assert (g.double() - expected).norm() <= rounding * expected.norm() + 1e-5, (name, float((g.double() - expected).norm() / expected.norm()))
        if name in ("dq", "dk", "dv"):
            nothing = ~seen[..., : g.shape[2]] if name == "dq" else (wanted["dk"] == 0).all(-1) & (wanted["dv"] == 0).all(-1)
            assert (g[nothing] == 0).all(), f"{name}: exact zeros"
