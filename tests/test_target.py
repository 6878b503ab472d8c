"""Is every chip of the table complete, and does detection map devices to it?"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flashgen import target
from flashgen.errors import DeviceError


def test_the_table_names_the_six_gpu_targets_with_the_limits_of_their_architecture():
    largest_block_kib = {"sm80": 163, "sm86": 99, "sm89": 99, "sm90a": 227, "sm100": 227, "sm120": 99}
    assert tuple(target.CHIPS) == tuple(largest_block_kib)
    for name, kib in largest_block_kib.items():
        chip = target.parse(name)
        assert (chip.name, chip.kind, chip.smem_block_bytes, chip.registers_sm) == (name, "cuda", kib * 1024, 65536)
        assert chip.smem_sm_bytes == chip.smem_block_bytes + 1024
        assert chip.arch == name.replace("sm", "sm_")
        assert min(chip.sms, chip.l1_bytes, chip.l2_bytes, chip.hbm_gbs, chip.tensor_tflops, chip.clock_mhz) > 0


def test_only_what_was_run_is_called_tested():
    assert [name for name in target.NAMES if target.parse(name).tested] == ["cpu", "sm90a"]
    assert target.parse("sm80").status == "compiles, never run"


@pytest.mark.parametrize("name", ["sm90", "sm_90a", "sm70", "gpu", ""])
def test_an_unknown_name_is_refused_with_the_list(name):
    with pytest.raises(DeviceError, match=r"the targets are cpu, sm80, sm86, sm89, sm90a, sm100, sm120"):
        target.parse(name)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 7), "sm86"), ((8, 9), "sm89"), ((9, 0), "sm90a"), ((10, 0), "sm100"), ((10, 3), "sm100"), ((12, 1), "sm120")],
)
def test_a_minor_version_maps_to_the_nearest_lower_one(capability, name):
    assert target.nearest(*capability).name == name


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (5, 2), (11, 0), (13, 0)])
def test_other_families_are_refused(capability):
    with pytest.raises(DeviceError, match=r"8\.0 is the lowest"):
        target.nearest(*capability)


def test_the_products_of_the_table_are_taken_as_they_stand_so_that_keys_agree_with_a_machine_without_a_gpu():
    h200 = target.parse("sm90a")
    assert target.adapt(h200, SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, L2_cache_size=62914560)) is h200


def test_another_product_brings_its_own_numbers_and_keeps_the_rest():
    h200 = target.parse("sm90a")
    properties = SimpleNamespace(name="NVIDIA H100 PCIe", multi_processor_count=114, L2_cache_size=50 << 20, memory_clock_rate=1593000, memory_bus_width=5120)
    h100 = target.adapt(h200, properties)
    assert (h100.chip, h100.sms, h100.hbm_gbs) == ("NVIDIA H100 PCIe", 114, 2039.0)
    assert h100.smem_block_bytes == h200.smem_block_bytes and h100.arch == "sm_90a"
    assert h100.tensor_tflops == pytest.approx(989.0 * 114 / 132, abs=0.1)
    assert target.adapt(h200, SimpleNamespace(name="NVIDIA H200 MIG 1g.18gb", multi_processor_count=16)).sms == 16


def test_detecting_a_gpu_without_one_says_so(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target.detect.cache_clear()
    with pytest.raises(DeviceError, match="no CUDA device"):
        target.detect(0)


def test_the_cpu_is_described_the_same_each_time():
    cpu = target.parse("cpu")
    assert (cpu.name, cpu.kind, cpu.arch) == ("cpu", "cpu", "")
    assert list(cpu.features) == sorted(set(cpu.features)) and cpu.features
    assert cpu.vector_bytes in (16, 32, 64) and cpu.cores >= 1 and cpu.l1_bytes >= 8192 and cpu.l2_bytes >= cpu.l1_bytes
    target.detect_cpu.cache_clear()
    assert target.detect_cpu() == cpu


def _cpu_with(monkeypatch, cpuinfo):
    monkeypatch.setattr(target, "_read", lambda path: cpuinfo if str(path) == "/proc/cpuinfo" else "")
    target.detect_cpu.cache_clear()
    try:
        return target.detect_cpu()
    finally:
        target.detect_cpu.cache_clear()


def test_flags_decide_the_vector_width_and_amx_the_matrix_rate(monkeypatch):
    cpu = _cpu_with(monkeypatch, "model name\t: Xeon @ 2.00GHz\nflags\t\t: fpu avx2 fma avx512f amx_bf16 amx_tile hypervisor\n")
    assert cpu.features == ("amx_bf16", "amx_tile", "avx2", "avx512f", "fma")
    assert (cpu.vector_bytes, cpu.clock_mhz, cpu.tensor_tflops) == (64, 2000, round(2.048 * cpu.cores, 3))
    assert _cpu_with(monkeypatch, "flags : sse2 avx2 fma\n").vector_bytes == 32


def test_arm_and_a_machine_without_cpuinfo_still_have_a_target(monkeypatch):
    assert _cpu_with(monkeypatch, "Features\t: fp asimd sve\n").features == ("asimd", "fp", "sve")
    cpu = _cpu_with(monkeypatch, "")
    assert len(cpu.features) == 1 and cpu.vector_bytes == 16 and cpu.l1_bytes == 32768 and cpu.clock_mhz == 2500


def test_a_target_is_frozen_and_hashable():
    assert replace(target.parse("sm80"), sms=1) != target.parse("sm80")
    assert hash(target.parse("sm80")) == hash(target.CHIPS["sm80"])
