"""What a kernel sees of the residency table, and how it reports what it found. No Triton, no decisions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# how an expert was found: the low byte of a log entry (0: not asked for); the rest holds the detail
HIT, LATE, MISS, MISS_KEPT, MISS_REPLACED, CPU = 1, 2, 3, 4, 5, 6
ON_HOST = -1  # ticket of an expert whose address is its host record
ON_DISK = -2  # of one that no kernel can read: the CPU's lane computes it
WAITED_NS, CLOCK_WORDS = 2, 4  # see kernels.gpu.waiting; as many as keep all layers aligned alike


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """One layer's rows of the residency table on the device. A pass that fills or takes slots keeps address,
    ticket and landing up to date, so that another one may follow at once.

    Attributes:
        address: int64 (E,), where the weights lie: a slot or the pinned host record; or zeros (ON_DISK).
        home: int64 (E,), the host records.
        ticket: int64 (E,), ON_HOST, ON_DISK, or the number of the copy that fills the slot (0: nothing to be
            waited for).
        score: float32 (E,), what is kept longest; the lowest makes room, an infinite one never does.
        landing: int64 (R,), free slots that this layer may fill with what it misses; 0 ends the list.
        done: int64 (1,), number of the last copy that is complete. Written by the copy stream.
        clock: int64 (CLOCK_WORDS,), nanoseconds: when the layer's experts began; what they take at least, -1
            if all are here; how long they were waited for. None where nobody measures that.
        log: int32 (E,), how each expert was found: kind | detail << 8; detail of MISS_KEPT is the index
            in `landing` as it was, of MISS_REPLACED the expert whose slot was taken, of MISS the inner
            columns that the CPU computed; CPU: it computed all of them.
        expert_ns: what reading an expert from VRAM takes.
    """

    address: Tensor
    home: Tensor
    ticket: Tensor
    score: Tensor
    landing: Tensor
    done: Tensor
    log: Tensor
    clock: Tensor | None = None
    expert_ns: int = 0
