"""Facts of the CPU and the host RAM, and the measured speed of a memory copy. Knows nothing of GPUs."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import psutil

from localmoe.hardware.cgroup import memory_limit

FLAGS_OF_INTEREST = ("avx2", "avx512f", "avx512_bf16", "amx_tile")
_COPY_BYTES = 64 << 20  # larger than most caches, quick to fill
_MIN_COPIES = 3
_MEASURE_S = 0.25


def cpu_name_and_flags() -> tuple[str, tuple[str, ...]]:
    """The CPU's name and which of FLAGS_OF_INTEREST it has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _name_elsewhere(), _flags_by_torch()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    present = set(fields.get("flags", "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, tuple(flag for flag in FLAGS_OF_INTEREST if flag in present)


def _name_elsewhere() -> str:
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            return done.stdout.strip() or platform.machine()
        except (OSError, subprocess.SubprocessError):
            return platform.machine()
    return platform.processor() or platform.machine()


def _flags_by_torch() -> tuple[str, ...]:
    """Where the system does not list them: the widest vectors that torch would use."""
    import torch

    widest = torch.backends.cpu.get_cpu_capability()
    if widest.startswith("AVX512"):
        return ("avx2", "avx512f")
    return ("avx2",) if widest == "AVX2" else ()


def core_counts() -> tuple[int, int]:
    """(physical, logical) cores that this process may run on."""
    logical = psutil.cpu_count(logical=True) or 1
    if hasattr(os, "sched_getaffinity"):
        logical = min(logical, len(os.sched_getaffinity(0)))
    physical = psutil.cpu_count(logical=False) or logical
    return min(physical, logical), logical


def ram_bytes() -> tuple[int, int]:
    """(total, available) host RAM, no more than the container allows."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limit = memory_limit()
    if limit is not None:
        total, available = min(total, limit.limit_bytes), min(available, limit.available_bytes)
    return total, available


def measure_memory_copy() -> float:
    """Bytes copied a second from RAM to RAM: the best of a quarter of a second's worth of copies."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)  # both written once, so that no page is first touched in a copy
    times: list[float] = []
    end = time.perf_counter() + _MEASURE_S
    while len(times) < _MIN_COPIES or time.perf_counter() < end:
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return _COPY_BYTES / max(min(times), 1e-9)
