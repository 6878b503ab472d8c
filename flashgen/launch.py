"""Launch: Executable -> a loaded function on one device.

Example: ``load(executable, device).starter(sizes)(arguments, stream)`` gives the kernels to launch. The arguments are packed by ``bound``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from . import cache, families
from .errors import DeviceError, FlashgenError
from .families import Sizes
from .pipeline import Executable


class Arguments:
    """An argument struct in memory, never changed: threads may share it. Drivers and CPU kernels have read it when they return."""

    __slots__ = ("_entries", "_packed", "address", "table")

    def __init__(self, packed: bytearray):
        self._packed = (ctypes.c_char * len(packed)).from_buffer(packed)
        self.address = ctypes.addressof(self._packed)
        self._entries = (ctypes.c_void_p * 1)(self.address)
        self.table = ctypes.addressof(self._entries)  # what a driver takes: an array of addresses, one per parameter


class Launches(NamedTuple):
    """The kernels of a pass with all their arguments: to be called in order, as often as one likes."""

    calls: tuple[Callable[[], Any], ...]
    arguments: Arguments  # keeps alive what they read


class DeviceState(NamedTuple):
    """What torch says of a device, asked by its shortest calls. A CPU has one stream, 0, and captures nothing."""

    number: int
    current: Callable[[], int]  # number of the current device
    stream: Callable[[], int]  # the current one of this device
    capturing: Callable[[], bool]  # whether the current stream of the current device is


Starter = Callable[[Arguments, int], Launches]  # of a pass, on a stream


@dataclass(frozen=True)
class Loaded:
    """A pass that is ready on one device. ``starter(sizes)`` prepares the launches for one set of lengths."""

    executable: Executable
    device: torch.device
    state: DeviceState
    starter: Callable[[Sizes], Starter]


def load(executable: Executable, device: torch.device) -> Loaded:
    if device.type == "cpu":
        return Loaded(executable, device, DeviceState(0, lambda: 0, lambda: 0, lambda: False), _load_cpu(executable))
    index = device.index or 0
    stream = partial(torch._C._cuda_getCurrentRawStream, index)
    state = DeviceState(index, torch._C._cuda_getDevice, stream, torch._C._cuda_isCurrentStreamCapturing)
    return Loaded(executable, device, state, _load_cuda(executable, index))


def _load_cpu(executable: Executable) -> Callable[[Sizes], Starter]:
    path = cache.current().shared_object_path(executable.binary)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"the compiled kernel {path} cannot be loaded: {error}. Is the cache folder mounted noexec? Set FLASHGEN_CACHE.") from error
    function = getattr(library, f"fg_{executable.problem.which}")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int

    def run(address: int) -> None:
        code = function(address, torch.get_num_threads())
        if code == 2:
            raise DeviceError("the system denies the AMX tile registers to this process: build without them, flashgen.compile(variant, plan={'amx': 0}).")
        if code:
            raise FlashgenError(
                f"the CPU kernel ran out of memory (code {code}): its scratch is a few tiles per thread plus float32 copies of dq; use fewer threads."
            )

    return lambda sizes: lambda arguments, stream: Launches((partial(run, arguments.address),), arguments)


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

        def prepare(arguments: Arguments, stream: int) -> Launches:
            return Launches(tuple([partial(driver.launchKernel, *launch, stream, arguments.table, 0) for launch in launches]), arguments)

        return prepare

    return starter
