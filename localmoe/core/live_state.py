"""What an engine looks like at one moment, for whoever shows it. Measures and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LiveState:
    """A snapshot.

    Attributes:
        resident: bool (L, E), in a slot now (on a GPU: or on its way there).
        heat: float32 (L, E), share of the recent passes that asked for each expert, see core.demands.
        h2d_bytes: copied to the device since the slots were made.
        at_s: time.perf_counter of this snapshot.
        link_bytes_per_s: what one copy was measured at; None before the first one.
    """

    resident: NDArray[np.bool_]
    heat: NDArray[np.float32]
    h2d_bytes: int
    at_s: float
    link_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class PromptState:
    """How far a prompt is, of which no token was written yet.

    Attributes:
        tokens: to be read, without those that were held from before.
        read: of them, in passes that have ended.
        disk_bytes: of experts that were read from the disk meanwhile.
        images: pictures that the vision encoder has to read before all that.
    """

    tokens: int
    read: int
    disk_bytes: int
    images: int = 0


@dataclass(frozen=True, slots=True)
class ReuseBound:
    """What an answer's decode steps asked for, and the most of it that can be met from slots without a copy,
    from the slots as the answer found them (prefetch.optimum).

    Attributes:
        demands: as (step, layer, distinct expert).
        reusable: of them, by the offline optimum.
        fetched: experts that were copied during these steps or computed on the CPU, parts counted as parts;
            None if these are only the first steps of a long answer.
    """

    demands: int
    reusable: int
    fetched: float | None

    @property
    def best(self) -> float:
        """The largest share of the demands that any cache of so many slots meets without a copy."""
        return self.reusable / self.demands

    @property
    def reached(self) -> float | None:
        """The share of the demands for which nothing was fetched; prefetches that nobody used count against
        it."""
        return None if self.fetched is None else max(0.0, 1.0 - self.fetched / self.demands)
