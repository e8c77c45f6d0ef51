"""Whether the system resets a GPU that is long at one thing: Windows does, by what the driver says."""

from __future__ import annotations

import platform

import pytest
import torch

from localmoe.hardware import cuda

WSL = "Linux-5.15.153.1-microsoft-standard-WSL2-x86_64-with-glibc2.39"
LINUX = "Linux-6.12.48-amd64-x86_64-with-glibc2.41"


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("system", ["Windows-11-10.0.22631-SP0", WSL, LINUX])
def test_windows_does_where_it_manages_the_card(
    system: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(platform, "platform", lambda: system)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(cuda, "limits_run_time", lambda device: asked.append(device) or limited)
    found = [cuda.ends_long_passes(torch.device(name)) for name in ("cuda", "cuda:1")]
    assert found == [limited and system != LINUX] * 2
    assert asked == ([] if system == LINUX else [3, 1])


def test_without_a_gpu_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "platform", lambda: WSL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(cuda, "limits_run_time")
    assert not cuda.ends_long_passes(torch.device("cuda", 0))


@pytest.mark.gpu
def test_the_driver_answers() -> None:
    from localmoe.kernels.cuda_driver import limits_run_time

    assert isinstance(limits_run_time(torch.cuda.current_device()), bool)
    assert not limits_run_time(torch.cuda.device_count()), "there is no such device"
