"""The CPU lane's words on the device, and the rates by which passes divide work, uploaded before each pass.
Measures and decides nothing.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.experts.rest_block import RestBlock
from localmoe.kernels.lanes import FAILED, FORETOLD, LANE_RATES, LANE_WORDS, POSTED, WAITED, LaneView
from localmoe.kernels.mailbox import Mailbox
from localmoe.kernels.mirror import Mirror

PATIENCE = (
    2_000_000  # looks at the mailbox, of a microsecond or more over PCIe, before the lane counts as lost
)
_NUMBERS = 1 + (LANE_RATES + 1) // 2  # int64: the last copy issued, and float32 rates


@dataclass(frozen=True, slots=True)
class LaneRates:
    """Microseconds: to hand a job over; of an expert on the CPU for one token, and for each further one; of
    an expert over the link; of the link, that the rest of an expert may take which the CPU computed a part
    of."""

    handover_us: float
    first_us: float
    further_us: float
    link_us: float
    rest_us: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneReport:
    """How far the lane is after a pass, since it was made: jobs posted, jobs that the GPU waited for, and
    whether one was not answered."""

    posted: int
    waited: int
    failed: bool


class LaneBlock:
    """Device tensors of the lane for passes over one mailbox."""

    def __init__(
        self,
        box: Mailbox,
        inner: list[int],
        quanta: list[int],
        num_experts: int,
        device: torch.device,
        patience: int = PATIENCE,
        rests: RestBlock | None = None,
    ) -> None:
        """inner: I of each MoE layer. quanta: inner columns by which its experts may be split, 0 for not at
        all. rests: by which those that are split are completed; None: they are not."""
        self._mirror = Mirror(_NUMBERS, device)
        numbers = self._mirror.words
        self.words = torch.zeros(LANE_WORDS, dtype=torch.int64, device=device)
        self._views = [
            LaneView(
                box.address, box.layout, layer, width, quantum, self.words, numbers[:1],
                numbers[1:].view(torch.float32), patience,
                torch.zeros(num_experts, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
                None if rests is None else rests.view(layer),
            )
            for layer, (width, quantum) in enumerate(zip(inner, quanta, strict=True))
        ]  # fmt: skip

    def view(self, layer: int) -> LaneView:
        """What the layer's kernels see."""
        return self._views[layer]

    def upload(self, issued: int, rates: LaneRates) -> None:
        """In stream order before the pass that comes next; one other may be under way. issued: number of the
        last copy."""
        host = self._mirror.host
        host[0] = issued
        host[1:].view(np.float32)[:LANE_RATES] = astuple(rates)
        self._mirror.upload()

    def restart(self, job: int, waited: int = 0) -> None:
        """Go on after job number `job`, which is answered, as is all before. waited: for so many."""
        self.words.zero_()
        self.words[POSTED], self.words[WAITED] = job, waited
        self.words[FORETOLD] = -1

    def numbers(self) -> Tensor:
        """int32 (3,), for `read`."""
        return self.words[: WAITED + 1].int()

    @staticmethod
    def read(numbers: NDArray[np.int32]) -> LaneReport:
        """The report of a pass, from its `numbers`."""
        return LaneReport(int(numbers[POSTED]), int(numbers[WAITED]), bool(numbers[FAILED]))
