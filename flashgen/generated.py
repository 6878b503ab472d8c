"""The kernels kept in ``generated/`` for readers: a table of Specs, their text, and what ptxas says of those for a GPU.

GOLDENS -> files. Example: ``GOLDENS["sm80_causal_forward"].source().text``. The CPU kernels are emitted for fixed chips, so the text is the same
on every machine; ``python -m flashgen generated --update`` rewrites the folder, ``--check`` compares.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from . import catalogue, families, pipeline
from .build import build_cached, compiler_version
from .families import Sizes
from .form import Form
from .plan import Plan
from .problem import Problem
from .source import Source
from .target import CHIPS, KIB, MIB, Target
from .variant import Variant, mask

DIRECTORY = Path(__file__).parent.parent / "generated"  # in a checkout; a wheel does not carry it
RESOURCES = "resources.csv"
RESOURCE_ARCHS = {"sm80": ("sm80", "sm90a"), "sm90": ("sm90a",)}  # by family, what its text is compiled for
UPDATE = "python -m flashgen generated --update"

# Two x86-64 chips to emit for: a server with AVX-512 and AMX, and a desktop with AVX2.
SERVER = Target(
    name="cpu", kind="cpu", arch="", chip="x86-64 server with AMX", sms=8, smem_block_bytes=0, smem_sm_bytes=0, registers_sm=0,
    l1_bytes=48 * KIB, l2_bytes=2 * MIB, hbm_gbs=96.0, tensor_tflops=20.0, clock_mhz=2500, tested=True, vector_bytes=64, cores=8,
    features=("amx_bf16", "amx_int8", "amx_tile", "avx", "avx2", "avx512_bf16", "avx512bw", "avx512dq", "avx512f", "avx512vl", "f16c", "fma"),
)  # fmt: skip
DESKTOP = replace(
    SERVER, chip="x86-64 desktop with AVX2", l1_bytes=32 * KIB, l2_bytes=512 * KIB, hbm_gbs=40.0, tensor_tflops=0.6, clock_mhz=3500,
    vector_bytes=32, features=("avx", "avx2", "f16c", "fma"),
)  # fmt: skip
A100, HOPPER = CHIPS["sm80"], CHIPS["sm90a"]


@dataclass(frozen=True)
class Golden:
    """One kept kernel: what is computed, for which problem, on which chip."""

    name: str
    variant: Callable[[], Variant]
    problem: Problem
    target: Target

    @property
    def file_name(self) -> str:
        return self.name + (".cu" if self.target.kind == "cuda" else ".cpp")

    @cached_property
    def form(self) -> Form:
        return self.variant().plain.form

    @cached_property
    def full_problem(self) -> Problem:
        """The problem with the gradients of all captured tensors that a score reads."""
        slots = tuple(self.variant().plain.score_slots)
        return replace(self.problem, capture_grads=slots) if self.problem.which == "backward" else self.problem

    @cached_property
    def plan(self) -> Plan:
        """The plan that a call builds: on a GPU the first of the tiler's ranking whose build does not spill, whose rank is recorded."""
        first = pipeline.choose_plan(self.form, self.full_problem, self.target, None, None)
        rank = _recorded_rank(self.name)
        return pipeline.ranked(self.form, self.full_problem, self.target, first.family)[rank].plan if rank else first

    def source(self) -> Source:
        return replace(pipeline.emit_source(self.form, self.full_problem, self.target, self.plan), name=self.name)


def _window_alibi() -> Variant:
    return Variant(mask=catalogue.causal & catalogue.sliding_window(left=1023, right=0), score=catalogue.alibi())


def _window_softcap() -> Variant:
    return Variant(mask=catalogue.causal & catalogue.sliding_window(left=4095, right=0), score=catalogue.softcap(50.0))


