"""Is the cache right under many processes, a killed one, damaged files, and folders that cannot be written or read?"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from flashgen import cache as caching
from flashgen.build import build_cached
from flashgen.cache import Cache, current, digest, package_digest
from flashgen.source import Binary, EntryReport, Report, Source
from flashgen.target import parse

ROOT = Path(__file__).parent.parent
KEY = digest("some kernel")
BINARY = Binary(b"\x7fELF bytes", "cubin", Report((EntryReport("forward", 168, smem_bytes=16),), "a log", 0.4))
HOST = Source('extern "C" int answer() { return 42; }\n', "c++", entries=("answer",))
CPU = parse("cpu")

# A child that builds HOST through the cache of the environment and runs it. The package is entered by its path: what is under test needs none of
# what `import flashgen` loads, and eight children should not each import torch.
CHILD = f"""
import ctypes, filelock, os, platformdirs, sys, types
package = types.ModuleType("flashgen")
package.__path__ = [{str(ROOT / "flashgen")!r}]
sys.modules["flashgen"] = package
from flashgen.build import build_cached
from flashgen.cache import current
from flashgen.source import Source
from flashgen.target import parse
if "USER_ID" in os.environ: os.setuid(int(os.environ["USER_ID"]))  # only now: another user may not be let near this interpreter's files
_, binary = build_cached(Source({HOST.text!r}, "c++", entries=("answer",)), parse("cpu"))
assert ctypes.CDLL(str(current().shared_object_path(binary))).answer() == 42
print("OK", current().shared_object_path(binary))
"""

has_host_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become another user")


def start(**environment):
    command = [sys.executable, "-W", "always", "-c", CHILD]
    return subprocess.Popen(command, env={**os.environ, **environment}, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(child):
    out, error = child.communicate(timeout=120)
    assert child.returncode == 0 and out.startswith("OK"), error
    return Path(out.split()[1]), error


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that notes its calls in ``compiler.log`` and waits as long as ``compiler.wait`` says."""
    real = shutil.which("g++") or shutil.which("clang++")
    folder = tmp_path / "compiler"
    folder.mkdir()
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *dump*) ;; *) echo $$ >> {folder}/log; sleep $(cat {folder}/wait);; esac\nexec {real} "$@"\n')
    script.chmod(0o755)
    (folder / "wait").write_text("0")
    (folder / "log").write_text("")
    monkeypatch.setenv("CXX", str(script))
    return folder


def calls(compiler):
    return (compiler / "log").read_text().split()


# ---- digests


def test_a_digest_separates_what_differs():
    values = ["1", b"1", 1, 1.0, True, None, "", (), ("1",), ("a", "b"), ("ab",), ("a", ("b",))]
    values += [{"a": 1}, {"a": 2}, {"b": 1}, BINARY.report, EntryReport("forward")]
    assert len({digest(value) for value in values}) == len(values)
    assert digest("a", "b") != digest("ab") and digest(("a",), "b") != digest("a", ("b",))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) and digest([1, 2]) == digest((1, 2))


@pytest.mark.parametrize("value", [{1, 2}, object(), len, ({"a": {1}},)])
def test_what_has_no_canonical_bytes_is_refused(value):
    with pytest.raises(TypeError, match="no canonical bytes"):
        digest(value)


def test_the_package_digest_follows_sources_and_templates(monkeypatch, tmp_path):
    first = package_digest()
    assert first == package_digest()
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    (tmp_path / "templates" / "new.cu.j2").write_text("")
    monkeypatch.setattr(caching.settings, "templates_directory", lambda: tmp_path / "templates")
    package_digest.cache_clear()
    try:
        assert package_digest() != first
    finally:
        package_digest.cache_clear()


# ---- one process


