"""Target: the chip that a kernel is planned and built for, and the table of chips.

``parse("sm90a")`` or ``detect(device_index)`` -> Target. Example: ``parse("sm80").smem_block_bytes == 166912``.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .errors import DeviceError

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Target:
    """One chip. Rates are peaks of the datasheet (GPU) or estimates (CPU); they rank plans and draw rooflines, they never decide correctness."""

    name: str  # "cpu", "sm80", "sm86", "sm89", "sm90a", "sm100", "sm120"
    kind: str  # "cpu" | "cuda"
    arch: str  # NVRTC's name ("sm_90a"), "" on a CPU
    chip: str  # the product the numbers describe
    sms: int  # streaming multiprocessors; cores on a CPU
    smem_block_bytes: int  # shared memory that one block may use
    smem_sm_bytes: int
    registers_sm: int
    l1_bytes: int  # GPU: unified with shared memory, per SM; CPU: data cache per core
    l2_bytes: int  # CPU: per core
    hbm_gbs: float  # main memory, GB/s
    tensor_tflops: float  # dense bfloat16 with float32 accumulation
    clock_mhz: int
    tested: bool  # False: compiles, never run by the authors
    features: tuple[str, ...] = ()  # CPU: instruction set flags, sorted
    vector_bytes: int = 0  # CPU: widest vector register
    cores: int = 0  # CPU: cores this process may use

    @property
    def status(self) -> str:
        return "tested" if self.tested else "compiles, never run"


def _gpu(name: str, arch: str, chip: str, sms: int, block_kib: int, l1_kib: int, l2_mib: int, gbs: float, tflops: float, mhz: int) -> Target:
    return Target(
        name, "cuda", arch, chip, sms, block_kib * KIB, (block_kib + 1) * KIB, 65536, l1_kib * KIB, l2_mib * MIB, gbs, tflops, mhz, tested=name == "sm90a"
    )


# Shared memory and registers: CUDA C++ Programming Guide, "Compute Capabilities", technical specifications (an SM has one KiB more than its largest block).
# SM counts, bandwidth and matrix rates (dense, float32 accumulation): NVIDIA's datasheets and architecture white papers of the named product.
CHIPS: dict[str, Target] = {
    chip.name: chip
    for chip in (
        # name, arch, product, SMs, KiB of shared memory per block, L1 KiB, L2 MiB, GB/s, TFLOP/s, MHz
        _gpu("sm80", "sm_80", "A100", 108, 163, 192, 40, 2039.0, 312.0, 1410),
        _gpu("sm86", "sm_86", "A10", 72, 99, 128, 6, 600.0, 125.0, 1695),
        _gpu("sm89", "sm_89", "L40S", 142, 99, 128, 96, 864.0, 362.0, 2520),
        _gpu("sm90a", "sm_90a", "H200", 132, 227, 256, 50, 4800.0, 989.0, 1980),
        _gpu("sm100", "sm_100", "B200", 148, 227, 256, 126, 8000.0, 2250.0, 1965),
        _gpu("sm120", "sm_120", "RTX 5090", 170, 99, 128, 96, 1792.0, 209.5, 2407),
    )
}
NAMES = ("cpu", *CHIPS)


def parse(name: str) -> Target:
    """The Target called ``name``; "cpu" is the CPU of this machine, the only one a host compiler is asked for."""
    if name == "cpu":
        return detect_cpu()
    if name not in CHIPS:
        hint = " (sm90 needs its 'a': wgmma and setmaxnreg exist only there)" if name in ("sm90", "sm_90", "sm_90a") else ""
        raise DeviceError(f"target={name!r}: the targets are {', '.join(NAMES)}{hint}. Choose one of them.")
    return CHIPS[name]


def nearest(major: int, minor: int) -> Target:
    """The table's chip whose code runs on compute capability major.minor: the nearest lower one of the same major version."""
    known = {(8, 0): "sm80", (8, 6): "sm86", (8, 9): "sm89", (9, 0): "sm90a", (10, 0): "sm100", (12, 0): "sm120"}
    lower = [capability for capability in known if capability[0] == major and capability[1] <= minor]
    if not lower:
        built = ", ".join(CHIPS)
        raise DeviceError(f"compute capability {major}.{minor}: flashgen builds for {built} (8.0 is the lowest). Use another GPU, or tensors on the CPU.")
    return CHIPS[known[max(lower)]]


