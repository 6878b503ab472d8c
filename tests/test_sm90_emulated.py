"""Does the emitted sm90 kernel compute attention, without deadlock, when its threads run on the host?

The very text that NVRTC compiles is compiled by the host compiler against ``sm90_emulator.h`` and run on small problems: producer and consumers, rings, masks,
tails, masked NaN and the order of work are all the kernel's own. What only a GPU shows (asynchrony, registers, speed) is left to the device.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen import abi, bounds, build, emit, families, tables, target
from flashgen.analysis import analyze
from flashgen.calls import seed_tensor
from flashgen.families import Sizes, sm90
from flashgen.plan import Plan, candidates
from flashgen.problem import Problem
from flashgen.reference import reference
from flashgen.score_bounds import static_bounds

TESTS = Path(__file__).parent
INCLUDE = TESTS.parent / "templates" / "include"
HOPPER = target.parse("sm90a")
SEED = 1 << 40 | 12345
SMS = 3  # few, so that persistent blocks take several pieces
ENTRY = """
extern "C" void launch_NAME(const char* packed, int blocks, int threads) {
  Params p;
  memcpy(&p, packed, sizeof p);
  run_grid(blocks, threads, [&] { NAME(p); });
}
"""


@dataclass(frozen=True)
class Case:
    name: str
    variant: Any = field(default_factory=flashgen.Variant)
    head_dim: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (1, 1)
    lengths: tuple[int, int] = (201, 300)
    dtype: torch.dtype = torch.bfloat16
    plan: dict[str, int] = field(default_factory=dict)
    nan: bool = False  # the last value of each head is NaN in column 3
    seqlens_k: tuple[int, ...] = ()
    max_scores: bool = False
    shared_batch: bool = False  # keys and values of stride 0 over two batch items
    dropout_p: float = 0.0
    size: str = "long"


CAUSAL = flashgen.Variant(mask=flashgen.causal)
LONG_TABLE = torch.randn(2, 901, generator=torch.Generator().manual_seed(4))
FROM_END = flashgen.score(lambda s, b, h, q, k: s + 2 * LONG_TABLE[h, 500 - (q - k)])
SOME_DISTANCES = flashgen.score(lambda s, b, h, q, k: s + torch.where(q - k > 5, LONG_TABLE[h, q - k + 450], 0.0))
SOME_CLAMPED = flashgen.score(lambda s, b, h, q, k: s + torch.where((q - k).clamp(-9, 300) > 5, LONG_TABLE[h, (q - k).clamp(-9, 300) + 9], 0.0))
EVERY_SECOND = LONG_TABLE[0, ::2]
BIAS = torch.randn(300)
DOCUMENTS = torch.arange(300, dtype=torch.int32) // 70
MANY = torch.arange(2600, dtype=torch.int32) // 350 % 3  # documents that come back
LATER = flashgen.mask(lambda b, h, q, k: k >= q)
CUBIC = flashgen.score(lambda s, b, h, q, k: s + 0.2 * s * s - 0.01 * s * s * s)
FIRST_KEYS = flashgen.mask(lambda b, h, q, k: k < 4)
FEW_BLOCKS = torch.rand(2, 5, 55, generator=torch.Generator().manual_seed(2)) < 0.1  # of 48: no tile is made of whole ones
FEW_BLOCKS[0, 1:3] = False  # rows that see nothing
DENSE = FEW_BLOCKS.repeat_interleave(47, 1).repeat_interleave(47, 2)
SINK_AND_WINDOW = flashgen.sliding_window(left=100, right=0) | FIRST_KEYS
PREFIX_AND_WINDOW = flashgen.sliding_window(left=60, right=0) | flashgen.mask(lambda b, h, q, k: k < 1400)
WINDOW_OF_91 = flashgen.Variant(mask=flashgen.causal & flashgen.sliding_window(left=90, right=0))
EVERY_SEVENTH = flashgen.Variant(mask=flashgen.causal & (lambda b, h, q, k: (k % 7 != 2) & (k > 0)))
CASES = (
    Case("full"),
    Case("full, grouped heads", heads=(4, 2)),
    Case("causal", CAUSAL, lengths=(401, 401)),
    Case("causal, float16, 128", CAUSAL, (128, 128), lengths=(300, 431), dtype=torch.float16),
    Case("long full, 128", head_dim=(128, 128), lengths=(130, 300)),
    Case("causal, 256", CAUSAL, (256, 256), lengths=(140, 200)),
    Case("causal, more rows than keys", CAUSAL, (128, 128), lengths=(300, 100)),
    Case("window", flashgen.Variant(mask=flashgen.causal & flashgen.sliding_window(left=70, right=0)), lengths=(401, 401)),
    Case("documents", flashgen.Variant(mask=flashgen.causal & flashgen.document(DOCUMENTS)), lengths=(300, 300)),
    Case("causal, many tiles", CAUSAL, (16, 16), lengths=(130, 2600)),
    Case("window, many tiles", flashgen.Variant(mask=flashgen.causal & flashgen.sliding_window(left=300, right=0)), (16, 16), lengths=(200, 2600)),
    Case("window, 128", WINDOW_OF_91, (128, 128), lengths=(300, 700)),
    Case("documents, many tiles", flashgen.Variant(mask=flashgen.document(DOCUMENTS[:200], MANY)), (16, 16), lengths=(200, 2600)),
    Case("documents, 128", flashgen.Variant(mask=flashgen.causal & flashgen.document(DOCUMENTS[:200], MANY)), (128, 128), lengths=(200, 1100)),
    Case("causal, 128, many tiles", CAUSAL, (128, 128), lengths=(700, 1100)),
    Case("sink and window", flashgen.Variant(mask=flashgen.causal & SINK_AND_WINDOW), (16, 16), lengths=(500, 3000)),
    Case("prefix and window", flashgen.Variant(mask=PREFIX_AND_WINDOW), (16, 16), lengths=(200, 3000)),
    Case("few blocks", flashgen.Variant(mask=flashgen.block_sparse(FEW_BLOCKS, 48)), (16, 16), (2, 1), lengths=(240, 2600)),
    Case("few blocks, 128", flashgen.Variant(mask=flashgen.block_sparse(FEW_BLOCKS, 48)), (128, 128), (2, 2), lengths=(230, 2630), nan=True),
    Case("blocks and first keys", flashgen.Variant(mask=flashgen.block_sparse(FEW_BLOCKS[:1], 48) | FIRST_KEYS), (16, 16), lengths=(240, 2600)),
    Case("documents, sink and window", flashgen.Variant(mask=flashgen.document(DOCUMENTS[:200], MANY) & SINK_AND_WINDOW), (16, 16), lengths=(200, 2600)),
    Case("dense", flashgen.Variant(mask=flashgen.from_dense(DENSE)), (16, 16), (2, 1), lengths=(235, 2585)),
    Case("causal, 128, short", CAUSAL, (128, 128), (2, 1), lengths=(300, 400), size="short"),
    Case("causal, 256, short", CAUSAL, (256, 256), lengths=(140, 300), size="short"),
    Case("no mask, 256, short", flashgen.Variant(), (256, 256), lengths=(140, 200), size="short"),
    Case("window, 256, short", WINDOW_OF_91, (256, 256), lengths=(200, 300), size="short"),
    Case("causal, 192", CAUSAL, (192, 192), lengths=(300, 400)),
    Case("every seventh key but the first, lengths in use", EVERY_SEVENTH, (128, 128), seqlens_k=(277,), lengths=(300, 300), nan=True),
    Case("every fourth key, 128", flashgen.Variant(mask=flashgen.causal & flashgen.dilated(4)), (128, 128), lengths=(300, 700), nan=True),
    Case("every fourth key, in bits", flashgen.Variant(mask=flashgen.causal & flashgen.dilated(4)), (128, 128), lengths=(150, 300), plan={"mask_bits": 1}),
    Case("every third key", flashgen.Variant(mask=flashgen.dilated(3)), lengths=(150, 200)),
    Case("soft-cap", flashgen.Variant(score=flashgen.softcap(2.0)), (128, 128), max_scores=True),
    Case("soft-cap, float16", flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(2.0)), dtype=torch.float16),
    Case("soft-cap, no maximum", flashgen.Variant(mask=flashgen.causal, score=flashgen.softcap(2.0)), lengths=(201, 201), nan=True),
    Case("soft-cap of a negative cap", flashgen.Variant(score=lambda s, b, h, q, k: -3.0 * torch.tanh(s)), lengths=(70, 130)),
    Case("ALiBi", flashgen.Variant(score=flashgen.alibi()), heads=(2, 2)),
    Case("table of distances", flashgen.Variant(mask=flashgen.causal, score=flashgen.relative_bias(torch.randn(2, 129))), heads=(2, 2)),
    Case("long table of distances", flashgen.Variant(mask=flashgen.causal, score=flashgen.relative_bias(LONG_TABLE)), heads=(2, 2), lengths=(300, 300)),
    Case("long table of distances, from its end", flashgen.Variant(score=FROM_END), heads=(2, 2), lengths=(300, 200)),
    Case("every second entry of a table", flashgen.Variant(score=lambda s, b, h, q, k: s + EVERY_SECOND[q - k + 300]), lengths=(130, 200)),
    Case("table of some distances", flashgen.Variant(score=SOME_DISTANCES), heads=(2, 2), lengths=(130, 200)),
    Case("table of clamped distances, some of them", flashgen.Variant(score=SOME_CLAMPED), heads=(2, 2), lengths=(130, 200)),
    Case("bias by key", flashgen.Variant(score=lambda s, b, h, q, k: s + BIAS[k])),
    Case("bias by key and distance", flashgen.Variant(score=lambda s, b, h, q, k: s + BIAS[k] - 0.1 * torch.abs(q - k))),
    Case("ALiBi, causal", flashgen.Variant(mask=flashgen.causal, score=flashgen.alibi()), (128, 128), (2, 2), lengths=(201, 300)),
    Case("ALiBi of later keys", flashgen.Variant(mask=LATER, score=flashgen.alibi()), heads=(2, 2), lengths=(201, 201)),
    Case("cubic, causal, growing", flashgen.Variant(mask=flashgen.causal, score=CUBIC, scale=2.0), (128, 128), lengths=(300, 300)),
    Case("cubic, masked NaN", flashgen.Variant(mask=flashgen.causal, score=CUBIC), lengths=(201, 201), nan=True),
    Case("cubic, sink and window", flashgen.Variant(mask=flashgen.causal & SINK_AND_WINDOW, score=CUBIC), (16, 16), lengths=(500, 3000)),
    Case(
        "cubic, few blocks, float16", flashgen.Variant(mask=flashgen.block_sparse(FEW_BLOCKS, 48), score=CUBIC), (16, 16), (2, 1), lengths=(240, 2600),
        dtype=torch.float16,
    ),
    Case("cubic, largest scores", flashgen.Variant(mask=flashgen.causal, score=CUBIC), lengths=(201, 201), max_scores=True),
    Case("quadratic", flashgen.Variant(score=lambda s, b, h, q, k: s + 0.1 * s * s)),
    Case("negative scale", flashgen.Variant(mask=flashgen.causal, scale=-0.1), max_scores=True),
    Case("masked NaN, stored by TMA", CAUSAL, nan=True, lengths=(201, 201)),
    Case("masked NaN, stored from registers", CAUSAL, plan={"store_registers": 1}, nan=True, lengths=(201, 201)),
    Case("lengths in use", head_dim=(128, 128), seqlens_k=(77,), nan=True),
    Case("one value, one key", lengths=(1, 1)),
    Case("no key", CAUSAL, lengths=(5, 0)),
    Case("head dims 96 and 80", CAUSAL, (96, 80)),
    Case("head dims 192 and 128", CAUSAL, (192, 128)),
    Case("head dims 40 and 16", head_dim=(40, 16)),
    Case("shared batch", CAUSAL, shared_batch=True),
    Case("dropout, grouped heads", CAUSAL, (128, 128), heads=(4, 2), lengths=(150, 300), dropout_p=0.3),
    Case("dropout, masked NaN, a tile of 144 keys", CAUSAL, plan={"block_kv": 144}, lengths=(201, 201), nan=True, dropout_p=0.3),
    Case("dropout of a bounded score", flashgen.Variant(score=flashgen.softcap(2.0)), dtype=torch.bfloat16, shared_batch=True, dropout_p=0.7),
    Case("one warpgroup, one stage", CAUSAL, plan={"consumers": 1, "block_kv": 32, "stages": 1, "q_stages": 1, "schedule": sm90.STATIC}),
    Case("three stages", CAUSAL, plan={"stages": 3}, lengths=(401, 401)),
    Case("staggered", CAUSAL, (128, 128), plan={"stagger": 1}, lengths=(300, 300)),
)


def built(case: Case, form: Any, problem: Problem, folder: Path) -> tuple[ctypes.CDLL, Plan]:
    first = next(c.plan for c in candidates(analyze(form), problem, HOPPER, "sm90") if not c.rejected)
    fields = {**first.as_dict(), **case.plan, "sms": SMS}
    if "consumers" in case.plan:
        del fields["consumer_registers"], fields["producer_registers"]
    plan = Plan("sm90", "forward", tuple(sorted(sm90.derive(fields).items())))
    text = emit.emit(emit.Spec(form, problem, plan, HOPPER)).text
    text = text[: text.index("// d (64 x")] + text[text.index("struct Params") :]  # without the wgmma wrappers
    text = text.replace('#include "fg/math.cuh"', '#include "fg/math.h"\n#include "sm90_emulator.h"').replace('#include "fg/sm90/ptx.cuh"', "")
    text = text.replace("extern __shared__ __align__(1024) char smem_bytes[];", "")
    compiled(text, folder)
    return ctypes.CDLL(str(folder / "kernel.so")), plan


def compiled(text: str, folder: Path) -> None:
    """The host's library of a kernel's text, with a launcher for each of its kernels."""
    launchers = "".join(ENTRY.replace("NAME", name) for name in re.findall(r"(\w+)\(const __grid_constant__ Params", text))
    (folder / "kernel.cpp").write_text(text + 'extern "C" int params_bytes() { return sizeof(Params); }\n' + launchers)
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{INCLUDE}", f"-I{TESTS}"]
    subprocess.run([*build.host_compiler(), *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True, capture_output=True)


def tensor_map(record: families.TensorMap, t: torch.Tensor) -> bytes:
    """The emulator's own: base, counts, strides in bytes, box."""
    counts = [record.columns, t.shape[2], *(t.shape[d] if t.stride(d) else 1 for d in (1, 0)), 1]
    strides = [2 * t.stride(d) for d in (2, 1, 0)] + [0]
    if record.packed:  # as in flashgen.tensor_map
        counts[1], counts[3:], strides[2:] = 2**30, [2**31, 2**31], [strides[0], 2**34 - strides[0]]
    return struct.pack("<Q5q4Qii", t.data_ptr(), *counts, *strides, record.box_columns, record.box_rows).ljust(128, b"\0")


