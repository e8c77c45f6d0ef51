"""Where Windows manages the GPU, it is not left to wait for a disk unless somebody asks for that."""

from __future__ import annotations

import platform

import pytest
import torch

from localmoe.core.config import EngineConfig
from localmoe.engine.lanes import why_not_from_disk
from localmoe.hardware import cuda

WSL = "Linux-5.15.153.1-microsoft-standard-WSL2-x86_64-with-glibc2.39"
THREADS = 4  # whatever machine the test is on


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("system", ["Windows-11-10.0.22631-SP0", WSL, "Linux-6.12.48-amd64-x86_64"])
def test_it_is_asked_for_layer_by_layer(system: str, limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "platform", lambda: system)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "limits_run_time", lambda device: limited)
    device, auto = torch.device("cuda"), EngineConfig(lanes="auto", cpu_threads=THREADS)
    reason = why_not_from_disk(device, [], auto)
    assert bool(reason) == (limited and "Linux-6" not in system)
    assert not reason or ("two seconds" in reason and "--lanes all" in reason)
    assert not why_not_from_disk(device, [], EngineConfig(lanes="all", cpu_threads=THREADS))
    assert "strict" in why_not_from_disk(device, [], EngineConfig(strict=True, cpu_threads=THREADS))


def test_without_a_gpu_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "platform", lambda: WSL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(cuda, "limits_run_time")
    assert not cuda.ends_long_passes(torch.device("cuda", 0))


@pytest.mark.gpu
def test_the_driver_says_whether_it_ends_kernels() -> None:
    from localmoe.kernels.cuda_driver import limits_run_time

    assert isinstance(limits_run_time(torch.cuda.current_device()), bool)
    assert not limits_run_time(torch.cuda.device_count()), "there is no such device"