def _own_functions() -> Variant:
    """A user's functions: a penalty on distance that grows with the head, and a causal prefix that every row sees."""
    strength = torch.zeros(16)

    def fading(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score - strength[h] * torch.log1p(torch.abs(q_idx - kv_idx).float())

    def causal_with_prefix(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (kv_idx <= q_idx) | (kv_idx < 16)

    return Variant(mask=causal_with_prefix, score=fading)


def _causal() -> Variant:
    return Variant(mask=catalogue.causal)


def _causal_softcap() -> Variant:
    return Variant(mask=catalogue.causal, score=catalogue.softcap(30.0))


def _causal_sink() -> Variant:
    return Variant(mask=catalogue.causal, sink=True)


def _documents(*, sink: bool = False) -> Variant:
    return Variant(mask=catalogue.causal & catalogue.document(torch.zeros(2, 4096, dtype=torch.int32)), sink=sink)


def _documents_sink() -> Variant:
    return _documents(sink=True)


def _learned_table() -> Variant:
    return Variant(score=catalogue.relative_bias(torch.zeros(16, 129)))


def _first_keys_and_window() -> Variant:
    """Streaming attention: the first four keys and a window, with a hole between them."""
    first = catalogue.sliding_window(left=1023, right=0) | mask(lambda b, h, q_idx, kv_idx: kv_idx < 4)
    return Variant(mask=catalogue.causal & first)


def _blocks() -> Variant:
    return Variant(mask=catalogue.causal & catalogue.block_sparse(catalogue.butterfly(32), 128))


def _problem(dtype: str, head_dim: int, which: str = "forward", **fields: object) -> Problem:
    return Problem(dtype, head_dim, head_dim, which=which, **fields)  # type: ignore[arg-type]


GOLDENS: dict[str, Golden] = {
    golden.name: golden
    for golden in (
        Golden("cpu_causal_softcap_forward_float32", _causal_softcap, _problem("float32", 64), SERVER),
        Golden("cpu_causal_softcap_backward_float32", _causal_softcap, _problem("float32", 64, "backward"), SERVER),
        Golden("cpu_plain_forward_bfloat16_amx", Variant, _problem("bfloat16", 64), SERVER),
        Golden("cpu_causal_softcap_forward_bfloat16_amx", _causal_softcap, _problem("bfloat16", 64, bounded=True, positive_gain=True), SERVER),
        Golden("cpu_window_alibi_forward_float32_avx2", _window_alibi, _problem("float32", 64, group=4, max_scores=True), DESKTOP),
        Golden("cpu_documents_sink_forward_float16_avx2", _documents_sink, _problem("float16", 128, sink=True), DESKTOP),
        Golden("cpu_learned_table_backward_float64", _learned_table, _problem("float64", 32, "backward", dlse=True), SERVER),
        Golden("cpu_blocks_dropout_forward_float32_avx2", _blocks, _problem("float32", 64, dropout=True), DESKTOP),
        Golden("sm80_causal_forward_bfloat16", _causal, _problem("bfloat16", 128), A100),
        Golden("sm80_causal_backward_bfloat16", _causal, _problem("bfloat16", 128, "backward"), A100),
        Golden("sm80_causal_backward_deterministic_bfloat16", _causal, _problem("bfloat16", 64, "backward", deterministic=True), A100),
        Golden("sm80_window_softcap_forward_bfloat16", _window_softcap, _problem("bfloat16", 128, group=2), A100),
        Golden("sm80_own_functions_forward_float16", _own_functions, _problem("float16", 64), A100),
        Golden("sm80_own_functions_backward_float16", _own_functions, _problem("float16", 64, "backward"), A100),
        Golden("sm80_first_keys_and_window_dropout_forward_bfloat16", _first_keys_and_window, _problem("bfloat16", 64, dropout=True), A100),
        Golden("sm80_first_keys_and_window_dropout_backward_bfloat16", _first_keys_and_window, _problem("bfloat16", 64, "backward", dropout=True), A100),
        Golden("sm80_varlen_sink_forward_bfloat16", _causal_sink, _problem("bfloat16", 128, layout="varlen", sink=True), A100),
        Golden("sm90_causal_forward_bfloat16", _causal, _problem("bfloat16", 128), HOPPER),
        Golden("sm90_window_softcap_forward_bfloat16", _window_softcap, _problem("bfloat16", 128, group=2, bounded=True, positive_gain=True), HOPPER),
        Golden("sm90_own_functions_forward_float16", _own_functions, _problem("float16", 128), HOPPER),
        Golden("sm90_learned_table_forward_bfloat16", _learned_table, _problem("bfloat16", 128), HOPPER),
        Golden("sm90_documents_forward_bfloat16", _documents, _problem("bfloat16", 128), HOPPER),
        Golden("sm90_documents_backward_bfloat16", _documents, _problem("bfloat16", 128, "backward"), HOPPER),
        Golden("sm90_blocks_forward_bfloat16", _blocks, _problem("bfloat16", 128), HOPPER),
        Golden("sm90_blocks_backward_bfloat16", _blocks, _problem("bfloat16", 128, "backward"), HOPPER),
        Golden("sm90_first_keys_and_window_forward_bfloat16", _first_keys_and_window, _problem("bfloat16", 64), HOPPER),
        Golden("sm90_causal_backward_bfloat16", _causal, _problem("bfloat16", 128, "backward", group=2), HOPPER),
        Golden("sm90_causal_backward_narrow_bfloat16", _causal, _problem("bfloat16", 64, "backward"), HOPPER),
        Golden("sm90_learned_table_backward_bfloat16", _learned_table, _problem("bfloat16", 64, "backward", dlse=True, out_low=True), HOPPER),
        Golden("sm90_own_functions_backward_deterministic_float16", _own_functions, _problem("float16", 64, "backward", deterministic=True), HOPPER),
        Golden("sm90_causal_backward_deterministic_bfloat16", _causal, _problem("bfloat16", 128, "backward", deterministic=True), HOPPER),
        Golden("sm90_varlen_causal_forward_bfloat16", _causal, _problem("bfloat16", 128, group=4, layout="varlen"), HOPPER),
        Golden("sm90_varlen_causal_backward_bfloat16", _causal, _problem("bfloat16", 128, "backward", group=4, layout="varlen"), HOPPER),
        Golden(
            "sm90_varlen_dropout_backward_deterministic_bfloat16",
            Variant,
            _problem("bfloat16", 64, "backward", layout="varlen", dropout=True, deterministic=True),
            HOPPER,
        ),
        Golden("sm90_causal_dropout_forward_bfloat16", _causal, _problem("bfloat16", 128, dropout=True), HOPPER),
        Golden("sm90_window_softcap_backward_wide_bfloat16", _window_softcap, _problem("bfloat16", 256, "backward", seqlens_k=True), HOPPER),
    )
}


def gpu_goldens() -> list[Golden]:
    return [golden for golden in GOLDENS.values() if golden.target.kind == "cuda"]


def _recorded_rank(name: str) -> int:
    path = DIRECTORY / RESOURCES
    return next((int(row["rank"]) for row in read_resources() if row["kernel"] == name), 0) if path.exists() else 0


def with_clean_plan(golden: Golden) -> tuple[Golden, int]:
    """The golden with the plan that its builds end at, and that plan's rank. Needs NVRTC."""
    plan = pipeline.prepare(golden.form, golden.full_problem, golden.target, use_records=False).plan
    ranking = [c.plan for c in pipeline.ranked(golden.form, golden.full_problem, golden.target, plan.family)]
    found = replace(golden)
    found.__dict__["plan"] = plan
    return found, ranking.index(plan)


def planned_smem(golden: Golden) -> dict[str, int]:
    """Dynamic shared memory of each entry, as the tiler has it: for lengths at which each is a launch of its own."""
    sizes = Sizes(batch=16, heads=golden.problem.group, kv_heads=1, q_len=4096, kv_len=4096, total_q=4096, total_k=4096)
    return {launch.entry: launch.smem_bytes for launch in families.get(golden.plan.family).launches(golden.full_problem, golden.plan, sizes)}


def resources(golden: Golden, rank: int) -> list[dict[str, str]]:
    """A row per architecture and entry: what ptxas reports, and the shared memory that the plan asks for. Needs NVRTC, no GPU."""
    rows = []
    planned = planned_smem(golden)
    for name in RESOURCE_ARCHS[golden.plan.family]:
        _, binary = build_cached(golden.source(), CHIPS[name])
        for entry in binary.report.entries:
            row = {
                "kernel": golden.name, "entry": entry.name, "arch": CHIPS[name].arch, "registers": entry.registers,
                "spill_stores": entry.spill_stores, "spill_loads": entry.spill_loads, "stack_bytes": entry.stack_bytes,
                "static_smem_bytes": entry.smem_bytes, "planned_smem_bytes": planned[entry.name], "compiler": compiler_version(CHIPS[name]), "rank": rank,
            }  # fmt: skip
            rows.append({key: str(value) for key, value in row.items()})
    return rows


def read_resources(directory: Path = DIRECTORY) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / RESOURCES).read_text().splitlines()))


