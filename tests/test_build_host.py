"""Do the compilers take a Source on any machine: NVRTC for every architecture without a GPU, and the host's C++ compiler?"""

from __future__ import annotations

import ctypes
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from flashgen import build as building
from flashgen.build import build, build_cached, parse_log, store_key
from flashgen.cache import Cache
from flashgen.errors import CompileError
from flashgen.source import Source
from flashgen.target import CHIPS, parse

HEADER = ("fg/two.h", "#pragma once\nconstexpr float TWO = 2.0f;\n")
CUDA = Source(
    """#include "fg/two.h"
extern "C" __global__ void scale(float* values, float factor) {
    __shared__ float staged[128];
    staged[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = staged[127 - threadIdx.x] * factor * TWO;
}
""",
    "cuda",
    (HEADER,),
    ("scale",),
)
HOST = Source(
    """#include <cmath>
#include "fg/two.h"
extern "C" void scale(float* values, int count) {
#pragma omp parallel for
    for (int index = 0; index < count; ++index) values[index] = std::isnan(values[index]) ? -1.0f : values[index] * TWO;
}
""",
    "c++",
    (HEADER,),
    ("scale",),
)
CPU = parse("cpu")

has_host_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


@pytest.fixture
def nvrtc():
    return pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")


def run_host(binary, tmp_path, values):
    path = tmp_path / "kernel.so"
    path.write_bytes(binary.data)
    array = (ctypes.c_float * len(values))(*values)
    ctypes.CDLL(str(path)).scale(array, len(values))
    return list(array)


# ---- CUDA


def test_every_architecture_builds_without_a_gpu_from_threads(nvrtc):
    with ThreadPoolExecutor(4) as pool:
        binaries = dict(zip(CHIPS, pool.map(lambda chip: build(CUDA, chip), CHIPS.values()), strict=True))
    for binary in binaries.values():
        entry = binary.report.entry("scale")
        assert binary.kind == "cubin" and binary.data[:4] == b"\x7fELF"
        assert 0 < entry.registers < 64 and entry.smem_bytes == 512 and entry.barriers == 1
        assert binary.report.faults == () and binary.report.compile_seconds > 0
    assert len({binary.digest for binary in binaries.values()}) == len(CHIPS)


def test_sm90a_has_the_instructions_that_plain_sm90_lacks(nvrtc):
    text = 'extern "C" __global__ void __launch_bounds__(384, 1) trim() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }'
    assert build(Source(text, "cuda", entries=("trim",)), parse("sm90a")).report.faults == ()
    with pytest.raises(CompileError, match="setmaxnreg"):
        build(Source(text, "cuda", entries=("trim",)), replace(parse("sm90a"), arch="sm_90"))


def test_spills_and_stack_are_reported(nvrtc):
    text = """extern "C" __global__ void wander(float* x, int n) {
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = x[i];
    for (int i = 0; i < n; ++i) a[(int)x[i] & 63] += 1;
    for (int i = 0; i < 64; ++i) x[i] = a[i];
}"""
    report = build(Source(text, "cuda", entries=("wander",)), parse("sm90a")).report
    assert report.entry("wander").stack_bytes == 256
    assert report.faults == ("wander: 0 bytes spill stores, 0 bytes spill loads, 256 bytes stack",)


def test_the_log_of_a_troubled_kernel_is_understood():
    log = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirement.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
ptxas         .     48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 48 bytes cumulative stack size, 16 bytes smem
ptxas info    : Compiling entry function 'combine' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
    report = parse_log(log)
    assert [entry.name for entry in report.entries] == ["combine", "forward"]
    forward = report.entry("forward")
    assert (forward.registers, forward.spill_stores, forward.spill_loads, forward.stack_bytes, forward.smem_bytes, forward.barriers) == (168, 40, 44, 48, 16, 3)
    assert report.serialized and report.setmaxnreg_ignored
    assert len(report.faults) == 3


def test_a_cuda_diagnostic_shows_the_numbered_lines_of_the_file_it_names(nvrtc):
    with pytest.raises(CompileError) as caught:
        build(replace(CUDA, text=CUDA.text.replace("factor * TWO", "factor * THREE"), name="forward"), parse("sm80"))
    assert "forward.cu, line 6:" in str(caught.value) and "->     6 |     values[threadIdx.x] = staged" in str(caught.value) and "THREE" in caught.value.log
    with pytest.raises(CompileError) as caught:
        build(replace(CUDA, headers=((HEADER[0], "// first\nconstexpr float TWO = ;\n"),)), parse("sm80"))
    assert "fg/two.h, line 2:" in str(caught.value) and "->     2 | constexpr float TWO = ;" in str(caught.value)
    with pytest.raises(CompileError, match=r"kernel\.cu, line 1"):
        build(replace(CUDA, headers=()), parse("sm80"))


