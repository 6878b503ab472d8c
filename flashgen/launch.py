"""Launch: Executable -> a loaded function on one device; Bound, the arguments of one shape packed once.

Example: ``load(executable, device).bind(arguments, sizes).start(addresses)``. Torch's current stream and allocator are used throughout; nothing
synchronises. A later call of the same shape only patches the addresses.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import cache, families, tensor_map
from .errors import DeviceError, FlashgenError
from .families import Sizes
from .pipeline import Executable
from .tensor_map import TENSOR_MAP_BYTES


class Arguments:
    """An argument struct in memory, filled anew for each launch; drivers and CPU kernels have read it when they return."""

    __slots__ = ("_entries", "_view", "address", "packed", "table")

    def __init__(self, template: bytes):
        self.packed = bytearray(template)
        self._view = (ctypes.c_char * len(template)).from_buffer(self.packed)
        self.address = ctypes.addressof(self._view)
        self._entries = (ctypes.c_void_p * 1)(self.address)
        self.table = ctypes.addressof(self._entries)  # what a driver takes: an array of addresses, one per parameter


SCRATCH_ALIGNMENT = 256  # bytes

Starter = Callable[[Arguments], None]  # queues the kernels of a pass


@dataclass(frozen=True)
class Loaded:
    """A pass that is ready on one device. ``starter(sizes)`` prepares the launches for one set of lengths."""

    executable: Executable
    device: torch.device
    starter: Callable[[Sizes], Starter]

    def bind(self, arguments: Mapping[str, Any], sizes: Sizes, scratch: Iterable[tuple[str, int]] = ()) -> Bound:
        return Bound(self, arguments, sizes, scratch)


class Bound:
    """The arguments of one shape: everything but the addresses is packed.

    scratch: pointers that the caller has no use for, with the bytes to allocate for each.
    """

    def __init__(self, loaded: Loaded, arguments: Mapping[str, Any], sizes: Sizes, scratch: Iterable[tuple[str, int]]):
        executable = loaded.executable
        self._device = loaded.device
        fields = executable.params.fields
        family = families.get(executable.plan.family)
        maps = family.tensor_maps(executable.problem, executable.plan)
        self._pointers = tuple(f.name for f in fields if f.code == "Q")
        assert all(f.code == "Q" for f in fields[len(maps) :][: len(self._pointers)]), "tensor maps and then pointers come first in Params"
        self._addresses = struct.Struct(f"<{len(self._pointers)}Q")
        extras: dict[str, int | float | bytes] = {m.field: bytes(TENSOR_MAP_BYTES) for m in maps}
        extras |= family.numbers(executable.problem, executable.plan, sizes)
        self._template = executable.params.pack({**dict.fromkeys(self._pointers, 0), **extras, **arguments})
        wanted = family.workspaces(executable.problem, executable.plan, sizes)
        self._workspaces = [(w.field, w.elements, getattr(torch, w.dtype), w.kept) for w in wanted if w.zeroed]
        self._scratch: list[tuple[str, int]] = []  # fields and offsets in one allocation
        self._scratch_bytes = 0
        for field, size in [(w.field, w.elements * getattr(torch, w.dtype).itemsize) for w in wanted if not w.zeroed] + list(scratch):
            self._scratch.append((field, self._scratch_bytes))
            self._scratch_bytes += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        self._encoders = [(m.tensor, tensor_map.encoder(m, executable.problem.dtype, arguments, sizes)) for m in maps]
        self._start = loaded.starter(sizes)
        self.clears = family.clears  # the rows of packed tensors that belong to no sequence
        self._own = threading.local()  # each thread fills its own arguments: autograd calls from threads of its own

    def start(self, addresses: dict[str, int]) -> None:
        """Allocate workspaces through torch, enter the addresses and launch."""
        held = []  # keeps the workspaces alive until the launch is queued; torch's allocator then reuses them in stream order
        for field, elements, dtype, kept in self._workspaces:
            tensor = _kept(elements, dtype, self._device) if kept else torch.zeros(elements, dtype=dtype, device=self._device)
            addresses[field] = tensor.data_ptr()
            held.append(tensor)
        if self._scratch:
            tensor = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)
            start = tensor.data_ptr()
            for field, place in self._scratch:
                addresses[field] = start + place
        try:
            arguments = self._own.arguments
        except AttributeError:
            arguments = self._own.arguments = Arguments(self._template)
        packed, offset = arguments.packed, 0
        for name, encode in self._encoders:
            packed[offset : offset + TENSOR_MAP_BYTES] = encode(addresses[name])
            offset += TENSOR_MAP_BYTES
        self._addresses.pack_into(packed, offset, *[addresses[name] for name in self._pointers])
        self._start(arguments)


_kept_workspaces: dict[Any, torch.Tensor] = {}


def _kept(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that every kernel leaves as zeros: one allocation per stream, whose kernels never overlap. A graph, replayed on any stream, gets its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(elements, dtype=dtype, device=device)
    key = (elements, dtype, device, torch._C._cuda_getCurrentRawStream(device.index or 0))
    found = _kept_workspaces.get(key)
    if found is None:
        found = _kept_workspaces[key] = torch.zeros(elements, dtype=dtype, device=device)
    return found


def load(executable: Executable, device: torch.device) -> Loaded:
    starter = _load_cpu(executable) if device.type == "cpu" else _load_cuda(executable, device.index or 0)
    return Loaded(executable, device, starter)


def _load_cpu(executable: Executable) -> Callable[[Sizes], Starter]:
    path = cache.current().shared_object_path(executable.binary)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"the compiled kernel {path} cannot be loaded: {error}. Is the cache folder mounted noexec? Set FLASHGEN_CACHE.") from error
    function = getattr(library, f"fg_{executable.problem.which}")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int

    def start(arguments: Arguments) -> None:
        code = function(arguments.address, torch.get_num_threads())
        if code == 2:
            raise DeviceError("the system denies the AMX tile registers to this process: build without them, flashgen.compile(variant, plan={'amx': 0}).")
        if code:
            raise FlashgenError(
                f"the CPU kernel ran out of memory (code {code}): its scratch is a few tiles per thread plus float32 copies of dq; use fewer threads."
            )

    return lambda sizes: start


_modules: dict[tuple[str, int], int] = {}
_module_lock = threading.Lock()


def _module(binary: Any, index: int) -> int:
    """Load a cubin once per device; modules belong to torch's primary context."""
    from cupy_backends.cuda.api import driver

    key = (binary.digest, index)
    with _module_lock:
        if key not in _modules:
            with torch.cuda.device(index):
                torch.cuda.current_stream()  # makes sure that the context exists
                _modules[key] = driver.moduleLoadData(binary.data)
        return _modules[key]


_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, cuda.h
_DEFAULT_SHARED_BYTES = 48 * 1024  # what a block gets without asking


def _load_cuda(executable: Executable, index: int) -> Callable[[Sizes], Starter]:
    from cupy_backends.cuda.api import driver

    family, problem, plan = families.get(executable.plan.family), executable.problem, executable.plan
    module = _module(executable.binary, index)
    limits: dict[str, int] = {}

    def function(entry: str, smem_bytes: int) -> int:
        handle = driver.moduleGetFunction(module, entry)
        if smem_bytes > max(_DEFAULT_SHARED_BYTES, limits.get(entry, 0)):
            driver.funcSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
            limits[entry] = smem_bytes
        return handle

    def starter(sizes: Sizes) -> Starter:
        with torch.cuda.device(index):
            launches = [
                (function(x.entry, x.smem_bytes), *x.grid, x.threads, 1, 1, x.smem_bytes) for x in family.launches(problem, plan, sizes) if 0 not in x.grid
            ]

        def start(arguments: Arguments) -> None:
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    return start(arguments)
            stream, table = torch._C._cuda_getCurrentRawStream(index), arguments.table
            for launch in launches:
                driver.launchKernel(*launch, stream, table, 0)

        return start

    return starter
