"""Build: Source -> Binary, with NVRTC for a GPU and the host's C++ compiler for a CPU.

Example: ``build(source, target).report.entry("forward").registers``; ``build_cached`` looks in the cache first.
Neither path needs a GPU or CUDA toolkit headers; both may be called from many threads and processes at once.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from . import settings
from .cache import Cache, current, digest
from .errors import CompileError, FlashgenError, numbered
from .source import Binary, EntryReport, Report, Source
from .target import Target

# The resource report (registers, spills, stack, barriers) arrives in NVRTC's log through -v.
NVRTC_OPTIONS = ("-std=c++17", "--ptxas-options=-v")
# Contraction to fused multiply-adds is allowed, as on a GPU; -ffast-math is not: masks and scores rely on infinities and NaN. math-errno and
# trapping-math are side effects nobody reads; they would keep sqrt and selects out of vector loops.
HOST_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
# Used where the compiler has them. GCC tunes for Intel servers with vectors half as long as the machine's, for the sake of code that uses them rarely.
HOST_OPTIONAL = ("-march=native", "-mprefer-vector-width=512", "-fopenmp")


def build(source: Source, target: Target, *, flags: Sequence[str] = ()) -> Binary:
    """Compile now. ``flags`` come after flashgen's own options. Raises CompileError with numbered source lines around the first diagnostic."""
    started = time.perf_counter()
    data, log = (_build_cuda if target.kind == "cuda" else _build_host)(source, target, tuple(flags))
    report = replace(parse_log(log), compile_seconds=round(time.perf_counter() - started, 4))
    binary = Binary(data, "cubin" if target.kind == "cuda" else "so", report)
    _narrate(source, target, report)
    _dump(source, binary)
    return binary


def build_cached(source: Source, target: Target, *, flags: Sequence[str] = (), store: Cache | None = None) -> tuple[str, Binary]:
    """The store key of this build and its Binary, from the cache or compiled and put there; processes that ask at once compile once."""
    source, store = overridden(source), store or current()
    key = store_key(source, target, flags=flags)
    binary = store.get_binary(key)
    if binary is None:
        with store.lock(key):
            binary = store.get_binary(key)
            if binary is None:
                binary = build(source, target, flags=flags)
                store.put_binary(key, binary)
                return key, binary
    _dump(source, binary)  # also what was compiled earlier
    return key, binary


def store_key(source: Source, target: Target, *, flags: Sequence[str] = ()) -> str:
    """Digest of all that decides the binary: source, headers, options, compiler version, architecture (on a CPU its instruction sets)."""
    options = NVRTC_OPTIONS if target.kind == "cuda" else HOST_OPTIONS + HOST_OPTIONAL
    return digest(replace(source, name=""), (*options, *flags), compiler_version(target), target.arch, target.features)


def compiler_version(target: Target) -> str:
    """A text that changes when the compiler does; part of both cache keys."""
    return _nvrtc_version() if target.kind == "cuda" else _host_version(*_compiler_file(host_compiler()))


def overridden(source: Source) -> Source:
    """``source`` with the text of the file of its name in FLASHGEN_OVERRIDE, if there is one."""
    folder = settings.override()
    if folder is None or not (folder / source.file_name).is_file():
        return source
    return replace(source, text=(folder / source.file_name).read_text())


def _narrate(source: Source, target: Target, report: Report) -> None:
    """FLASHGEN_DEBUG: a line for each compilation, at 4 the whole source."""
    level = settings.debug()
    if level >= 1:
        registers = (f"{entry.name} {entry.registers} registers" for entry in report.entries)
        print(f"flashgen: {source.file_name} for {target.name}", f"{report.compile_seconds:.2f} s", *registers, *report.faults, sep=", ", file=sys.stderr)
    if level >= 4:
        print(numbered(source.text, 0, context=source.text.count("\n") + 1), file=sys.stderr)


