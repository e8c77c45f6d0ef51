"""Fill the counters that come from clocks and from the expert memory. Counts nothing that a layer counts
itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from localmoe.core.stats import GenerationCounters
from localmoe.experts.counters import TransferCounters


class Meter:
    """One answer's clock. `update` is called after each step."""

    def __init__(
        self,
        counters: GenerationCounters,
        totals: Callable[[], TransferCounters],
        peak_bytes: Callable[[], int],
        started: float,
    ) -> None:
        self.counters = counters
        self._totals = totals
        self._peak_bytes = peak_bytes
        self._started = started
        self._first_token_at: float | None = None
        self._at_start = totals()
        self._at_first = self._at_start

    def update(self) -> None:
        """Bring times, copies and memory up to now; the first call is the first token."""
        counters, now = self.counters, time.perf_counter()
        totals = self._totals()
        counters.peak_device_bytes = self._peak_bytes()
        counters.disk_busy_s = totals.disk_busy_s - self._at_start.disk_busy_s
        counters.prefetched = totals.prefetched - self._at_start.prefetched
        counters.wasted = totals.wasted - self._at_start.wasted
        if self._first_token_at is None:
            if not counters.new_tokens:  # stopped before the first token
                self._count_prompt(totals)
                return
            self._first_token_at, self._at_first = now, totals
            counters.ttft_s = now - self._started
            self._count_prompt(totals)
        counters.decode_s = now - self._first_token_at
        counters.decode_h2d_bytes = totals.h2d_bytes - self._at_first.h2d_bytes
        counters.decode_disk_bytes = totals.disk_bytes - self._at_first.disk_bytes
        waited, before = totals.stall_s, self._at_first.stall_s
        counters.stall_s = None if waited is None or before is None else waited - before
        counters.cpu_bytes = totals.cpu_bytes - self._at_first.cpu_bytes
        counters.cpu_busy_s = totals.cpu_busy_s - self._at_first.cpu_busy_s
        counters.cpu_jobs = totals.cpu_jobs - self._at_first.cpu_jobs
        counters.cpu_waited = totals.cpu_waited - self._at_first.cpu_waited
        counters.cpu_ahead_bytes = totals.cpu_ahead_bytes - self._at_first.cpu_ahead_bytes

    def _count_prompt(self, totals: TransferCounters) -> None:
        self.counters.prefill_h2d_bytes = totals.h2d_bytes - self._at_start.h2d_bytes
        self.counters.prefill_disk_bytes = totals.disk_bytes - self._at_start.disk_bytes