def test_without_cupy_the_error_names_the_extra(monkeypatch):
    for name in [module for module in sys.modules if module.split(".")[0] == "cupy_backends"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    with pytest.raises(CompileError, match=r"needs CuPy.*pip install 'flashgen\[cuda13\]'"):
        build(CUDA, parse("sm90a"))


def test_without_libnvrtc_the_error_names_the_extra(nvrtc, monkeypatch):
    class Missing:
        @staticmethod
        def getVersion():
            raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    import cupy_backends.cuda.libs as libs

    monkeypatch.setattr(libs, "nvrtc", Missing)
    with pytest.raises(CompileError, match=r"needs the NVRTC library.*cannot open.*pip install 'flashgen\[cuda13\]'"):
        build(CUDA, parse("sm90a"))


def test_the_version_in_the_key_is_that_of_the_library(nvrtc):
    assert building.compiler_version(parse("sm80")) == "nvrtc {}.{}".format(*nvrtc.getVersion())


# ---- host


@has_host_compiler
def test_the_host_compiler_builds_a_loadable_library_that_respects_nan(tmp_path):
    binary = build(HOST, CPU)
    assert binary.kind == "so" and binary.report.entries == () and binary.report.faults == ()
    assert run_host(binary, tmp_path, [1.0, float("nan"), float("inf"), -3.0]) == [2.0, -1.0, float("inf"), -6.0]


@has_host_compiler
def test_a_host_diagnostic_shows_the_numbered_lines_of_the_file_it_names():
    with pytest.raises(CompileError) as caught:
        build(replace(HOST, text=HOST.text.replace("* TWO", "* THREE")), CPU)
    assert "kernel.cpp, line 5:" in str(caught.value) and "->     5 |" in str(caught.value) and "THREE" in caught.value.log
    with pytest.raises(CompileError, match=r"(?s)fg/two\.h, line 1:.*->     1 \| float TWO = unknown;"):
        build(replace(HOST, headers=((HEADER[0], "float TWO = unknown;\n"),)), CPU)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"neither g\+\+ nor clang\+\+ is on PATH.*apt-get install g\+\+"):
        build(HOST, CPU)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(CompileError, match=r"CXX='/nowhere/c\+\+' is not an executable"):
        build(HOST, CPU)


def wrapper(tmp_path, script):
    path = tmp_path / "wrapper"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@has_host_compiler
def test_a_compiler_without_openmp_still_builds(monkeypatch, tmp_path):
    real = building.host_compiler()[0]
    log = tmp_path / "calls"
    monkeypatch.setenv("CXX", wrapper(tmp_path, f'echo "$@" >> {log}\ncase "$*" in *-fopenmp*) echo "error: no -fopenmp" >&2; exit 1;; esac\nexec {real} "$@"'))
    assert run_host(build(HOST, CPU), tmp_path, [4.0]) == [8.0]
    first = len(log.read_text().splitlines())
    build(HOST, CPU)
    assert len(log.read_text().splitlines()) == first + 2  # what the compiler lacks is asked once


@has_host_compiler
def test_cxx_may_hold_several_words(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", f"{building.host_compiler()[0]} -DUNUSED=1")
    assert run_host(build(HOST, CPU), tmp_path, [1.0]) == [2.0]


# ---- keys, dump, override


@has_host_compiler
def test_the_store_key_follows_everything_that_decides_the_binary(nvrtc, monkeypatch, tmp_path):
    keys = [store_key(CUDA, chip) for chip in CHIPS.values()]
    keys += [store_key(HOST, CPU), store_key(HOST, replace(CPU, features=CPU.features[1:])), store_key(HOST, CPU, flags=("-O1",))]
    keys += [store_key(replace(HOST, text=HOST.text + " "), CPU), store_key(replace(HOST, headers=((HEADER[0], HEADER[1] + "\n"),)), CPU)]
    monkeypatch.setenv("CXX", wrapper(tmp_path, f'exec {building.host_compiler()[0]} "$@"'))
    keys.append(store_key(HOST, CPU))
    monkeypatch.setattr(building, "_nvrtc_version", lambda: "nvrtc 1.0")
    keys.append(store_key(CUDA, parse("sm80")))
    assert len(set(keys)) == len(keys)
    assert store_key(replace(CUDA, name="other"), parse("sm80")) == keys[-1]  # the name is for people


@has_host_compiler
def test_dump_writes_every_artefact_and_override_uses_an_edited_source(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FLASHGEN_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("FLASHGEN_DEBUG", "4")
    key, _ = build_cached(HOST, CPU, store=Cache(tmp_path / "cache"))
    assert (tmp_path / "dump" / "kernel.cpp").read_text() == HOST.text
    assert {path.name for path in (tmp_path / "dump").iterdir()} == {"kernel.cpp", "kernel.log", "kernel.so", "fg"}
    assert "flashgen: kernel.cpp for cpu, " in (error := capsys.readouterr().err) and "    3 | extern" in error
    monkeypatch.setenv("FLASHGEN_DUMP", str(tmp_path / "again"))
    build_cached(HOST, CPU, store=Cache(tmp_path / "cache"))
    assert "kernel.cpp" not in capsys.readouterr().err and (tmp_path / "again" / "kernel.so").exists()  # dumped, though not compiled again
    monkeypatch.delenv("FLASHGEN_DUMP")
    (tmp_path / "dump" / "kernel.cpp").write_text(HOST.text.replace("* TWO", "* 5"))
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(tmp_path / "dump"))
    edited, binary = build_cached(HOST, CPU, store=Cache(tmp_path / "cache"))
    assert edited != key and run_host(binary, tmp_path, [1.0]) == [5.0]
