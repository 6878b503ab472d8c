"""The cache of compiled kernels and tuning records: content-addressed files, safe under many processes, a killed process and a corrupt or read-only folder.

Two levels. Index: digest of all that decides a kernel -> a small entry (plan fields, store key), so that a warm start emits nothing.
Store: digest of source, options and compiler -> Report and bytes. Example: ``current().get_binary(key)``.

``index/<key>.json``, ``store/<key>.json`` (entries with their own checksum), ``object/<sha256 of the bytes>.{so,cubin}``, ``tuning/<kind>.jsonl``,
``lock/`` and ``tmp/`` (empty at rest). Files appear by rename and never change afterwards, so a reader sees a whole file or none; what fails its checksum
is a miss and is made again. Nothing here raises for a bad folder: writes then go to a private temporary folder, with one warning.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from . import settings
from .source import Binary, EntryReport, Report

LOCK_SECONDS = 120.0  # how long a process waits for another's compilation before it compiles for itself
STALE_SECONDS = 3600.0  # temporary files older than this were left by a killed process


def digest(*parts: object) -> str:
    """A sha256 that depends on values alone: text, bytes, numbers, None, tuples, lists, mappings and dataclasses of them; never on addresses or set order."""
    state = sha256()

    def feed(part: object) -> None:
        match part:
            case str() | bytes():
                raw = part.encode() if isinstance(part, str) else part
                state.update(b"%c%d:" % (b"s"[0] if isinstance(part, str) else b"b"[0], len(raw)) + raw)
            case None | bool() | int() | float():
                state.update(f"{type(part).__name__}{part!r};".encode())
            case tuple() | list():
                state.update(b"(%d" % len(part))
                for item in part:
                    feed(item)
            case Mapping():
                feed([(key, part[key]) for key in sorted(part)])
            case _ if is_dataclass(part):
                feed([type(part).__name__, *((field.name, getattr(part, field.name)) for field in fields(part))])
            case _:
                raise TypeError(f"digest: {type(part).__name__} has no canonical bytes")

    feed(parts)
    return state.hexdigest()


@cache
def package_digest() -> str:
    """Digest of flashgen's own sources and templates: a changed file gives new keys, so nothing stale is ever offered."""
    package, templates = Path(__file__).parent, settings.templates_directory()
    texts = {f"flashgen/{path.relative_to(package).as_posix()}": path.read_bytes() for path in package.rglob("*.py")}
    texts |= {path.relative_to(templates).as_posix(): path.read_bytes() for path in templates.rglob("*") if path.suffix in (".j2", ".h", ".cuh")}
    return digest(texts)