def test_both_levels_return_what_was_put(tmp_path):
    cache = Cache(tmp_path / "cache")
    assert cache.get_index(KEY) is None and cache.get_binary(KEY) is None
    cache.put_index(KEY, {"plan": {"block_q": 128}, "store": KEY})
    cache.put_binary(KEY, BINARY)
    assert Cache(tmp_path / "cache").get_index(KEY) == {"plan": {"block_q": 128}, "store": KEY}
    assert Cache(tmp_path / "cache").get_binary(KEY) == BINARY
    assert files(tmp_path / "cache") == [f"index/{KEY}.json", f"object/{BINARY.digest}.cubin", f"store/{KEY}.json"]
    if os.name == "posix":
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "remove", "other json"])
def test_a_damaged_file_is_a_miss_and_is_replaced(tmp_path, damage):
    cache = Cache(tmp_path / "cache")
    for which in ("index/*", "store/*", "object/*"):
        cache.put_index(KEY, {"plan": {"block_q": 128}})
        cache.put_binary(KEY, BINARY)
        (path,) = (tmp_path / "cache").glob(which)
        data = path.read_bytes()
        match damage:
            case "cut":
                path.write_bytes(data[: len(data) // 2])
            case "empty":
                path.write_bytes(b"")
            case "flip":
                place = data.rindex(b"2") if b"2" in data else len(data) // 2
                path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            case "remove":
                path.unlink()
            case "other json":
                path.write_text("[1, 2]")
        assert (cache.get_index(KEY) if "index" in which else cache.get_binary(KEY)) is None
        assert (cache.get_binary(KEY) if "index" in which else cache.get_index(KEY)) is not None
    cache.put_binary(KEY, BINARY)
    assert cache.get_binary(KEY) == BINARY


def test_off_keeps_everything_in_a_folder_that_goes_with_the_process(monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE", "off")
    program = CHILD.split("from flashgen")[0] + (
        "from flashgen.cache import current\nfrom flashgen.source import Binary\nimport os\n"
        "path = current().shared_object_path(Binary(b'bytes', 'so'))\nassert path.read_bytes() == b'bytes'\n"
        "if os.fork() == 0: sys.exit()\nos.wait()\nassert path.exists()\nprint(path)\n"
    )
    path = Path(subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True).stdout.strip())
    assert path.name.endswith(".so") and not path.exists() and not path.parent.parent.exists()


def test_the_environment_names_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "mine"))
    assert current().directory == tmp_path / "mine" and current() is current()
    monkeypatch.delenv("FLASHGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert current().directory == tmp_path / "xdg" / "flashgen"
    monkeypatch.setenv("FLASHGEN_CACHE", "off")
    assert current().directory is None


def test_info_counts_and_clean_empties(tmp_path):
    cache = Cache(tmp_path / "cache")
    cache.put_index(KEY, {})
    cache.put_binary(KEY, BINARY)
    cache.append_record("forward", {"ms": 1.0})
    info = cache.info()
    assert (info["directory"], info["kernels"], info["index"]) == (str(tmp_path / "cache"), 1, 1) and info["bytes"] > len(BINARY.data)
    cache.clean()
    assert cache.get_binary(KEY) is None and cache.get_index(KEY) is None and len(cache.records("forward")) == 1
    cache.clean(tuning=True)
    assert files(tmp_path / "cache") == [] and cache.records("forward") == []


def test_what_a_killed_writer_left_is_swept_once_it_is_old(tmp_path):
    cache = Cache(tmp_path / "cache")
    cache.put_index(KEY, {})
    old, fresh = tmp_path / "cache" / "tmp" / "old", tmp_path / "cache" / "tmp" / "fresh"
    old.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * caching.STALE_SECONDS,) * 2)
    cache.put_index(KEY, {})
    assert files(tmp_path / "cache") == [f"index/{KEY}.json", "tmp/fresh"]


# ---- tuning records