@cache
def detect(device_index: int) -> Target:
    """The Target of a CUDA device. On the table's own product this is the table's row itself, so binaries built without a GPU are found again."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device: torch.cuda.is_available() is False. Install a CUDA build of torch and a driver, or use tensors on the CPU.")
    properties = torch.cuda.get_device_properties(device_index)
    return adapt(nearest(properties.major, properties.minor), properties)


def adapt(chip: Target, properties: object) -> Target:
    """``chip`` with the numbers of a device's torch properties where the device is another product (or a slice of the table's)."""
    name = str(getattr(properties, "name", chip.chip))
    sms = int(getattr(properties, "multi_processor_count", chip.sms))
    if sms == chip.sms and re.search(rf"\b{chip.chip}\b", name):
        return chip
    # Older torch versions lack some attributes; the table's value then stands. Memory rate: two transfers per clock, the width in bits.
    memory_khz, bus_bits = int(getattr(properties, "memory_clock_rate", 0)), int(getattr(properties, "memory_bus_width", 0))
    clock_mhz = int(getattr(properties, "clock_rate", 0)) // 1000 or chip.clock_mhz
    return replace(
        chip,
        chip=name,
        sms=sms,
        smem_block_bytes=int(getattr(properties, "shared_memory_per_block_optin", 0)) or chip.smem_block_bytes,
        smem_sm_bytes=int(getattr(properties, "shared_memory_per_multiprocessor", 0)) or chip.smem_sm_bytes,
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)) or chip.l2_bytes,
        hbm_gbs=round(2e-6 * memory_khz * bus_bits / 8, 1) or chip.hbm_gbs,
        tensor_tflops=round(chip.tensor_tflops * sms / chip.sms * clock_mhz / chip.clock_mhz, 1),
        clock_mhz=clock_mhz,
        tested=False,
    )


# The flags that decide which instructions a compiler may choose under -march=native (and which kernels may ask for).
_ISA = re.compile(r"sse|ssse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|sha_|aes|vaes|v?pclmul|gfni|cx16|lahf|xsave|clwb|movdir|rdpid|sm[34]$")


@cache
def detect_cpu() -> Target:
    """This machine's CPU. Caches from sysfs, flags from /proc/cpuinfo; plain assumptions where neither exists (macOS)."""
    info = _read("/proc/cpuinfo")
    arm = re.search(r"^Features\s*:\s*(.*)$", info, re.MULTILINE)
    x86 = re.search(r"^flags\s*:\s*(.*)$", info, re.MULTILINE)
    if x86:
        features = tuple(sorted(flag for flag in set(x86[1].split()) if _ISA.match(flag)))
    else:
        features = tuple(sorted(set(arm[1].split()))) if arm else (platform.machine(),)
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    chip = model[1].strip() if model else platform.processor() or platform.machine()
    vector_bytes = 64 if "avx512f" in features else 32 if "avx2" in features else 16
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    clock_mhz = _cpu_clock_mhz(chip)
    # Floating-point operations per cycle and core: AMX, 16 x 16 x 32 multiply-adds every 16 cycles; else two fused multiply-adds of float32 vectors.
    flops_per_cycle = 1024 if "amx_bf16" in features else vector_bytes // 4 * 4
    return Target(
        name="cpu", kind="cpu", arch="", chip=chip, sms=cores, smem_block_bytes=0, smem_sm_bytes=0, registers_sm=0,
        l1_bytes=_cache_bytes(1) or 32 * KIB, l2_bytes=_cache_bytes(2) or 512 * KIB,
        hbm_gbs=min(12.0 * cores, 200.0),  # an assumption: one core of a server sustains about this much
        tensor_tflops=round(1e-6 * flops_per_cycle * clock_mhz * cores, 3), clock_mhz=clock_mhz, tested=True,
        features=features, vector_bytes=vector_bytes, cores=cores,
    )  # fmt: skip


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _cpu_clock_mhz(chip: str) -> int:
    """A figure that does not change from run to run (the current clock does): the highest clock, else the one in the name, else 2500."""
    highest = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if highest.isdigit():
        return int(highest) // 1000
    named = re.search(r"@\s*([\d.]+)\s*GHz", chip)
    return round(float(named[1]) * 1000) if named else 2500


def _cache_bytes(level: int) -> int:
    """Size of the data (or unified) cache of one core, 0 if unknown."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)K", _read(index / "size"))
        if size and _read(index / "level") == str(level) and _read(index / "type") in ("Data", "Unified"):
            return int(size[1]) * KIB
    return 0
