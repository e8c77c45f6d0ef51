"""How a target pass on the device found its experts, for policies and statistics. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localmoe.kernels.residency import CPU, HIT, LATE, MISS, MISS_KEPT, MISS_REPLACED


@dataclass(frozen=True, slots=True)
class PassReport:
    """How a target pass found its experts, bool (L, E) each. computed: by the CPU, in whole; one that it
    computed a part of is a miss."""

    hits: NDArray[np.bool_]
    late: NDArray[np.bool_]
    misses: NDArray[np.bool_]
    computed: NDArray[np.bool_]

    @property
    def demanded(self) -> NDArray[np.bool_]:
        """All that the pass asked for."""
        return self.hits | self.late | self.misses | self.computed

    @classmethod
    def of(cls, kind: NDArray[np.int32]) -> PassReport:
        """From the kinds (L, E) of a pass's log."""
        missed = (kind == MISS) | (kind == MISS_KEPT) | (kind == MISS_REPLACED)
        return cls(kind == HIT, kind == LATE, missed, kind == CPU)
