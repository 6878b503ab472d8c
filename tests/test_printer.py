"""Do the printed hooks, compiled by g++, compute what Python does: values, slopes, captured gradients, masks, ranges and tile classes?

All forms become one shared library, each in a namespace of its own, called on the same random points through its packed Params.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import cases_variants
import masks
import numpy as np
import probes
import pytest
import test_analysis
import torch
from constructs import CONSTRUCTS, MASKS

import flashgen as fg
from flashgen import abi, bounds, emit, hooks, settings, tables
from flashgen.derivative import Graph, load_slopes, score_slope
from flashgen.form import Traced
from flashgen.problem import Problem

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

FLAGS = ("-O1", "-std=c++17", "-fPIC", "-ffp-contract=off", "-Wall", "-Wno-unused", "-Wno-parentheses", "-Wno-tautological-compare", "-I",
         str(settings.templates_directory() / "include"))  # fmt: skip
PRELUDE = """#include "fg/base.h"
#include "fg/math.h"
#include "fg/interval.h"
namespace fg {
FG_FN void grad_add(float* address, float value) { *address += value; }
FG_FN void grad_add(double* address, double value) { *address += value; }
}
"""
DRIVER = """
extern "C" void points_{n}(const Params& p, int count, const int* at, const real* s, real* value, real* slope, unsigned char* seen, const real* dscore) {{
  const Lens lens{{p.q_len, p.kv_len}};
  for (int i = 0; i < count; ++i) {{
    const int b = at[4 * i], h = at[4 * i + 1], q = at[4 * i + 2], k = at[4 * i + 3];
    const Uniform u = uniform(p, lens, b, h);
    const Row r = row(p, u, q);
    const Col c = col(p, u, k);
    {score}
    {mask}
    {grads}
  }}
}}
extern "C" void tiles_{n}(const Params& p, int count, const int* at, int* out) {{
  const Lens lens{{p.q_len, p.kv_len}};
  for (int i = 0; i < count; ++i, at += 6, out += 5) {{
    const Uniform u = uniform(p, lens, at[0], at[1]);
    const fg::Range x = kv_range(p, u, at[2], at[3]), y = q_range(p, u, at[4], at[5]);
    out[0] = x.begin, out[1] = x.end, out[2] = y.begin, out[3] = y.end;
    out[4] = {tile};
  }}
}}
"""
SCORE = """real v, g;
    score_grad(p, u, r, c, s[i], q, k, v, g);
    value[i] = score(p, u, r, c, s[i], q, k), slope[i] = g;
    if (!(v == value[i] || (v != v && value[i] != value[i]))) slope[i] = fg::not_a_number<real>();"""


class Unit(NamedTuple):
    """One form with the sizes it is called with."""

    traced: Traced
    sizes: dict[str, int]
    real: torch.dtype

    @property
    def problem(self) -> Problem:
        slots = self.traced.score_slots if self.traced.form.score >= 0 else ()
        return Problem("float64" if self.real == torch.float64 else "float32", 16, 16, which="backward", capture_grads=slots)


@functools.cache
def units() -> dict[str, Unit]:
    found = {}
    for real in (torch.float32, torch.float64):
        for name, function in CONSTRUCTS.items():
            found[f"{name} {real}"] = Unit(probes.trace(score=function), probes.SIZES, real)
    for name, function in MASKS.items():
        found[f"mask {name}"] = Unit(probes.trace(mask=function), probes.SIZES, torch.float32)
    for name in cases_variants.CASES:
        run = cases_variants.instantiate(name, grad=True)
        sizes = {"b": run.shape["B"], "h": run.shape["Hq"], "q": run.shape["Lq"], "k": run.shape["Lk"]}
        found[f"case {name}"] = Unit(probes.trace(score=run.mods.score, mask=run.mods.mask), sizes, torch.float32)
    generated = {f"generated {seed}": masks.generated(seed)[1] for seed in range(30)}
    for name, mask in {**masks.EXACT, **masks.SOUND, **generated}.items():
        found[f"tiles {name}"] = Unit(probes.trace(mask=mask), {"b": 2, "h": 2, "q": 19, "k": 22}, torch.float32)
    return found


def text(n: int, unit: Unit) -> str:
    form, problem = unit.traced.form, unit.problem
    made = hooks.make(form, problem)
    context = {"params": abi.params(form, problem).fields, "hooks": made, "raw_scores": False, "varlen": False, "seqlens_k": False, "problem": problem}
    environment = emit._environment()
    parts = [environment.get_template(f"part/{name}.j2").render(context) for name in ("params", "hooks")]
    driver = DRIVER.format(
        n=n,
        score=SCORE if form.score >= 0 else "value[i] = s[i], slope[i] = 1;",
        mask="seen[i] = mask(p, u, r, c, q, k);" if form.mask >= 0 else "seen[i] = 1;",
        grads="capture_grads(p, u, r, c, s[i], q, k, dscore[i]);" if made.capture_grads else "",
        tile="tile_class(p, u, at[2], at[3], at[4], at[5])" if form.mask >= 0 else "fg::FULL",
    )  # fmt: skip
    ctype = "double" if unit.real == torch.float64 else "float"
    return f"namespace n{n} {{\nusing real = {ctype};\nusing T = {ctype};\n" + "\n".join([*parts, driver]) + "}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("hooks")
    texts = [text(n, unit) for n, unit in enumerate(units().values())]
    halves = [PRELUDE + "".join(texts[i::2]) for i in range(2)]
    running = []
    for i, half in enumerate(halves):
        (folder / f"{i}.cpp").write_text(half)
        running.append(subprocess.Popen(["g++", *FLAGS, "-c", f"{i}.cpp", "-o", f"{i}.o"], cwd=folder, stderr=subprocess.PIPE, text=True))
    logs = [process.communicate()[1] for process in running]
    assert not any(process.returncode for process in running), "\n".join(logs)[:4000]
    assert not any("warning" in log for log in logs), "\n".join(logs)[:4000]
    subprocess.run(["g++", "-shared", "0.o", "1.o", "-o", "hooks.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(Path(folder) / "hooks.so"))


def packed(unit: Unit, gradients: dict[int, np.ndarray]) -> tuple[Any, list]:
    """The bytes of Params, and what must stay alive beside them."""
    layout = abi.params(unit.traced.form, unit.problem)
    values: dict[str, Any] = {f.name: 0 for f in layout.fields}
    tensors = [t.detach() for t in probes.replayed(unit.traced)]
    for n, t in enumerate(tensors):
        values[f"capture_{n}"] = t.data_ptr()
        for d in range(t.dim()):
            values[f"capture_{n}_stride_{d}"], values[f"capture_{n}_size_{d}"] = t.stride(d), t.shape[d]
    for n, blocked in bounds.tables(unit.traced.form, unit.problem).items():
        parts = tables.block_bounds(tensors[n], blocked)
        values |= {f"{name}_{n}": t.data_ptr() for name, t in zip(("least", "most"), parts)}
        tensors += parts
    values |= {f"grad_{n}": g.ctypes.data for n, g in gradients.items()}
    values |= {f"float_{n}": x for n, x in enumerate(unit.traced.floats)} | {f"int_{n}": x for n, x in enumerate(unit.traced.ints)}
    values |= {"q_len": unit.sizes["q"], "kv_len": unit.sizes["k"], "heads": unit.sizes["h"], "batch": unit.sizes["b"]}
    return ctypes.create_string_buffer(layout.pack(values)), tensors


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("name", units())
def test_compiled_hooks_equal_python_on_random_points(name, library):
    unit = units()[name]
    traced, form, real = unit.traced, unit.traced.form, unit.real
    found = probes.points(64, 9, real, unit.sizes)
    symbols = probes.stacked(found, unit.sizes)
    at = torch.stack([symbols[n] for n in "bhqk"], 1).contiguous().numpy()
    s = symbols["s"].numpy()
    dscore = np.linspace(-1, 2, len(s), dtype=s.dtype)
    value, slope, seen = np.empty_like(s), np.empty_like(s), np.empty(len(s), np.uint8)
    captures = probes.replayed(traced)
    gradients = {n: np.zeros(tuple(captures[n].shape), s.dtype) for n in unit.problem.capture_grads}
    params, alive = packed(unit, gradients)
    run = getattr(library, f"points_{list(units()).index(name)}")
    run(params, len(s), pointer(at), pointer(s), pointer(value), pointer(slope), pointer(seen), pointer(dscore))
    assert alive is not None
    tolerance = 1e-12 if real == torch.float64 and not name.startswith("float32 functions") else 1e-4 if name.startswith("case") else 2e-5
    same = functools.partial(torch.testing.assert_close, equal_nan=True, rtol=tolerance, atol=tolerance)

    def python(extended, root):
        return probes.value(extended, root, symbols, real).detach().to(real).expand(len(s))

    if form.mask >= 0:
        assert torch.equal(torch.from_numpy(seen).bool(), python(traced, form.mask))
    if form.score < 0:
        return
    graph = Graph(form)
    root, loads = score_slope(graph), load_slopes(graph, unit.problem.capture_grads)
    extended = traced._replace(form=graph.extended())
    same(torch.from_numpy(value), python(traced, form.score))
    same(torch.from_numpy(slope), python(extended, root))
    wanted = {n: torch.zeros(tuple(captures[n].shape), dtype=real) for n in gradients}
    for load, g in loads:
        node = graph.nodes[load]
        index = [python(extended, a).long().clamp(0, size - 1) for a, size in zip(node.args, captures[node.data].shape)]
        each = python(extended, g) * torch.from_numpy(dscore)
        wanted[node.data] = wanted[node.data].index_put(tuple(index), each, accumulate=True) if index else wanted[node.data] + each.sum()
    for n, g in gradients.items():
        same(torch.from_numpy(g), wanted[n])


@pytest.mark.parametrize("name", [name for name, unit in units().items() if unit.traced.form.mask >= 0])
def test_compiled_intervals_equal_their_python_twin(name, library):
    unit = units()[name]
    tile = test_analysis.Tile(unit.traced, unit.sizes["q"], unit.sizes["k"], bounds.tables(unit.traced.form, unit.problem))
    corners = [
        (b, h, *q, *k)
        for b in range(unit.sizes["b"]) for h in range(min(2, unit.sizes["h"]))
        for q in test_analysis.tiles(unit.sizes["q"], 7)[:6] for k in test_analysis.tiles(unit.sizes["k"], 5)[:6]
    ]  # fmt: skip
    at, out = np.array(corners, np.int32), np.empty((len(corners), 5), np.int32)
    params, alive = packed(unit, {n: np.zeros(1) for n in unit.problem.capture_grads})
    getattr(library, f"tiles_{list(units()).index(name)}")(params, len(corners), pointer(at), pointer(out))
    assert alive is not None
    for (b, h, q0, q1, k0, k1), got in zip(corners, out.tolist()):
        must, may = tile.truth((q0, q1), (k0, k1), b, h)
        wanted = [*tile.range("k", (q0, q1), b, h), *tile.range("q", (k0, k1), b, h), 2 if must else 1 if may else 0]
        assert got == wanted, (b, h, (q0, q1), (k0, k1))


# ---- the text itself


def lines(score=None, mask=None, which="forward") -> hooks.Hooks:
    return hooks.make(probes.trace(score=score, mask=mask).form, Problem("float32", 64, 64, which=which))


def test_a_hook_reads_as_written_by_hand():
    made = lines(score=lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), mask=fg.causal)
    assert made.score == ["return p.float_0 * fg::tanh(s * u.u0);"]  # one reciprocal per head in place of a division per score
    assert made.mask == ["return k <= r.r0;"]
    assert made.row.lines == ["r.r0 = q + u.u1;"] and made.uniform.lines == ["u.u0 = fg::divide(1.0f, p.float_1);", "u.u1 = u.lens.kv_len - u.lens.q_len;"]


def test_masks_indices_and_float64_keep_their_divisions():
    table = torch.zeros(9)
    made = lines(score=lambda s, b, h, q, k: s + table[(q / 3.0).to(torch.int32)], mask=lambda b, h, q, k: k / 3.0 <= q / 2.0)
    assert not any("divide" in line for line in (*made.score, *made.mask, *made.row.lines, *made.col.lines, *made.uniform.lines))
    assert any(" / " in line for line in (*made.mask, *made.row.lines, *made.col.lines))


def test_stages_hoist_what_depends_on_less():
    made = lines(score=fg.alibi())
    assert made.score == ["return s - u.u0 * real(fg::int_abs(r.r0 - k));"]


def test_precedence_keeps_the_users_grouping():
    printed = {
        "s - (1.0 - s)": "s - (p.float_0 - s)", "(s - 1.0) - s": "s - p.float_0 - s", "s / (s * 2.0)": "fg::divide(s, s * p.float_0)",
        "(s + 1.0) * s": "(s + p.float_0) * s",
        "-(s + 1.0)": "-(s + p.float_0)", "s - -s": "s - -s", "-(-s)": "-(-s)",
    }  # fmt: skip
    for written, text in printed.items():
        assert lines(score=eval(f"lambda s, b, h, q, k: {written}")).score == [f"return {text};"], written


def test_divisions_by_powers_of_two_are_shifts_and_others_are_not():
    made = lines(mask=lambda b, h, q, k: (q - k) // 8 + (q - k) % 16 < (q - k) // 6)
    assert made.mask == ["const int t0 = q - k;", "return (t0 >> 3) + (t0 & 15) < fg::floordiv(t0, 6);"]


def test_extreme_constants_are_literals_a_compiler_takes():
    from flashgen.printer import real_literal

    assert real_literal(float("-inf"), "float") == "-fg::infinity<float>()" and real_literal(1e300, "float") == "fg::infinity<float>()"
    assert real_literal(float("nan"), "double") == "fg::not_a_number<double>()"
    assert real_literal(0.1, "float") == "0.1f" and real_literal(-0.0, "double") == "-0.0"


def test_coarse_tanh_is_as_exact_as_it_says(tmp_path):
    """For 16-bit inputs: the short polynomial up to NEAR_TANH, the quotient everywhere."""
    (tmp_path / "tanh.cpp").write_text("""
