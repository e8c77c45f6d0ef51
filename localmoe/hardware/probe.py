"""Puts together what the machine has. Decides nothing from it; measures only when asked."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from localmoe.core.home import localmoe_home, models_home
from localmoe.hardware.cpu import core_counts, cpu_name_and_flags, measure_memory_copy, ram_bytes
from localmoe.hardware.cuda import probe_gpus
from localmoe.hardware.facts import Gpu, Hardware

__all__ = ["Gpu", "Hardware", "disk_free_bytes", "probe_hardware"]


def probe_hardware(*, measure: bool = True) -> Hardware:
    """Look at the machine. Measuring takes under a second on the CPU and under three with a GPU; it needs
    128 MiB of RAM and, on each GPU, 512 MiB that are given back."""
    import torch

    gpus, gpu_note = probe_gpus(measure=measure)
    cpu_name, cpu_flags = cpu_name_and_flags()
    physical, logical = core_counts()
    ram_total, ram_available = ram_bytes()
    return Hardware(
        gpus=gpus,
        gpu_note=gpu_note,
        cpu_name=cpu_name,
        physical_cores=physical,
        logical_cores=logical,
        cpu_flags=cpu_flags,
        ram_total_bytes=ram_total,
        ram_available_bytes=ram_available,
        disk_free_bytes=disk_free_bytes(models_home()),
        memory_copy_bytes_per_s=measure_memory_copy() if measure else None,
        platform=platform.platform(),
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        home_free_bytes=_free_elsewhere(models_home(), localmoe_home() / "drafts"),
    )


def disk_free_bytes(folder: Path) -> int:
    """Free bytes on the disk where a folder is or would be made; 0 if that cannot be told."""
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return 0


def _free_elsewhere(folder: Path, other: Path) -> int | None:
    """Free bytes on the disk of the other one; None if it is the same disk, or cannot be told."""
    try:
        here, there = os.stat(_existing(folder)), os.stat(_existing(other))
    except OSError:
        return None
    return None if here.st_dev == there.st_dev else disk_free_bytes(other)


def _existing(folder: Path) -> Path:
    place = folder.absolute()
    while not os.path.isdir(place) and place != place.parent:
        place = place.parent
    return place
