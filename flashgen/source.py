"""Source, what emit makes, and Binary, what build makes of it.

Source -> Binary(data, kind, Report). Example: ``Source(text, "cuda", entries=("forward",))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256


@dataclass(frozen=True)
class Source:
    """One translation unit and the closure of the headers it includes."""

    text: str
    language: str  # "cuda" | "c++"
    headers: tuple[tuple[str, str], ...] = ()  # (name as included, text), sorted by name
    entries: tuple[str, ...] = ()  # the extern "C" functions to launch
    name: str = "kernel"  # file stem in diagnostics, dumps and overrides; not part of any digest

    @property
    def file_name(self) -> str:
        return self.name + (".cu" if self.language == "cuda" else ".cpp")


@dataclass(frozen=True)
class EntryReport:
    """What ptxas reports of one kernel."""

    name: str
    registers: int = 0  # per thread
    spill_stores: int = 0  # bytes
    spill_loads: int = 0  # bytes
    stack_bytes: int = 0
    smem_bytes: int = 0  # static shared memory only
    barriers: int = 0


@dataclass(frozen=True)
class Report:
    """What the compiler said. ``entries`` is empty for a host build."""

    entries: tuple[EntryReport, ...] = ()
    log: str = ""
    compile_seconds: float = 0.0
    serialized: bool = False  # ptxas had to serialise wgmma: the kernel is correct but slow
    setmaxnreg_ignored: bool = False

    def entry(self, name: str) -> EntryReport:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def faults(self) -> tuple[str, ...]:
        """Why tests and the tuner must reject this build; empty when it is clean."""
        found = [
            f"{entry.name}: {entry.spill_stores} bytes spill stores, {entry.spill_loads} bytes spill loads, {entry.stack_bytes} bytes stack"
            for entry in self.entries
            if entry.spill_stores or entry.spill_loads or entry.stack_bytes
        ]
        if self.serialized:
            found.append("wgmma was serialized")
        if self.setmaxnreg_ignored:
            found.append("setmaxnreg was ignored")
        return tuple(found)


@dataclass(frozen=True)
class Binary:
    """A compiled Source."""

    data: bytes
    kind: str  # "cubin" | "so"
    report: Report = Report()

    @cached_property
    def digest(self) -> str:
        """sha256 of the bytes: the name of its file in the cache."""
        return sha256(self.data).hexdigest()
