"""Does the AMX forward compute attention where tile registers are arrays in memory?

The emitted kernel for a processor with AMX is built with ``FG_AMX_EMULATE`` and run on small problems of several tiles: the order of scores, exponentials and
products, references that rise inside a tile, tails, masked NaN and both evaluations of a soft-cap are the kernel's own. Vectors are real: AVX-512 is needed.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import abi, build, emit, families, target
from flashgen.analysis import analyze
from flashgen.families import cpu
from flashgen.generated import SERVER
from flashgen.plan import candidates
from flashgen.problem import Problem
from flashgen.reference import reference
from flashgen.score_bounds import static_bounds

pytestmark = pytest.mark.skipif("avx512dq" not in target.detect_cpu().features, reason="needs a processor with AVX-512")


@dataclass(frozen=True)
class Case:
    name: str
    mask: Any = None
    score: Any = None
    head_dim: tuple[int, int] = (64, 64)
    heads: int = 1
    length: int = 203
    block_kv: int = 64
    largest: float = 1.0  # what queries are multiplied by
    max_scores: bool = False
    nan: str = ""  # "values": the last value of each head is NaN in column 3; "keys": key 7 is NaN
    dropout_p: float = 0.0


def rising(s, b, h, q, k):
    """Scores whose maximum moves on with every few keys."""
    return s + 0.5 * k


def even_keys(s, b, h, q, k):
    return torch.where(k % 2 == 0, s, -math.inf)


def quadratic(s, b, h, q, k):
    return s + 0.1 * s * s


CAPPED = fg.softcap(30.0)
CASES = (
    Case("full"),
    Case("causal, 128", fg.causal, head_dim=(128, 128), block_kv=128),
    Case("head dims 96 and 80", fg.causal, head_dim=(96, 80)),
    Case("head dims 40 and 160", head_dim=(40, 160), block_kv=128, max_scores=True),
    Case("window", fg.sliding_window(left=40, right=3), length=401),
    Case("masked NaN", fg.causal, nan="values"),
    Case("rising", score=rising, block_kv=128),
    Case("rising, masked NaN", fg.causal, rising, block_kv=128, nan="values"),
    Case("rising, dropout", fg.causal, rising, block_kv=128, dropout_p=0.3),
    Case("soft-cap", fg.causal, CAPPED),
    Case("soft-cap, 128", fg.causal, CAPPED, head_dim=(128, 128), block_kv=128),
    Case("soft-cap, some scores at the cap", fg.causal, CAPPED, largest=12.0),
    Case("soft-cap, most scores at the cap", score=fg.softcap(2.0), largest=12.0),
    Case("soft-cap with its maximum", fg.causal, CAPPED, largest=4.0, max_scores=True),
    Case("soft-cap of a negative cap", score=lambda s, b, h, q, k: -3.0 * torch.tanh(s)),
    Case("soft-cap after ALiBi", score=fg.alibi() >> CAPPED, heads=2),
    Case("soft-cap, masked NaN", fg.causal, CAPPED, nan="values"),
    Case("soft-cap, NaN in a key", fg.causal, CAPPED, nan="keys"),
    Case("soft-cap, dropout", fg.causal, CAPPED, dropout_p=0.3),
    Case("ALiBi", fg.causal, fg.alibi(), heads=2, max_scores=True),
    Case("table of distances", fg.causal, fg.relative_bias(torch.linspace(-1, 1, 2 * 129).reshape(2, 129)), heads=2),
    Case("quadratic", fg.causal, quadratic),
    Case("even keys", fg.causal, even_keys, nan="values"),
)


def emulate(case: Case, variant: fg.Variant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, folder: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    traced, scale = variant.trace({}), q.shape[-1] ** -0.5
    proved = static_bounds(traced.form, traced.floats, scale)
    problem = Problem("bfloat16", *case.head_dim, max_scores=case.max_scores, dropout=case.dropout_p > 0, **proved)
    ranking = candidates(analyze(traced.form), problem, SERVER, "cpu", {"amx": 1, "block_kv": case.block_kv})
    source = emit.emit(emit.Spec(traced.form, problem, ranking[0].plan, SERVER))
    (folder / "kernel.so").write_bytes(build.build(source, SERVER, flags=("-DFG_AMX_EMULATE", "-O1")).data)
    out = torch.full((*q.shape[:3], v.shape[-1]), math.nan, dtype=q.dtype)
    lse, top = (torch.full(q.shape[:3], math.nan) for _ in range(2))
    seed = torch.tensor([5])
    values: dict[str, Any] = {
        "batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "q_len": q.shape[2], "kv_len": k.shape[2], "scale": scale, "lse": lse.data_ptr(),
        "max_scores": top.data_ptr(), "lse_stride_b": lse.stride(0), "lse_stride_h": lse.stride(1), "seed": seed.data_ptr(),
        "keep_scale": 1 / (1 - case.dropout_p), "drop_most": max(0, math.ceil(case.dropout_p * 2**32) - 1),
    }  # fmt: skip
    for name, t in {"q": q, "k": k, "v": v, "out": out}.items():
        values |= {name: t.data_ptr(), f"{name}_stride_b": t.stride(0), f"{name}_stride_h": t.stride(1), f"{name}_stride_l": t.stride(2)}
    values |= {f"float_{n}": x for n, x in enumerate(traced.floats)} | {f"int_{n}": x for n, x in enumerate(traced.ints)}
    for n, capture in enumerate(traced.captures):
        values[f"capture_{n}"] = capture.tensor.data_ptr()
        for d in range(capture.tensor.dim()):
            values |= {f"capture_{n}_stride_{d}": capture.tensor.stride(d), f"capture_{n}_size_{d}": capture.tensor.shape[d]}
    packed = abi.params(traced.form, problem, (), families.get("cpu").grad_type(problem)).pack(values)
    assert ctypes.CDLL(str(folder / "kernel.so")).fg_forward(packed, 1) == 0
    return out, lse, top


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_emitted_kernel_computes_attention(case, tmp_path):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, case.heads, case.length, dim, generator=generator).bfloat16() for dim in (case.head_dim[0], *case.head_dim))
    q *= case.largest
    variant = fg.Variant(mask=case.mask, score=case.score)
    if case.nan == "keys":
        k[:, :, 7] = math.nan
    if case.dropout_p:  # the rule for it is the same in float32, on vectors
        wanted, aux = fg.compile(variant)(q.float(), k.float(), v.float(), dropout_p=case.dropout_p, seed=5, return_aux=True)
        wanted_lse, wanted_top = aux.lse, aux.max_scores
    else:
        wanted, wanted_lse, wanted_top = reference(variant, q.double(), k.double(), v.double())
    if case.nan == "values":
        v[:, :, -1, 3] = math.nan
        sees = reference(variant, q.double(), k.double(), torch.isnan(v).double())[0] > 0
        wanted = torch.where(sees, math.nan, wanted)
    out, lse, top = emulate(case, variant, q, k, v, tmp_path)
    known = ~torch.isnan(wanted)
    assert torch.equal(torch.isnan(out), torch.isnan(wanted))
    assert (out - wanted)[known].norm() <= 2**-8 * wanted[known].norm()
    assert torch.allclose(lse.double(), wanted_lse.double(), atol=3e-4, equal_nan=True)
    if case.max_scores:
        assert torch.allclose(top.double(), wanted_top.double(), atol=2e-4)


def test_a_score_without_a_tanh_of_q_k_has_no_short_form():
    form = fg.Variant(score=fg.alibi() >> CAPPED).trace({}).form
    plan = candidates(analyze(form), Problem("bfloat16", 64, 64), SERVER, "cpu", {"amx": 1})[0].plan
    assert "score_near" not in emit.emit(emit.Spec(form, Problem("bfloat16", 64, 64), plan, SERVER)).text
    assert cpu.FAMILY.raw_scores(Problem("bfloat16", 64, 64), plan)