#define FG_COARSE 1
#include "fg/math.h"
#include <cmath>
#include <cstdio>
int main() {
  double near = 0, all = 0;
  for (float x = 1e-6f; x < 20; x *= 1.0001f) {
    const double wanted = std::tanh((double)x);
    if (x <= fg::NEAR_TANH) near = std::fmax(near, std::fabs(fg::tanh_near(-x) / -wanted - 1));
    all = std::fmax(all, std::fabs(fg::tanh(x) / wanted - 1));
  }
  std::printf("%g %g %d", near, all, std::isnan(fg::tanh_near(NAN)) && std::isnan(fg::tanh(NAN)));
}
""")
    subprocess.run(["g++", *FLAGS, "tanh.cpp", "-o", "tanh"], cwd=tmp_path, check=True)
    near, everywhere, keeps_nan = subprocess.run(["./tanh"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    assert 0 < float(near) < 1.2e-6 and 0 < float(everywhere) < 2e-6 and keeps_nan == "1"


@pytest.mark.parametrize(
    "mask, interval, beside",
    [
        (fg.causal, True, False),
        (fg.causal & fg.sliding_window(5, 0), True, False),
        (fg.causal & fg.dilated(3), True, True),  # hardly a tile is full
        (lambda b, h, q, k: (k <= q) & (k % 7 != 2) & (h > 0), True, True),
        (fg.dilated(3), False, False),  # no bounds
        (fg.causal & (lambda b, h, q, k: q != k + 3), False, False),  # most tiles are full
        (fg.causal & fg.Mask(lambda b, h, q, k: (q - k) % 3 != torch.arange(9)[q]), False, False),  # loads
    ],
)
def test_a_mask_is_an_interval_and_a_pattern_beside_it(mask, interval, beside):
    form = fg.Variant(mask=mask).trace({}).form
    made = hooks.make(form, Problem("bfloat16", 64, 64))
    assert bool(made.visible) == interval and bool(made.mask_beside) == beside