def dropout_values(p: float, seed: torch.Tensor) -> dict[str, Any]:
    """What Params holds of dropout, as flashgen.calls packs it."""
    return {"seed": seed.data_ptr(), "keep_scale": 1 / (1 - p), "drop_most": max(math.ceil(p * 2.0**32) - 1, 0)}


def packed_values(offsets: tuple[torch.Tensor, torch.Tensor], sizes: Sizes, values: dict[str, Any]) -> dict[str, Any]:
    """What Params holds of packed sequences: their offsets and rows; a batch stride is 0."""
    found = {"cu_seqlens_q": offsets[0].data_ptr(), "cu_seqlens_k": offsets[1].data_ptr(), "total_q": sizes.total_q, "total_k": sizes.total_k}
    return found | {name: 0 for name in values if name.endswith("_stride_b")}


def emulate(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, folder: Path, offsets: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and max_scores. offsets: of packed sequences, whose rows are then those of one batch item."""
    traced = case.variant.trace({})
    form, scale = traced.form, q.shape[-1] ** -0.5 if case.variant.scale is None else case.variant.scale
    problem = Problem(
        str(q.dtype)[6:], q.shape[-1], v.shape[-1], group=q.shape[1] // k.shape[1], scale_sign=(scale > 0) - (scale < 0), seqlens_k=bool(case.seqlens_k),
        max_scores=case.max_scores, dropout=case.dropout_p > 0, layout="varlen" if offsets else "dense", size=case.size,
        **static_bounds(form, traced.floats, scale),
    )  # fmt: skip
    library, plan = built(case, form, problem, folder)
    sizes = Sizes(len(offsets[0]) - 1 if offsets else q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[2], k.shape[2])
    out = torch.full((*q.shape[:3], v.shape[-1]), math.nan, dtype=q.dtype)
    lse, top = (torch.full(q.shape[:3], math.nan) for _ in range(2))
    counter, lengths = torch.zeros(2, dtype=torch.int32), torch.tensor(case.seqlens_k, dtype=torch.int32)
    values: dict[str, Any] = {
        "batch": sizes.batch, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "q_len": sizes.q_len, "kv_len": sizes.kv_len, "scale": scale,
        "lse": lse.data_ptr(), "max_scores": top.data_ptr(), "lse_stride_b": lse.stride(0), "lse_stride_h": lse.stride(1), "counter": counter.data_ptr(),
        "seqlens_k": lengths.data_ptr(), **sm90.numbers(problem, plan, sizes),
    }  # fmt: skip
    held = {w.field: torch.zeros(w.elements, dtype=getattr(torch, w.dtype)) for w in sm90.workspaces(problem, plan, sizes) if not w.zeroed}
    values |= {name: t.data_ptr() for name, t in held.items()}
    tensors = {"q": q, "k": k, "v": v, "out": out}
    for name, t in tensors.items():
        values |= {name: t.data_ptr(), f"{name}_stride_b": t.stride(0), f"{name}_stride_h": t.stride(1), f"{name}_stride_l": t.stride(2)}
    values |= {m.field: tensor_map(m, tensors[m.tensor]) for m in sm90.tensor_maps(problem, plan)}
    values |= {f"float_{n}": x for n, x in enumerate(traced.floats)} | {f"int_{n}": x for n, x in enumerate(traced.ints)}
    for n, c in enumerate(traced.captures):
        values[f"capture_{n}"] = c.tensor.data_ptr()
        for d in range(c.tensor.dim()):
            values |= {f"capture_{n}_stride_{d}": c.tensor.stride(d), f"capture_{n}_size_{d}": c.tensor.shape[d]}
    made = {n: tables.block_bounds(traced.captures[n].tensor, blocked) for n, blocked in bounds.tables(form, problem).items()}
    for n, (least, most) in made.items():
        values |= {f"least_{n}": least.data_ptr(), f"most_{n}": most.data_ptr()}
    seed = seed_tensor(SEED, torch.device("cpu"))
    values |= dropout_values(case.dropout_p, seed)
    if offsets:
        values |= packed_values(offsets, sizes, values)
    packed = abi.params(form, problem, tuple(sm90.params(problem, plan))).pack(values)
    assert len(packed) == library.params_bytes()
    for launch in sm90.launches(problem, plan, sizes):
        getattr(library, f"launch_{launch.entry}")(packed, launch.grid[0], launch.threads)
    assert counter.tolist() == [0, 0], "the counter is left as it was found"
    return out, lse, top


@pytest.mark.parametrize(
    ("score", "found"),
    [
        (flashgen.relative_bias(LONG_TABLE), True),
        (FROM_END, True),
        (SOME_DISTANCES, False),
        (SOME_CLAMPED, False),
        (flashgen.score(lambda s, b, h, q, k: s + LONG_TABLE[h, 2 * (q - k) + 450]), False),
        (flashgen.score(lambda s, b, h, q, k: s + LONG_TABLE[h, (q - k).abs()]), False),
    ],
)
def test_entries_by_distance_are_read_side_by_side(score, found):
    q = torch.empty(1, 2, 300, 64, dtype=torch.bfloat16)
    assert ("gap_entries" in flashgen.compile(flashgen.Variant(score=score), target="sm90a").source(q, q, q)) is found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_emitted_kernel_computes_attention(case, tmp_path):
    generator = torch.Generator().manual_seed(1)
    make = lambda heads, length, dim: torch.randn(1, heads, length, dim, generator=generator).to(case.dtype)  # noqa: E731
    (heads, kv_heads), (q_len, kv_len), (dim_qk, dim_v) = case.heads, case.lengths, case.head_dim
    q, k, v = make(heads, q_len, dim_qk), make(kv_heads, kv_len, dim_qk), make(kv_heads, kv_len, dim_v)
    if case.shared_batch:
        q, k, v = torch.cat((q, q.flip(2))), k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)
    lengths = {"seqlens_k": torch.tensor(case.seqlens_k, dtype=torch.int32)} if case.seqlens_k else {}
    lengths |= {"dropout_p": case.dropout_p, "seed": SEED} if case.dropout_p else {}
    wanted, wanted_lse, wanted_top = reference(case.variant, q.double(), k.double(), v.double(), **lengths)
    if case.nan:
        v = v.clone()
        v[:, :, -1, 3] = math.nan
        sees = reference(case.variant, q.double(), k.double(), torch.isnan(v).double(), **{**lengths, "dropout_p": 0.0})[0] > 0  # also a dropped one
        wanted = torch.where(sees, math.nan, wanted)
    out, lse, top = emulate(case, q, k, v, tmp_path)
    known, rounding = ~torch.isnan(wanted), 2**-8 if case.dtype == torch.bfloat16 else 2**-11
    assert torch.equal(torch.isnan(out), torch.isnan(wanted))
    assert (out.double() - wanted)[known].norm() <= rounding * wanted[known].norm()
    seen = wanted_lse > -math.inf
    assert (lse[~seen] == -math.inf).all() and torch.allclose(lse[seen].double(), wanted_lse[seen], atol=1e-4)
    if case.max_scores:
        assert torch.allclose(top.double(), wanted_top, atol=1e-4)
