"""What kernels see of the CPU lane: where jobs are posted, and by which rates work is divided. No Triton, no
decisions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localmoe.kernels.mailbox import MailboxLayout
from localmoe.kernels.rests import RestView

# places in `words`
POSTED, FAILED, WAITED, ARRIVED, FORETOLD = range(5)
LANE_WORDS = 5
HANDOVER_US, FIRST_US, FURTHER_US, LINK_US, REST_US = range(5)  # places in `rates`
LANE_RATES = 5


@dataclass(frozen=True, slots=True)
class LaneView:
    """The CPU lane on the device, as one layer sees it.

    Attributes:
        box: address of the mailbox, which the device can reach. layout: of the mailbox.
        layer: number of the MoE layer.
        inner: I. quantum: inner columns that an expert is split by; 0: experts stay whole.
        words: int64 (LANE_WORDS,): number of the last job; not 0 once a job was not answered (no more are
            posted);
            jobs that the GPU had to wait for; programs of `post` that are done; the expert that was foretold
            last, as layer << LAYER_SHIFT | expert, or -1.
        issued: int64 (1,), number of the last copy that was issued when the pass began.
        rates: float32 (LANE_RATES,), microseconds: to hand a job over; of an expert on the CPU for one token,
            and for each further one; of an expert over the link; of the link, that an expert's rest may take.
        patience: looks at the mailbox before a job counts as not answered.
        share: int32 (E,), inner columns of each expert that the CPU computes in the layer at hand.
        count: int32 (1,), experts in the job at hand.
        rest: by which passes complete an expert that is split; None: they do not.
    """

    box: int
    layout: MailboxLayout
    layer: int
    inner: int
    quantum: int
    words: Tensor
    issued: Tensor
    rates: Tensor
    patience: int
    share: Tensor
    count: Tensor
    rest: RestView | None = None
