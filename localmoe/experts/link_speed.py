"""How long one copy of an expert to the device takes, measured once before anything else uses the link.
Decides nothing.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from localmoe.experts.slots import DeviceSlots

_ROUNDS = 3
_ROUND_BYTES = 64 << 20  # copied in a round, or one record if that is larger


def measure_copy_s(record: Tensor, slots: DeviceSlots) -> float | None:
    """Seconds, the least of a few rounds; None where the device is the CPU, which has no link.

    Args:
        record: in pinned host memory.
        slots: of which the first holds nothing yet; it is overwritten.
    """
    if slots.device.type != "cuda":
        return None
    copies = max(1, _ROUND_BYTES // (record.numel() * record.element_size()))
    rounds_s = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(slots.device)
        started = time.perf_counter()
        for _ in range(copies):
            slots.write(0, record)
        torch.cuda.synchronize(slots.device)
        rounds_s.append((time.perf_counter() - started) / copies)
    return min(rounds_s)
