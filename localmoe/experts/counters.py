"""What has been copied since load. Counts, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounters:
    """Totals since load; stall_s is None where waiting happens inside kernels and no clock is there.
    disk_bytes: of experts that were read from the disk, in disk_busy_s."""

    h2d_bytes: int = 0
    prefetched: int = 0
    wasted: int = 0
    stall_s: float | None = 0.0
    cpu_bytes: int = 0
    cpu_busy_s: float = 0.0
    cpu_jobs: int = 0
    cpu_waited: int = 0
    cpu_ahead_bytes: int = 0
    disk_bytes: int = 0
    disk_busy_s: float = 0.0
