"""Copy one host record into a slot and return when it is there. Two links: plain (CPU, optionally slowed
down to an emulated speed) and CUDA (own stream). Decides neither order nor place.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from localmoe.experts.slots import DeviceSlots

_SHORT_S = 1e-2  # of sleeps shorter than this the overshoot is noticed
_LATE_S = 1e-3  # most that is made up for
_CLOSE_S = 2e-4  # copies this close to each other are a stream


class Link(Protocol):
    """Moves records from host to device."""

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> None:
        """Copy and wait until the slot may be read."""

    def after_read(self, slot: int) -> None:
        """The computation that reads a slot has been issued; a later copy into it must wait for it."""


class HostLink:
    """Memory copy on CPU. With `bytes_per_s`, each copy takes at least its bytes over that rate, as on a
    real link."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # when the emulated link has finished all earlier copies
        self._returned_at = 0.0  # when the last copy returned,
        self._late_s = 0.0  # and how long after the link was free

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> None:
        """Copy; the caller's thread sleeps for what is left of the emulated time."""
        started = time.perf_counter()
        slots.write(slot, record)
        if self._bytes_per_s is None:
            return
        duration = record.numel() * record.element_size() / self._bytes_per_s
        # short sleeps overshoot by a good part of themselves; where copies follow each other closely, the
        # next one makes up for it, so that the long-run rate is the link's
        follows_closely = started - self._returned_at < _CLOSE_S and duration < _SHORT_S
        begun = max(self._free_at, started - self._late_s) if follows_closely else max(self._free_at, started)
        self._free_at = begun + duration
        remaining = self._free_at - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        self._returned_at = time.perf_counter()
        self._late_s = min(self._returned_at - self._free_at, _LATE_S)

    def after_read(self, slot: int) -> None:
        """Computation on CPU has ended when the call returns: nothing to remember."""


class CudaLink:
    """Asynchronous copies on a stream of their own, ordered after the last reader of the slot."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._last_read: dict[int, torch.cuda.Event] = {}

    def copy(self, record: Tensor, slots: DeviceSlots, slot: int) -> None:
        """Copy and wait; only the worker thread blocks."""
        with torch.cuda.stream(self._stream):
            event = self._last_read.pop(slot, None)
            if event is not None:
                self._stream.wait_event(event)
            slots.write(slot, record)
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()

    def after_read(self, slot: int) -> None:
        """Remember the reader, on the stream that it was issued to."""
        event = torch.cuda.Event()
        event.record()
        self._last_read[slot] = event