def test_records_keep_their_order_and_a_spoiled_line_spoils_only_itself(tmp_path):
    cache = Cache(tmp_path / "cache")
    assert cache.records("forward") == []
    cache.append_record("forward", {"number": 0})
    path = tmp_path / "cache" / "tuning" / "forward.jsonl"
    with path.open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n{"number": ')  # not an object, not text, cut short
    cache.append_record("forward", {"number": 1})
    cache.append_record("backward", {"number": 9})
    assert [record["number"] for record in cache.records("forward")] == [0, 1]


def test_records_of_many_threads_all_arrive(tmp_path):
    cache = Cache(tmp_path / "cache")
    threads = [threading.Thread(target=lambda number=number: [cache.append_record("forward", {"number": number}) for _ in range(5)]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record["number"] for record in cache.records("forward")) == sorted(list(range(8)) * 5)
    assert files(tmp_path / "cache") == ["tuning/forward.jsonl"]


# ---- locks


def test_a_lock_excludes_threads_and_one_that_cannot_be_had_in_time_is_done_without(tmp_path, monkeypatch):
    entered = []

    def other():
        with Cache(tmp_path / "cache").lock(KEY):
            entered.append(time.monotonic())

    with Cache(tmp_path / "cache").lock(KEY):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.2)
        assert not entered
    thread.join(10)
    assert entered
    monkeypatch.setattr(caching, "LOCK_SECONDS", 0.1)
    with Cache(tmp_path / "cache").lock(KEY):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        assert len(entered) == 2
    assert files(tmp_path / "cache") == []


def test_a_lock_passes_the_errors_of_its_body_on(tmp_path):
    with pytest.raises(RuntimeError, match="body"), Cache(tmp_path / "cache").lock(KEY):
        raise RuntimeError("body")
    with pytest.raises(RuntimeError, match="body"), Cache(Path("/proc/1/nowhere")).lock(KEY):
        raise RuntimeError("body")


# ---- many processes


@has_host_compiler
def test_eight_cold_processes_compile_once_and_leave_one_entry(tmp_path, compiler):
    (compiler / "wait").write_text("0.5")
    children = [start(FLASHGEN_CACHE=str(tmp_path / "cache")) for _ in range(8)]
    paths = {finish(child)[0] for child in children}
    assert len(calls(compiler)) == 1
    (path,) = paths
    found = files(tmp_path / "cache")
    assert [name.split("/")[0] for name in found] == ["object", "store"] and path == tmp_path / "cache" / found[0]
    finish(start(FLASHGEN_CACHE=str(tmp_path / "cache")))
    assert len(calls(compiler)) == 1


@has_host_compiler
def test_a_process_killed_while_it_compiles_blocks_nobody(tmp_path, compiler):
    (compiler / "wait").write_text("60")
    child = start(FLASHGEN_CACHE=str(tmp_path / "cache"), TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 60
    while not calls(compiler) and time.monotonic() < deadline:
        time.sleep(0.02)
    (script,) = calls(compiler)
    child.send_signal(signal.SIGKILL)
    child.wait()
    try:
        (compiler / "wait").write_text("0")
        started = time.monotonic()
        finish(start(FLASHGEN_CACHE=str(tmp_path / "cache")))
        assert time.monotonic() - started < 30
    finally:
        os.kill(int(script), signal.SIGKILL)
        child.communicate()
    assert len(calls(compiler)) == 2 and [name.split("/")[0] for name in files(tmp_path / "cache")] == ["object", "store"]


@has_host_compiler
def test_a_damaged_library_is_compiled_again_in_place(tmp_path, compiler):
    path, _ = finish(start(FLASHGEN_CACHE=str(tmp_path / "cache")))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert finish(start(FLASHGEN_CACHE=str(tmp_path / "cache")))[0] == path
    assert path.read_bytes() == whole and len(calls(compiler)) == 2


# ---- folders that cannot be written or read


@has_host_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="the paths are Linux's")
@pytest.mark.parametrize("where", ["home", "file", "read-only"])
def test_an_unwritable_folder_warns_once_and_works(tmp_path, where):
    (tmp_path / "file").write_text("")
    environment = {"FLASHGEN_CACHE": str(tmp_path / "file" / "cache")}
    if where == "home":
        environment = {"FLASHGEN_CACHE": "", "HOME": "/proc/1", "XDG_CACHE_HOME": "/proc/1"}
    elif where == "read-only":
        (tmp_path / "cache").mkdir(mode=0o555)
        environment = {"FLASHGEN_CACHE": str(tmp_path / "cache")}
        if os.geteuid() == 0:  # root writes anywhere
            environment["USER_ID"] = "65534"
            open_path(tmp_path)
    path, error = finish(start(**environment))
    assert error.count("cannot write its cache") == 1 and "Set FLASHGEN_CACHE" in error
    assert not path.parent.parent.exists()


def test_writes_after_the_warning_stay_silent_and_are_found(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="cannot write its cache") as caught:
        for key in ("a", "b"):
            cache.put_binary(key, BINARY)
        cache.append_record("forward", {"ms": 1})
    assert len(caught) == 1
    assert cache.get_binary("a") == cache.get_binary("b") == BINARY and cache.records("forward") == [{"ms": 1}]


def test_a_read_only_cache_that_has_the_kernel_is_used_in_silence(tmp_path, monkeypatch):
    Cache(tmp_path / "cache").put_binary(KEY, BINARY)

    def refuse(*arguments, **options):
        raise PermissionError("read-only")

    monkeypatch.setattr(caching.os, "replace", refuse)
    cache = Cache(tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_binary(KEY) == BINARY
        assert cache.shared_object_path(BINARY).parent == tmp_path / "cache" / "object"


def test_without_any_folder_the_cache_holds_nothing_and_says_so_only_for_dlopen(tmp_path, monkeypatch):
    def nowhere(*arguments, **options):
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(caching.tempfile, "mkdtemp", nowhere)
    cache = Cache(None)
    cache.put_binary(KEY, BINARY)
    with cache.lock(KEY):
        assert cache.get_binary(KEY) is None and cache.records("forward") == []
    with pytest.raises(OSError, match="Set TMPDIR or FLASHGEN_CACHE"):
        cache.shared_object_path(BINARY)


def open_path(path):
    """Let other users pass through pytest's private folders down to ``path``."""
    for folder in (path, *path.parents):
        if folder.owner() == "root" and folder.stat().st_mode & 0o055 != 0o055 and str(folder).count(os.sep) > 1:
            folder.chmod(0o755)


@as_root
@has_host_compiler
def test_entries_that_another_user_keeps_private_are_misses(tmp_path):
    folder = tmp_path / "cache"
    finish(start(FLASHGEN_CACHE=str(folder)))
    open_path(tmp_path)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o600)
    path, error = finish(start(USER_ID="65534", FLASHGEN_CACHE=str(folder)))
    assert "Traceback" not in error and "Warning" not in error and path.parent == folder / "object"
    assert json.loads(next((folder / "store").iterdir()).read_text())["entry"]["kind"] == "so"


@has_host_compiler
def test_build_cached_hands_back_the_store_key(tmp_path):
    cache = Cache(tmp_path / "cache")
    key, binary = build_cached(HOST, CPU, store=cache)
    assert cache.get_binary(key) == binary
    assert ctypes.CDLL(str(cache.shared_object_path(binary))).answer() == 42


def test_nothing_heavy_is_imported():
    heavy = "('torch', 'sympy', 'jinja2', 'cupy', 'cupy_backends', 'numpy')"
    program = CHILD.split("if ")[0] + f"current().get_binary('x')\nprint([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip() == "[]"
