"""Who makes room. Evicts nobody."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey


def worst_key(scores: NDArray[np.float32], layer: int | None) -> ExpertKey | None:
    """The expert of the lowest of scores (L, E), of a layer or of all; None where all are infinite."""
    if layer is None:
        key = ExpertKey(*divmod(int(scores.argmin()), scores.shape[1]))
    else:
        key = ExpertKey(layer, int(scores[layer].argmin()))
    return key if np.isfinite(scores[key]) else None