class Cache:
    """One cache folder. ``directory`` None keeps everything in a temporary folder that goes with the process."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._private: Path | None = None
        self._guard = threading.Lock()
        if directory is None:
            self._make_private()

    # ---- the two levels

    def get_index(self, key: str) -> dict[str, Any] | None:
        """The index entry of ``key``, or None."""
        return self._read_entry(f"index/{key}.json")

    def put_index(self, key: str, entry: Mapping[str, Any]) -> None:
        """Store a JSON-able entry."""
        self._write_entry(f"index/{key}.json", dict(entry))

    def get_binary(self, key: str) -> Binary | None:
        """The Binary of a store key, or None when it is absent, unreadable or damaged."""
        entry = self._read_entry(f"store/{key}.json")
        try:
            if entry is None:
                return None
            report = entry["report"] | {"entries": tuple(EntryReport(**item) for item in entry["report"]["entries"])}
            data = self._read(f"object/{entry['sha256']}.{entry['kind']}")
            binary = Binary(data, entry["kind"], Report(**report)) if data is not None else None
            return binary if binary is not None and binary.digest == entry["sha256"] else None
        except (KeyError, TypeError):
            return None

    def put_binary(self, key: str, binary: Binary) -> None:
        """Store a Binary: first the bytes, then the entry that names them."""
        self._write(f"object/{binary.digest}.{binary.kind}", binary.data)
        self._write_entry(f"store/{key}.json", {"sha256": binary.digest, "kind": binary.kind, "report": asdict(binary.report)})

    def shared_object_path(self, binary: Binary) -> Path:
        """A file that holds these bytes, for dlopen: the cache's own when it has it."""
        name = f"object/{binary.digest}.{binary.kind}"
        for root in self._roots():
            if self._read(name, root) == binary.data:
                return root / name
        if self._write(name, binary.data) is None:
            raise OSError("no folder for temporary files is writable: a CPU kernel must be a file to be loaded. Set TMPDIR or FLASHGEN_CACHE.")
        return self.shared_object_path(binary)

    # ---- tuning records

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The tuning records of a kind, oldest first; lines that are no JSON object are skipped."""
        found = []
        for root in reversed(self._roots()):
            for line in (self._read(f"tuning/{kind}.jsonl", root) or b"").splitlines():
                with suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        found.append(record)
        return found

    def append_record(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append one record. A line cut short by a killed process is closed first, so it spoils only itself."""
        line = json.dumps(dict(record), sort_keys=True).encode() + b"\n"

        def append(root: Path) -> None:
            path = root / "tuning" / f"{kind}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(line)

        with self.lock(f"tuning-{kind}"):
            self._attempt(append)

    def record_kinds(self) -> list[str]:
        """The kinds of which there are records, sorted."""
        return sorted({path.stem for root in self._roots() for path in (root / "tuning").glob("*.jsonl")})

    # ---- housekeeping

    def info(self) -> dict[str, Any]:
        """Where the cache lies and what it holds: ``directory``, ``kernels``, ``index``, ``tuned``, ``bytes``."""
        files = [path for root in self._roots() for path in root.rglob("*") if path.is_file()]
        count = {folder: sum(path.parent.name == folder for path in files) for folder in ("store", "index")}
        return {
            "directory": str(self._roots()[0]) if self._roots() else None,
            "kernels": count["store"],
            "index": count["index"],
            "tuned": len(self.record_kinds()),
            "bytes": sum(path.stat().st_size for path in files),
        }

    def clean(self, *, tuning: bool = False) -> None:
        """Remove every compiled kernel, and with ``tuning`` the tuning records too. Running processes keep what they loaded."""
        for root in self._roots():
            _sweep(root)
            for folder in ("index", "store", "object", *(("tuning",) if tuning else ())):
                for path in (root / folder).glob("*"):  # files, not folders: another process may be about to write there
                    with suppress(OSError):
                        path.unlink()

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of ``key`` among processes and threads. It only saves work: a lock that cannot be had within LOCK_SECONDS is done without."""
        held: Any = None
        with suppress(Exception):  # read-only folder, a file system without locks, Timeout: go on without
            from filelock import FileLock

            lock = FileLock(self._roots()[0] / "lock" / f"{key}.lock", timeout=LOCK_SECONDS)
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(poll_interval=0.02)
            held = lock
        try:
            yield
        finally:
            if held is not None:
                with suppress(Exception):  # removed while held: one who waits on the removed file at worst compiles twice
                    os.unlink(held.lock_file)
                with suppress(Exception):
                    held.release()

    # ---- files

    def _roots(self) -> list[Path]:
        """Folders to read: the private one first, then the cache's own, which may be readable though not writable."""
        return [root for root in (self._private, self.directory) if root is not None]

    def _read(self, name: str, root: Path | None = None) -> bytes | None:
        for folder in [root] if root is not None else self._roots():
            with suppress(OSError):
                return (folder / name).read_bytes()
        return None

    def _read_entry(self, name: str) -> dict[str, Any] | None:
        for root in self._roots():
            try:
                stored = json.loads(self._read(name, root) or b"null")
                if stored["checksum"] == digest(json.dumps(stored["entry"], sort_keys=True)):
                    return stored["entry"]
            except (ValueError, KeyError, TypeError):
                continue
        return None

    def _write_entry(self, name: str, entry: dict[str, Any]) -> None:
        text = json.dumps(entry, sort_keys=True)
        self._write(name, json.dumps({"checksum": digest(text), "entry": json.loads(text)}, indent=1, sort_keys=True).encode())

    def _write(self, name: str, data: bytes) -> Path | None:
        """Write a file so that it appears at once and whole."""

        def write(root: Path) -> None:
            self._prepare(root)
            (root / name).parent.mkdir(exist_ok=True)
            temporary = root / "tmp" / uuid.uuid4().hex  # not mkstemp: a folder that users share needs the permissions that their umask gives
            try:
                temporary.write_bytes(data)
                os.replace(temporary, root / name)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise

        return self._attempt(write)

    def _attempt(self, action: Callable[[Path], None]) -> Path | None:
        """Run ``action(root)`` in the cache's folder; where that fails, from then on in a private temporary folder."""
        root = self._private or self.directory
        if root is not None:
            try:
                action(root)
                return root
            except OSError as error:
                if root == self._private:
                    return None
                with self._guard:
                    if self._private is None:
                        self._make_private()
                        warnings.warn(
                            f"flashgen cannot write its cache {self.directory} ({error}): kernels are compiled anew in every process. "
                            "Set FLASHGEN_CACHE to a writable folder, or to 'off'.",
                            stacklevel=2,
                        )
                return self._attempt(action) if self._private is not None else None
        return None

    def _make_private(self) -> None:
        with suppress(OSError):
            self._private = Path(tempfile.mkdtemp(prefix="flashgen-"))
            atexit.register(_remove, self._private, os.getpid())

    @staticmethod
    def _prepare(root: Path) -> None:
        if not (root / "tmp").is_dir():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / "tmp").mkdir(exist_ok=True)
        _sweep(root)


def _sweep(root: Path) -> None:
    """Remove what a killed process left behind."""
    for path in (root / "tmp").glob("*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child shares the folder but does not own it
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _open(directory: Path | None) -> Cache:
    return Cache(directory)


def current() -> Cache:
    """The cache that the environment names now: FLASHGEN_CACHE, else the user's own cache folder."""
    wanted = settings.cache()
    if wanted == "off":
        return _open(None)
    if wanted is None:
        from platformdirs import user_cache_dir

        wanted = user_cache_dir("flashgen", appauthor=False)
    return _open(Path(wanted).absolute())
