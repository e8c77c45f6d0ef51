"""The probe on this machine, and its parts against machines made up of files and fake libraries."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from localmoe.hardware import cuda
from localmoe.hardware.cgroup import MemoryLimit, memory_limit
from localmoe.hardware.cpu import FLAGS_OF_INTEREST, core_counts, ram_bytes
from localmoe.hardware.probe import disk_free_bytes, probe_hardware

HAS_GPU = torch.cuda.is_available()


def test_the_probe_tells_of_this_machine_within_three_seconds() -> None:
    start = time.perf_counter()
    hardware = probe_hardware()
    assert time.perf_counter() - start < 3
    assert hardware.cpu_name and set(hardware.cpu_flags) <= set(FLAGS_OF_INTEREST)
    assert 1 <= hardware.physical_cores <= hardware.logical_cores
    assert 0 < hardware.ram_available_bytes <= hardware.ram_total_bytes <= psutil.virtual_memory().total
    assert hardware.memory_copy_bytes_per_s is not None and 1e8 < hardware.memory_copy_bytes_per_s < 1e13
    assert hardware.torch_version == torch.__version__
    assert len(hardware.gpus) == (torch.cuda.device_count() if HAS_GPU else 0)
    assert json.loads(json.dumps(hardware.as_dict()))["logical_cores"] == hardware.logical_cores


def test_without_measuring_no_rate_is_reported() -> None:
    hardware = probe_hardware(measure=False)
    assert hardware.memory_copy_bytes_per_s is None
    assert all(gpu.h2d_bytes_per_s is None and gpu.device_bytes_per_s is None for gpu in hardware.gpus)


def test_importing_the_probe_looks_at_nothing() -> None:
    code = (
        "import sys; import localmoe.hardware.probe, localmoe.hardware.facts;"
        "sys.exit('torch' in sys.modules or 'pynvml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_free_disk_space_is_told_for_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert disk_free_bytes(tmp_path / "not" / "yet") > 0


def test_the_disk_is_the_one_that_models_lie_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "big disk"
    home.mkdir()
    elsewhere.mkdir()
    (home / "models").symlink_to(elsewhere)
    monkeypatch.setenv("LOCALMOE_HOME", str(home))

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=5000 if folder.resolve() == elsewhere else 10)

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert probe_hardware(measure=False).disk_free_bytes == 5000


def test_another_disk_of_what_is_made_of_models_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    assert probe_hardware(measure=False).home_free_bytes is None
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one disk")
    (tmp_path / "models").symlink_to(elsewhere)
    found = probe_hardware(measure=False)
    assert found.home_free_bytes is not None
    assert found.home_free_bytes == pytest.approx(disk_free_bytes(tmp_path), rel=0.1)
    assert found.disk_free_bytes == pytest.approx(disk_free_bytes(elsewhere), rel=0.1)


def test_only_the_cores_that_this_process_may_use_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    assert core_counts() == (1, 1)


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_the_tightest_container_limit_counts_and_file_pages_count_as_free(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("0::/a/b\n")
    write_group(tmp_path / "fs/a", memory__max=1000, memory__current=900)
    write_group(tmp_path / "fs/a/b", memory__max=5000, memory__current=600)
    (tmp_path / "fs/a/memory.stat").write_text("anon 1\ninactive_file 300\n")
    assert memory_limit(tmp_path / "fs", tmp_path / "self") == MemoryLimit(1000, 600)


def test_the_older_layout_of_control_groups_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("4:cpu,memory:/x\n0::/\n")
    group = tmp_path / "fs/memory"
    write_group(group, memory__limit_in_bytes=4000, memory__usage_in_bytes=1000)
    (group / "memory.stat").write_text("total_inactive_file 500\n")
    found = memory_limit(tmp_path / "fs", tmp_path / "self")
    assert found is not None and found.available_bytes == 3500


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", ""])
def test_no_limit_is_no_limit(tmp_path: Path, limit: str) -> None:
    (tmp_path / "self").write_text("0::/\n")
    write_group(tmp_path / "fs", memory__max=limit, memory__current=5)
    assert memory_limit(tmp_path / "fs", tmp_path / "self") is None
    assert memory_limit(tmp_path / "fs", tmp_path / "missing") is None


def test_a_container_s_limit_bounds_the_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localmoe.hardware.cpu.memory_limit", lambda: MemoryLimit(10_000, 4_000))
    assert ram_bytes() == (10_000, 6_000)


class FakeNvml:
    """The driver's library with one device, that may fail at any call."""

    class NVMLError(Exception):
        """As in the real library."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetName": b"Example GPU",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=123),
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }

        def call(*args: object) -> Any:
            if name == self.failing:
                raise self.NVMLError(name)
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            return answers.get(name, f"{name}{args}")

        return call


def test_the_driver_s_facts_are_read_and_its_library_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = cuda._driver_facts("1234")
    assert (facts.used_bytes, facts.pcie_generation, facts.pcie_width) == (123, 4, 16)
    assert cuda.nvidia_names() == ("Example GPU",)
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("failing", "used", "generation"),
    [
        ("nvmlInit", None, None),
        ("nvmlDeviceGetHandleByUUID", None, None),
        ("nvmlDeviceGetMaxPcieLinkWidth", 123, None),
    ],
)
def test_facts_that_the_driver_refuses_are_left_open(
    monkeypatch: pytest.MonkeyPatch, failing: str, used: int | None, generation: int | None
) -> None:
    nvml = FakeNvml(failing)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = cuda._driver_facts("GPU-1234")
    assert (facts.used_bytes, facts.pcie_generation) == (used, generation)
    assert nvml.open == 0


def test_a_machine_without_the_driver_s_library_has_no_gpu_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cuda.nvidia_names() == ()


@pytest.mark.skipif(HAS_GPU, reason="a usable GPU is here")
def test_a_gpu_that_a_cpu_build_of_torch_cannot_use_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda.probe_gpus(measure=True) == (
        (),
        "Example GPU is there, but the installed torch is a build without CUDA.",
    )


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_gpu_s_rates_are_measured_and_its_memory_is_given_back() -> None:
    before = torch.cuda.mem_get_info(0)[0]
    gpus, note = cuda.probe_gpus(measure=True)
    assert note == "" and gpus[0].total_bytes >= gpus[0].free_bytes > 0
    assert gpus[0].h2d_bytes_per_s is not None and 1e9 < gpus[0].h2d_bytes_per_s < 1e12
    assert gpus[0].device_bytes_per_s is not None
    assert gpus[0].device_bytes_per_s > gpus[0].h2d_bytes_per_s
    assert torch.cuda.mem_get_info(0)[0] >= before - (64 << 20)
