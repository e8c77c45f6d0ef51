"""Experts of a job of the CPU lane whose records are not in RAM yet, as all of the model lie on the disk: a
job's owner puts them behind the others and says so, and threads wait for what comes to compute with. Reads
nothing (experts.disk_lane does).
"""

from __future__ import annotations

from typing import Any

from numba import njit

from localmoe.kernels.cpu.atoms import CAN_NAP, compiled, load, nap, pause, store, ticks
from localmoe.kernels.cpu.control import ABSENT, HOLD, STOP
from localmoe.kernels.mailbox import BEGIN, END, EXPERT, HEAD_ENTRIES, HEAD_LAYER, SHARE

STOPPED, PARKED = 0, -1
_NAP_US = 20
_LOOKS = 64  # before a nap


@compiled
def address_at(records: Any, layer: int, expert: int) -> int:
    """Where the word lies that has the record's address. records: see worker."""
    at: int = records.ctypes.data + 8 * (layer * records.shape[2] + expert)
    return at


@compiled
def absent_last(job: int, base: int, head: Any, entries: Any, records: Any) -> None:
    """Reorder a job's entries, before it is cut: those whose records are there come first. If others are
    left, that is said, and somebody brings them."""
    layer, count = head[HEAD_LAYER], head[HEAD_ENTRIES]
    here = 0
    for i in range(count):
        if load(address_at(records, layer, entries[EXPERT, i])) != 0:
            if i != here:
                for field in (EXPERT, BEGIN, END, SHARE):
                    kept = entries[field, i]
                    entries[field, i] = entries[field, here]
                    entries[field, here] = kept
            here += 1
    if here < count:
        store(base + 8 * ABSENT, job)


@compiled
def record_of(records: Any, layer: int, expert: int, base: int) -> int:
    """Address of a record, once it is there; 0 where threads are to stop."""
    at = address_at(records, layer, expert)
    looks = 0
    while True:
        found: int = load(at)
        if found != 0:
            return found
        if load(base + 8 * STOP) != 0:
            return 0
        looks += 1
        if CAN_NAP and looks > _LOOKS:
            nap(_NAP_US)
        else:
            pause()


@njit(nogil=True)
def wait_for_absent(control: Any, seen: int, park_ticks: int) -> int:
    """Number of a job, beyond `seen`, of which something is absent; STOPPED, or PARKED if none came for so
    long while the HOLD word was 0. control: see worker."""
    base = control.ctypes.data
    quiet = ticks()
    while load(base + 8 * STOP) == 0:
        job: int = load(base + 8 * ABSENT)
        if job > seen:
            return job
        if ticks() - quiet > park_ticks and load(base + 8 * HOLD) == 0:
            return PARKED
        if CAN_NAP:
            nap(_NAP_US)
        else:
            pause()
    return STOPPED
