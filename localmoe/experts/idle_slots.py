"""Fill free slots while nobody asks for anything, so that the first answers find experts there. Nothing makes
room for these.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey
from localmoe.experts.device_memory import DeviceExpertMemory

_AT_ONCE, _BYTES_AT_ONCE = 16, 256 << 20  # for these, an answer that is asked for meanwhile waits


def fill_slots(memory: DeviceExpertMemory) -> bool:
    """Copy some experts into free slots, and wait for that. False: no more are to be had.

    Raises:
        LocalMoeError: one cannot be read.
    """
    if memory.closed or not memory.may_prefetch or not memory.num_free:
        return False
    slot_bytes = memory.slots.num_bytes // memory.slots.num_slots
    most = max(1, min(_AT_ONCE, _BYTES_AT_ONCE // slot_bytes, memory.num_free))
    here = memory.residency()
    keys = best_for_layers(memory.at_hand() & ~here, memory.likely(), memory.held(), most)
    for key in keys:
        memory.load(key, *memory.take_free(key.layer, here.shape[1], 1))
    memory.transfers.drain()
    return memory.filled() or bool(keys)


def best_for_layers(
    of: NDArray[np.bool_], worth: NDArray[np.float64], held: NDArray[np.int64], most: int
) -> list[ExpertKey]:
    """One after the other for the layer that holds fewest then, what is worth most.

    Args:
        of: (L, E), who may come. worth: (L, E). held: (L,), slots of each layer.
    """
    left, counts, found = np.where(of, worth, -np.inf), held.astype(np.float64), []
    for _ in range(min(most, int(of.sum()))):
        layer = int(np.where(np.isfinite(left).any(axis=1), counts, np.inf).argmin())
        key = ExpertKey(layer, int(left[layer].argmax()))
        found.append(key)
        left[key] = -np.inf
        counts[layer] += 1
    return found
