"""What a job of the CPU lane waited for that a GPU gave up on, as its mailbox shows it. Decides nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localmoe.kernels.mailbox import EXPERT, HEAD_ENTRIES, HEAD_LAYER, Mailbox


def why_late(box: Mailbox, posted: int, addresses: NDArray[np.int64] | None) -> str:
    """One clause.

    Args:
        posted: number of the GPU's last job.
        addresses: (L, E), where records lie in RAM, 0 for those on the disk alone; None: all are in RAM.
    """
    if int(box.posted[0]) < posted:
        return "the GPU's job did not arrive"
    layer, count = int(box.head[HEAD_LAYER]), int(box.head[HEAD_ENTRIES])
    if addresses is not None and int(box.answered[0]) < posted:
        absent = int((addresses[layer, box.entries[EXPERT, :count]] == 0).sum())
        if absent:
            return f"the disk did not bring {absent} of {count} experts of layer {layer} in time"
    return "the CPU did not answer in time"
