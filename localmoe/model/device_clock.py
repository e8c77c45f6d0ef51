"""Read numbers and times back from a GPU without stopping it earlier than needed."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Landing:
    """An int32 tensor on its way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = numbers.clone()

    def wait(self) -> NDArray[np.int32]:
        """The numbers, once they are here."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


class Clock:
    """Seconds between points of the computation, on a GPU measured there."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._points: list[torch.cuda.Event | float] = []
        self.tick()

    def tick(self) -> None:
        """Mark what has been issued so far."""
        if not self._on_gpu:
            self._points.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._points.append(event)

    @property
    def began(self) -> torch.cuda.Event | float:
        """The first point."""
        return self._points[0]

    def seconds(self) -> list[float]:
        """From each point to the next. What comes before the last point is over; that the point itself is
        reached shows a moment later, which is waited for."""
        last = self._points[-1]
        if not isinstance(last, float):
            last.synchronize()
        pairs = zip(self._points, self._points[1:], strict=False)
        return [_between(a, b) for a, b in pairs]


def _between(a: torch.cuda.Event | float, b: torch.cuda.Event | float) -> float:
    if isinstance(a, float) and isinstance(b, float):
        return b - a
    assert isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event)
    return float(a.elapsed_time(b)) / 1e3
