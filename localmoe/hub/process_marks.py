"""Names a process so that it is not taken for a later one with its id. Starts and ends none."""

from __future__ import annotations

import os

import psutil

_START_TOLERANCE_MS = 2000  # a process's start time is derived from clocks that may be adjusted


def own_mark() -> str:
    """ "PID-START" of this process, the start in ms since 1970."""
    return f"{os.getpid()}-{_start_ms(os.getpid())}"


def is_running(pid: int, start_ms: int) -> bool:
    """Whether the very process that was given this id at that time still runs."""
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        return abs(_start_ms(pid) - start_ms) <= _START_TOLERANCE_MS
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _start_ms(pid: int) -> int:
    return int(psutil.Process(pid).create_time() * 1000)
