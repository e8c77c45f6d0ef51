"""How a target pass on the device found its experts, for policies and statistics. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localmoe.kernels.residency import CPU, HIT, LATE, MISS, MISS_KEPT, MISS_REPLACED


@dataclass(frozen=True, slots=True)
class PassReport:
    """How a target pass found its experts, bool (L, E) each. computed: by the CPU, in whole; one that it
    computed a part of is a miss. split: int (L,), inner columns that the CPU computed of misses which are not
    completed afterwards."""

    hits: NDArray[np.bool_]
    late: NDArray[np.bool_]
    misses: NDArray[np.bool_]
    computed: NDArray[np.bool_]
    split: NDArray[np.int64]

    @property
    def demanded(self) -> NDArray[np.bool_]:
        """All that the pass asked for."""
        return self.hits | self.late | self.misses | self.computed

    def crossed(self, inner: NDArray[np.int64]) -> NDArray[np.float64]:
        """(L,): experts that came over the link for the pass's misses. inner: (L,), columns of an expert."""
        experts: NDArray[np.float64] = self.misses.sum(axis=1) - self.split / inner
        return experts

    @classmethod
    def of(cls, log: NDArray[np.int32]) -> PassReport:
        """From a pass's log, int (L, E), see kernels.residency."""
        kind = log & 0xFF
        missed = (kind == MISS) | (kind == MISS_KEPT) | (kind == MISS_REPLACED)
        split = np.where(kind == MISS, log >> 8, 0).sum(axis=1)
        return cls(kind == HIT, kind == LATE, missed, kind == CPU, split)
