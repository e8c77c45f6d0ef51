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


class LoadWatch:
    """How busy the machine is while a run goes on: times are to be read with it. Call it now and then."""

    def __init__(self) -> None:
        self._cores = core_counts()[1]
        self._begin = self._highest = _load()

    def __call__(self) -> str:
        """For people, up to now."""
        now = _load()
        if now is None or self._begin is None or self._highest is None:
            return "load not known"
        self._highest = max(self._highest, now)
        # a run itself may keep every core busy
        busy = self._begin > 0.5 * self._cores or self._highest > 1.5 * self._cores
        warning = ": OTHER PROGRAMS WERE RUNNING, so times are not to be trusted" if busy else ""
        return f"load average {self._begin:.1f} to {self._highest:.1f} on {self._cores} cores{warning}"


def _load() -> float | None:
    """Of the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