def _dump(source: Source, binary: Binary) -> None:
    """FLASHGEN_DUMP: source, headers, log and bytes as files."""
    folder = settings.dump()
    if folder is None:
        return
    try:
        for name, text in ((source.file_name, source.text), (f"{source.name}.log", binary.report.log), *source.headers):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / f"{source.name}.{binary.kind}").write_bytes(binary.data)
    except OSError as error:
        raise FlashgenError(f"FLASHGEN_DUMP={str(folder)!r} cannot be written ({error}). Correct or unset it.") from error


def parse_log(log: str) -> Report:
    """The Report in a compiler's log: ptxas prints a block of lines per entry under -v."""
    entries = []
    for block in re.split(r"Compiling entry function ", log)[1:]:

        def number(pattern: str, block: str = block) -> int:
            found = re.search(pattern, block)
            return int(found[1]) if found else 0

        entries.append(
            EntryReport(
                name=block.split("'")[1],
                registers=number(r"Used (\d+) registers"),
                spill_stores=number(r"(\d+) bytes spill stores"),
                spill_loads=number(r"(\d+) bytes spill loads"),
                stack_bytes=number(r"(\d+) bytes stack frame"),
                smem_bytes=number(r"(\d+) bytes smem"),
                barriers=number(r"used (\d+) barriers"),
            )
        )
    # Texts, not message numbers: those move between versions. Both arrive even on success and without -v.
    return Report(tuple(sorted(entries, key=lambda entry: entry.name)), log, serialized="serialized" in log, setmaxnreg_ignored="setmaxnreg' ignored" in log)


def _error(title: str, log: str, source: Source) -> CompileError:
    """The CompileError of a failed compilation, with the lines around the first diagnostic that lies in a text we have."""
    texts = {source.file_name: source.text, **dict(source.headers)}
    # "kernel.cu(12): error: ..." (NVRTC), "/tmp/x/kernel.cpp:12:5: error: ..." (g++, clang++)
    for found in re.finditer(r"^(.*?)(?:\((\d+)\)|:(\d+):\d+): (?:fatal |catastrophic )?error", log, re.MULTILINE):
        for name, text in texts.items():
            if found[1] == name or found[1].endswith("/" + name):
                line = int(found[2] or found[3])
                return CompileError(title, log, f"{name}, line {line}:\n{numbered(text, line)}")
    return CompileError(title, log)


# ---- CUDA ------------------------------------------------------------------------------------------------------------------------------------


def _cuda_extra() -> str:
    return "pip install 'flashgen[cuda13]' (or 'flashgen[cuda12]' for a CUDA 12 driver)"


