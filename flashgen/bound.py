"""Bound: the arguments of one shape of a loaded pass, packed but for the addresses.

Loaded, Params fields, Sizes -> launches. Example: ``Bound(loaded, arguments, sizes).start(addresses)``. Torch's current stream and allocator are used
throughout; nothing synchronises. Launches of known addresses are ready to go: torch's allocator gives a loop the same addresses again and again.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from . import families, tensor_map
from .families import Sizes, Workspace
from .launch import Arguments, Launches, Loaded
from .tensor_map import TENSOR_MAP_BYTES
from .workspaces import Memory, Workspaces

MAX_LAUNCHES = 4096  # remembered, of all shapes, before they are packed anew; each takes about 3 KB


class _Ready:
    """What a thread's launches on one stream use. memory: None if each allocates its own. launches: by their addresses."""

    __slots__ = ("__weakref__", "launches", "memory")

    def __init__(self, memory: Memory | None):
        self.memory = memory
        self.launches: dict[tuple[int, ...], Launches] = {}


_lock = threading.Lock()
_all_ready: weakref.WeakSet[_Ready] = weakref.WeakSet()
_remembered = 0  # launches, since all were forgotten


def _remember(ready: _Ready, addresses: tuple[int, ...], launches: Launches) -> None:
    global _remembered
    with _lock:
        if _remembered >= MAX_LAUNCHES:
            for other in _all_ready:
                other.launches.clear()
            _remembered = 0
        _all_ready.add(ready)
        ready.launches[addresses] = launches
        _remembered += 1


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.by_stream: dict[int, _Ready] = {}


class Bound:
    """``given`` names the addresses that a launch takes. scratch: workspaces beside those of the family, pointers that the caller has no use for."""

    def __init__(self, loaded: Loaded, arguments: Mapping[str, Any], sizes: Sizes, scratch: Iterable[Workspace] = ()):
        executable, state = loaded.executable, loaded.state
        self.device_number, self.current_device, self._stream = state.number, state.current, state.stream
        self._prepare = loaded.starter(sizes)
        fields = executable.params.fields
        family = families.get(executable.plan.family)
        maps = family.tensor_maps(executable.problem, executable.plan)
        self._pointers = tuple(f.name for f in fields if f.code == "Q")
        assert all(f.code == "Q" for f in fields[len(maps) :][: len(self._pointers)]), "tensor maps and then pointers come first in Params"
        self._layout = struct.Struct(f"<{len(self._pointers)}Q")
        extras: dict[str, int | float | bytes] = {m.field: bytes(TENSOR_MAP_BYTES) for m in maps}
        extras |= family.numbers(executable.problem, executable.plan, sizes)
        self._template = executable.params.pack({**dict.fromkeys(self._pointers, 0), **extras, **arguments})
        wanted = [*family.workspaces(executable.problem, executable.plan, sizes), *scratch]
        self._workspaces = Workspaces(wanted, loaded.device)
        self._capturing = state.capturing if wanted else bool  # bool() is False: nothing to keep out of a graph
        self.given = tuple(n for n in self._pointers if n not in self._workspaces.fields)
        self._encoders = [(m.tensor, tensor_map.encoder(m, executable.problem.dtype, arguments, sizes)) for m in maps]
        self.clears = family.clears  # the rows of packed tensors that belong to no sequence
        self._ready = _OfThread()

    def start(self, addresses: Mapping[str, int]) -> None:
        """Launch with these addresses, by name."""
        if self.current_device() != self.device_number:
            with torch.cuda.device(self.device_number):
                return self.start(addresses)
        self.launch(*[addresses[name] for name in self.given])

    def launch(self, *addresses: int) -> None:
        """Launch with these addresses, those of ``given``, where the current device is theirs."""
        stream = self._stream()
        ready = self._ready.by_stream.get(stream) or self._readied(stream)
        captured = self._capturing()
        if ready.memory is None or captured:
            memory = self._workspaces.allocate(None if captured else stream)  # held until the launch is queued
            addresses += memory.addresses
        launches = ready.launches.get(addresses)
        if launches is None:
            launches = self._packed(ready, addresses, stream)
        for launch in launches.calls:
            launch()

    def _readied(self, stream: int) -> _Ready:
        if self._capturing():
            return _Ready(None)
        made = self._ready.by_stream[stream] = _Ready(self._workspaces.kept(stream))
        return made

    def _packed(self, ready: _Ready, addresses: tuple[int, ...], stream: int) -> Launches:
        own = ready.memory.addresses if ready.memory is not None and len(addresses) == len(self.given) else ()
        found = dict(zip((*self.given, *self._workspaces.fields), addresses + own, strict=True))
        packed = bytearray(self._template)
        for n, (name, encode) in enumerate(self._encoders):
            packed[n * TENSOR_MAP_BYTES : (n + 1) * TENSOR_MAP_BYTES] = encode(found[name])
        self._layout.pack_into(packed, len(self._encoders) * TENSOR_MAP_BYTES, *[found[name] for name in self._pointers])
        launches = self._prepare(Arguments(packed), stream)
        _remember(ready, addresses, launches)
        return launches
