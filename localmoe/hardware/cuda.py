"""Facts and measured rates of the CUDA devices that torch can use. Works, and finds none, without a driver
or with a CPU build of torch."""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localmoe.hardware.facts import Gpu
from localmoe.hardware.host_room import is_windows
from localmoe.kernels.cuda_driver import limits_run_time

if TYPE_CHECKING:
    import torch

_MIB = 1 << 20
_H2D_BYTES = 64 * _MIB
_DEVICE_BYTES = 256 * _MIB
_SPARE_BYTES = 256 * _MIB  # left free beside a measurement's buffers
_COPIES = 5
_NEWLINE = "\n"


@dataclass(frozen=True, slots=True)
class _DriverFacts:
    used_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None


def probe_gpus(*, measure: bool) -> tuple[tuple[Gpu, ...], str]:
    """The devices, and why there are none ("" if there are some, or simply no GPU)."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        return (), _why_none(torch.version.cuda, [str(warning.message) for warning in caught])
    gpus: list[Gpu] = []
    notes: list[str] = []
    for index in range(torch.cuda.device_count()):
        try:
            gpus.append(_probe(index, measure=measure))
        except RuntimeError as error:  # e.g. out of memory or broken: the others may still work
            notes.append(f"CUDA device {index} cannot be used: {str(error).partition(_NEWLINE)[0]}")
    return tuple(gpus), "; ".join(notes)


def _why_none(cuda_version: str | None, messages: list[str]) -> str:
    names = nvidia_names()
    if names and cuda_version is None:
        return f"{', '.join(names)} is there, but the installed torch is a build without CUDA."
    if messages:
        return messages[0].partition(_NEWLINE)[0]
    return f"{', '.join(names)} is there, but torch cannot use it." if names else ""


def _probe(index: int, *, measure: bool) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    driver = _driver_facts(str(getattr(properties, "uuid", "")))  # before this process makes its context
    free, total = torch.cuda.mem_get_info(index)
    device = torch.device("cuda", index)
    return Gpu(
        index=index,
        name=properties.name,
        total_bytes=total,
        free_bytes=free,
        driver_used_bytes=driver.used_bytes,
        compute_capability=(properties.major, properties.minor),
        pcie_generation=driver.pcie_generation,
        pcie_width=driver.pcie_width,
        h2d_bytes_per_s=_measure_h2d(device, free) if measure else None,
        device_bytes_per_s=_measure_device(device, free) if measure else None,
    )


def _measure_h2d(device: torch.device, free_bytes: int) -> float | None:
    """Bytes a second from pinned host memory; None if there is no room or nothing can be pinned."""
    import torch

    if free_bytes < _H2D_BYTES + _SPARE_BYTES:
        return None
    try:
        host = torch.zeros(_H2D_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(_H2D_BYTES, dtype=torch.uint8, device=device)
        seconds = _best_copy_s(target, host, device)
        del target
        _release(device)
    except RuntimeError:
        return None
    return _H2D_BYTES / seconds


def _measure_device(device: torch.device, free_bytes: int) -> float | None:
    """Bytes read plus bytes written a second by a copy within the device; None if there is no room."""
    import torch

    if free_bytes < 2 * _DEVICE_BYTES + _SPARE_BYTES:
        return None
    try:
        source = torch.zeros(_DEVICE_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = _best_copy_s(target, source, device)
        del source, target
        _release(device)
    except RuntimeError:
        return None
    return 2 * _DEVICE_BYTES / seconds


def _best_copy_s(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    import torch

    best_ms = float("inf")
    with torch.cuda.device(device):
        for _ in range(_COPIES + 1):  # one more, since the first warms up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best_ms = min(best_ms, start.elapsed_time(end))
    return max(best_ms, 1e-6) / 1e3


def _release(device: torch.device) -> None:
    """Give the measuring buffers back to the driver."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def ends_long_passes(device: torch.device) -> bool:
    """Whether the system resets the GPU once it has been at one thing for two seconds, waiting for the host
    too: Windows does (WSL too), but for cards that it does not manage (TCC). Linux itself, which names a
    limit for a card with a display, lets both run beside each other."""
    import torch

    if not (is_windows(platform.platform()) and torch.cuda.is_available()):
        return False
    return limits_run_time(torch.cuda.current_device() if device.index is None else device.index)


def nvidia_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that the driver knows, whether torch can use them or not."""
    nvml = _nvml()
    if nvml is None:
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return tuple(_as_text(nvml.nvmlDeviceGetName(handle)) for handle in handles)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _driver_facts(uuid: str) -> _DriverFacts:
    """What only the driver's own library knows of the device with this UUID (torch's numbers may differ from
    the driver's)."""
    nvml = _nvml()
    if nvml is None:
        return _DriverFacts()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return _DriverFacts(used, *_pcie(nvml, handle))
    except nvml.NVMLError:
        return _DriverFacts()
    finally:
        nvml.nvmlShutdown()


def _pcie(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Generation and width at their best: the current ones drop while the device idles."""
    try:
        generation = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        return generation, int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    except nvml.NVMLError:
        return None, None


def _nvml() -> Any | None:
    """The driver's library, initialised (the caller shuts it down); None without one."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _as_text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def peak_allocated_bytes(device: torch.device) -> int:
    """The most that torch's allocator held at once, as `torch.cuda.max_memory_allocated` says it; that makes
    a flat list of all statistics first, which takes ten times as long."""
    import torch

    found = torch.cuda.memory_stats_as_nested_dict(device)
    return int(found["allocated_bytes"]["all"]["peak"]) if found else 0


def forget_peak(device: torch.device) -> None:
    """What was held before is another model's, or another budget's."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read_ns(device: torch.device, num_bytes: int) -> int:
    """Nanoseconds in which a device reads so much of its memory, at the rate that its driver gives; 0 where
    it gives none."""
    import torch

    facts = torch.cuda.get_device_properties(device)
    bytes_per_s = 2e3 * facts.memory_clock_rate * facts.memory_bus_width / 8  # kHz, two transfers each
    return round(1e9 * num_bytes / bytes_per_s) if bytes_per_s else 0
