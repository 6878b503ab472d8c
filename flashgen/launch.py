"""Launch: Executable -> a loaded function on one device, and the call that packs arguments and starts it.

Example: ``load(executable, device_index).run(values, sizes, tensors)``. Torch's current stream and allocator are used throughout; nothing synchronises.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import cache, families
from .errors import DeviceError, FlashgenError
from .families import Sizes
from .pipeline import Executable


@dataclass
class Loaded:
    """A pass ready to run. ``start(arguments, sizes, device)`` launches it with ``arguments`` for every Params field but the workspaces."""

    executable: Executable
    start: Callable[[dict[str, Any], Sizes, torch.device], None]


def load(executable: Executable, device: torch.device) -> Loaded:
    start = _load_cpu(executable) if device.type == "cpu" else _load_cuda(executable, device.index or 0)
    return Loaded(executable, start)


def _load_cpu(executable: Executable) -> Callable[..., None]:
    path = cache.current().shared_object_path(executable.binary)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"the compiled kernel {path} cannot be loaded: {error}. Is the cache folder mounted noexec? Set FLASHGEN_CACHE.") from error
    function = getattr(library, f"fg_{executable.problem.which}")
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_int
    family, params = families.get(executable.plan.family), executable.params

    def start(arguments: dict[str, Any], sizes: Sizes, device: torch.device) -> None:
        held = _workspaces(family.workspaces(executable.problem, executable.plan, sizes), device, arguments)
        code = function(params.pack(arguments), torch.get_num_threads())
        del held
        if code:
            raise FlashgenError(f"the CPU kernel ran out of memory (code {code}): its scratch is a few tiles per thread plus float32 copies of dq; use fewer threads.")

    return start


def _workspaces(wanted: list[families.Workspace], device: torch.device, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Allocate workspaces through torch and enter their addresses; the returned tensors keep them alive until the launch is queued."""
    held = []
    for w in wanted:
        make = torch.zeros if w.zeroed else torch.empty
        tensor = make(w.elements, dtype=getattr(torch, w.dtype), device=device)
        arguments[w.field] = tensor.data_ptr()
        held.append(tensor)
    return held


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


def _load_cuda(executable: Executable, index: int) -> Callable[..., None]:
    from cupy_backends.cuda.api import driver

    family, params, problem, plan = families.get(executable.plan.family), executable.params, executable.problem, executable.plan
    module = _module(executable.binary, index)
    functions: dict[str, int] = {}
    limits: dict[str, int] = {}

    def function(entry: str, smem_bytes: int) -> int:
        if entry not in functions:
            functions[entry] = driver.moduleGetFunction(module, entry)
        if smem_bytes > max(48 * 1024, limits.get(entry, 0)):
            driver.funcSetAttribute(functions[entry], _MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
            limits[entry] = smem_bytes
        return functions[entry]

    def start(arguments: dict[str, Any], sizes: Sizes, device: torch.device) -> None:
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return start(arguments, sizes, device)
        held = _workspaces(family.workspaces(problem, plan, sizes), device, arguments)
        packed = params.pack(arguments)
        buffer = ctypes.create_string_buffer(packed, len(packed))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        stream = torch._C._cuda_getCurrentRawStream(index)
        for launch in family.launches(problem, plan, sizes):
            if 0 in launch.grid:
                continue
            driver.launchKernel(
                function(launch.entry, launch.smem_bytes), *launch.grid, launch.threads, 1, 1, launch.smem_bytes, stream, ctypes.addressof(pointers), 0
            )  # fmt: skip
        del held

    return start
