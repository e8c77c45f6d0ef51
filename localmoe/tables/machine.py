"""One line on the machine that figures come from, and how busy it was. Measures nothing."""

from __future__ import annotations

import os

import torch

from localmoe import __version__
from localmoe.hardware.cpu import core_counts, cpu_name_and_flags


def machine_line(*, with_gpu: bool) -> str:
    """For people, and to tell one machine's results from another's."""
    name, _ = cpu_name_and_flags()
    cores = core_counts()[1]
    gpu = f", {torch.cuda.get_device_name(0)}" if with_gpu else ""
    return f"{cores} cores of {name}{gpu}, torch {torch.__version__}, localmoe {__version__}"


def load_line() -> str:
    """What else ran when a run began: times are to be read with it."""
    if not hasattr(os, "getloadavg"):
        return "load not known"
    cores = core_counts()[1]
    load = os.getloadavg()[0]
    busy = ": other programs were running, so times are not to be trusted" if load > 0.5 * cores else ""
    return f"load average {load:.1f} on {cores} cores when it began{busy}"