def _resources_text(clean: list[tuple[Golden, int]]) -> str:
    rows = [row for golden, rank in clean for row in resources(golden, rank)]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def update(directory: Path = DIRECTORY) -> list[str]:
    """Rewrite the folder; names of the files that changed. Needs NVRTC for the resources of the GPU kernels."""
    clean = {golden.name: with_clean_plan(golden) for golden in gpu_goldens()}
    wanted = {golden.file_name: clean.get(golden.name, (golden, 0))[0].source().text for golden in GOLDENS.values()}
    wanted[RESOURCES] = _resources_text(list(clean.values()))
    changed = []
    for path in (*directory.glob("*.cu"), *directory.glob("*.cpp")):
        if path.name not in wanted:
            path.unlink()
            changed.append(path.name)
    for name, text in wanted.items():
        path = directory / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            changed.append(name)
    return sorted(changed)


def differences(directory: Path = DIRECTORY) -> list[str]:
    """Names of kept kernels that are missing, no longer in the table, or differ from what is emitted now. Resources are the tests' business."""
    wanted = {golden.file_name: golden.source().text for golden in GOLDENS.values()}
    kept = {path.name: path.read_text() for path in (*directory.glob("*.cu"), *directory.glob("*.cpp"))}
    return sorted(name for name in wanted.keys() | kept.keys() if wanted.get(name) != kept.get(name))
