"""Names a process so that it is not taken for a later one with its id. Starts and ends none."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_START_TOLERANCE_MS = 2000  # a process's start time is derived from clocks that may be adjusted


def own_mark() -> str:
    """ "PID-START" of this process, START a whole number that no later process with its id has."""
    return f"{os.getpid()}-{_start(os.getpid())}"


def is_running(pid: int, start: int) -> bool:
    """Whether the very process that has this mark, or by that of an earlier version was started so many ms
    after 1970, still runs."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return start == _start(pid) or abs(int(process.create_time() * 1000) - start) <= _START_TOLERANCE_MS
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _start(pid: int) -> int:
    """On Linux the boot, and the kernel's ticks from it to the start: a time of day goes by the clock as
    it is set now, and is another one once somebody sets it. Elsewhere ms since 1970."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        boot = int(Path("/proc/sys/kernel/random/boot_id").read_bytes()[:8], 16)
    except (OSError, ValueError, IndexError):
        return int(psutil.Process(pid).create_time() * 1000)
    return boot * 10**12 + ticks
