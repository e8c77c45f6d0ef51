"""By which rates passes of one kind divide work between link and CPU: as measured, corrected by what passes
showed since. Measures nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum

from localmoe.experts.lane_block import LaneRates

_GAIN = 0.15  # of a correction, when all jobs of a pass were late or none was
_MOST = 3.0  # corrections stay within this factor of what was measured


class LanePass(Enum):
    """What a pass that takes the CPU's lane is, as far as it matters for what the CPU is worth."""

    WINDOW = "a few tokens"
    PROMPT = "a prompt's"
    UNIT = "a prompt's, with the processor's matrix unit"


class LaneBalance:
    """Of one model's lane."""

    def __init__(self, measured: LaneRates) -> None:
        self.measured = measured
        self._correction = 0.0  # log of what the CPU's measured costs are multiplied by

    @property
    def rates(self) -> LaneRates:
        """As passes showed them since."""
        factor, measured = math.exp(self._correction), self.measured
        return replace(
            measured,
            handover_us=measured.handover_us * factor,
            first_us=measured.first_us * factor,
            further_us=measured.further_us * factor,
        )

    def learn(self, jobs: int, waited: int) -> None:
        """A pass posted so many jobs, and the GPU waited for so many of them."""
        if jobs > 0:
            # both lanes end together where the GPU waits for every other job
            step = _GAIN * (2 * waited / jobs - 1)
            limit = math.log(_MOST)
            self._correction = min(max(self._correction + step, -limit), limit)