def _nvrtc() -> Any:
    """CuPy's own NVRTC binding: unlike CuPy's compile helpers it works without a GPU and takes any architecture."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except ImportError as error:
        raise CompileError(f"building CUDA kernels needs CuPy, which cannot be imported ({error}). {_cuda_extra()}") from error
    except Exception as error:  # CuPy reports a missing libnvrtc as RuntimeError or with an error of cuda-pathfinder
        raise CompileError(f"building CUDA kernels needs the NVRTC library, which CuPy cannot load ({error}). {_cuda_extra()}") from error
    return nvrtc


@cache
def _nvrtc_version() -> str:
    """The version of libnvrtc. Loading the library takes longer than a warm start may, so ask the installed wheel where that is unambiguous."""
    from importlib import metadata

    versions = []
    for binding, library in (("cupy-cuda13x", "nvidia-cuda-nvrtc"), ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12")):
        try:
            metadata.version(binding)
            versions.append(metadata.version(library))
        except metadata.PackageNotFoundError:
            continue
    if len(versions) == 1:
        return "nvrtc " + ".".join(versions[0].split(".")[:2])
    return "nvrtc {}.{}".format(*_nvrtc().getVersion())


def _build_cuda(source: Source, target: Target, flags: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    headers = tuple(text.encode() for _, text in source.headers)
    names = tuple(name.encode() for name, _ in source.headers)
    program = nvrtc.createProgram(source.text, source.file_name, headers, names)
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={target.arch}", *NVRTC_OPTIONS, *flags))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).rstrip("\0")
            raise _error(f"NVRTC rejected {source.file_name} for {target.arch} ({error}).", log, source) from error
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program).rstrip("\0")
    finally:
        nvrtc.destroyProgram(program)


# ---- host ------------------------------------------------------------------------------------------------------------------------------------


def host_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: $CXX (words allowed, as in "ccache g++"), else g++, else clang++."""
    wanted = settings.compiler()
    try:
        words = shlex.split(wanted) if wanted else []
    except ValueError as error:
        raise CompileError(f"CXX={wanted!r} is no command ({error}). Correct or unset it.") from None
    for command in (words,) if words else (["g++"], ["clang++"]):
        path = shutil.which(command[0])
        if path:
            return (os.path.abspath(path), *command[1:])  # compilers run in a folder of their own
    tried = f"CXX={wanted!r} is not an executable file" if wanted else "neither g++ nor clang++ is on PATH and CXX is not set"
    remedy = "Install one (Debian: apt-get install g++; macOS: xcode-select --install) or set CXX."
    raise CompileError(f"building CPU kernels needs a C++17 compiler: {tried}. {remedy}")


def _compiler_file(command: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """The command and its modification time, so that what is remembered of a compiler is forgotten when it is replaced."""
    return command, os.stat(command[0]).st_mtime_ns


@cache
def _host_version(command: tuple[str, ...], changed_ns: int) -> str:
    run = _run([*command, "-dumpfullversion", "-dumpversion"])  # clang++ knows only the second
    return f"{' '.join(command)} {run.stdout.strip()} {changed_ns}"


@cache
def _unsupported(command: tuple[str, ...], changed_ns: int) -> tuple[str, ...]:
    """Which of HOST_OPTIONAL this compiler lacks; asked only after a compilation failed, since asking costs as much as a small kernel."""
    missing = []
    for option in HOST_OPTIONAL:
        text = "#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n" if option == "-fopenmp" else "int nothing;\n"
        with tempfile.TemporaryDirectory(prefix="flashgen-build-") as folder:
            (Path(folder) / "probe.cpp").write_text(text)
            if _run([*command, "-shared", "-fPIC", option, "probe.cpp", "-o", "probe.so"], folder).returncode:
                missing.append(option)
    return tuple(missing)


def _build_host(source: Source, target: Target, flags: tuple[str, ...]) -> tuple[bytes, str]:
    command = host_compiler()
    with tempfile.TemporaryDirectory(prefix="flashgen-build-") as folder:
        for name, text in ((source.file_name, source.text), *source.headers):
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        options = [*HOST_OPTIONS, *HOST_OPTIONAL, *flags, "-I.", source.file_name, "-o", "kernel.so"]
        run = _run([*command, *options], folder)
        if run.returncode:
            missing = _unsupported(*_compiler_file(command))
            if missing:
                run = _run([*command, *(option for option in options if option not in missing)], folder)
        if run.returncode:
            raise _error(f"{' '.join(command)} rejected {source.file_name} (C++17 is needed: g++ 9, clang++ 9 or later).", run.stderr, source)
        if not (Path(folder) / "kernel.so").is_file():
            raise CompileError(f"{' '.join(command)} ended without an error and wrote nothing: is it a C++ compiler? Correct or unset CXX.", run.stderr)
        return (Path(folder) / "kernel.so").read_bytes(), run.stderr


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a compiler: English diagnostics, its temporary files inside ``folder``."""
    environment = {**os.environ, "LC_ALL": "C"} | ({"TMPDIR": folder} if folder else {})
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompileError(f"cannot run the C++ compiler {command[0]} ({error}). Install one or set CXX.") from error
