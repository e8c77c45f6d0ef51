"""How much RAM this process and all others hold. Shows nothing."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from localmoe.hardware.cpu import ram_bytes

_STEP = 16 << 20  # bytes: not every breath of a computer is news


@dataclass(frozen=True, slots=True)
class HostMemory:
    """RAM in bytes, in steps of 16 MiB; as much as the container allows.

    Attributes:
        own: resident in this process, experts and all.
        others: of other programs and the system; what they can give up is free.
    """

    own: int
    others: int
    total: int

    @classmethod
    def now(cls) -> HostMemory:
        """Takes some tens of microseconds."""
        total, available = ram_bytes()
        own = int(psutil.Process().memory_info().rss)
        others = max(0, total - available - own)
        return cls(_stepped(own), _stepped(others), total)


def _stepped(num_bytes: int) -> int:
    return -(-num_bytes // _STEP) * _STEP
