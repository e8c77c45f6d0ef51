"""What happens during an answer, as told to prefetch policies. Plain facts; a policy answers with requests.

Within a step come StepStarted, then DraftRouted for each drafted token and layer, DraftFinished, then for
each layer LayerDemanded and LayerFinished, then StepFinished. Plain decoding is a step with draft_length 0. A
prompt arrives as PrefillStarted followed by LayerDemanded / LayerFinished for each chunk and layer.

Where whole passes run on a GPU without the host, it hears of all layers at once: TokenRouted instead of a
token's DraftRouted events, PassRouted after a target pass instead of its LayerDemanded / LayerFinished
events. Policies that need the layers' own events say so (prefetch.policy).

Events that only some policies ask for: NextGateGuessed, once a layer of a target pass, right after what that
layer misses was asked for; RatesMeasured, when what was measured has changed noticeably.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localmoe.core.types import ExpertKey


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """A chunk of the prompt is about to run through the target."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step begins; up to `draft_length` tokens will be drafted."""

    step: int
    draft_length: int


@dataclass(frozen=True, slots=True)
class DraftRouted:
    """The draft's router chose `experts` for window token `token` at `layer`; confidences are its weights."""

    token: int
    layer: int
    experts: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenRouted:
    """The draft's router chose experts[l] with weights confidences[l] for window token `token`, at every
    layer.

    Attributes:
        experts: int (L, K); an index outside the experts means "none".
        confidences: float (L, K).
        last: no further token is drafted, as far as is known: a step may draft fewer than it might have.
    """

    token: int
    experts: NDArray[np.int32]
    confidences: NDArray[np.float32]
    last: bool = False


@dataclass(frozen=True, slots=True)
class PassRouted:
    """A target pass is over; demanded[l, e] says whether it asked for expert e of layer l. counts: how many
    of its tokens did, which is told of a prompt's passes."""

    demanded: NDArray[np.bool_]
    counts: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class DraftFinished:
    """All tokens of the step are drafted; the verify pass comes next. looked_up: no pass was run for them, so
    that they tell nothing of what drafting takes."""

    drafted: int
    looked_up: bool = False


@dataclass(frozen=True, slots=True)
class LayerDemanded:
    """The target asks for these distinct experts of a layer, now."""

    layer: int
    experts: tuple[int, ...]
    num_tokens: int
    counts: tuple[int, ...] = ()  # tokens that chose each; empty: not told


@dataclass(frozen=True, slots=True)
class NextGateGuessed:
    """The gate of MoE layer `layer`, applied to the router input of the layer before it, would choose these.

    Attributes:
        experts: distinct, the most wanted first.
        weights: sum over the pass's tokens of the gate's weight for each, descending.
        num_tokens: tokens of the pass.
    """

    layer: int
    experts: tuple[int, ...]
    weights: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LayerFinished:
    """The target is done with a layer."""

    layer: int


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The verify pass is over; `accepted` of `drafted` tokens were kept. draft_token_s: what drafting one
    took by the device's clock; None: when policies heard of them tells it."""

    drafted: int
    accepted: int
    draft_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds, of which each may be unknown (None): to copy one expert to the device, to draft one token (all
    layers), for one layer of a target pass when nothing is waited for, of the host to ask for one copy.
    cpu_helps: the CPU computes part of what a pass misses while the link brings the rest, so that the link
    has no time for copies then."""

    copy_s: float | None = None
    draft_token_s: float | None = None
    target_layer_s: float | None = None
    cpu_helps: bool = False
    issue_s: float | None = None

    @property
    def copies_pay(self) -> bool:
        """Whether a copy spares the link more time than asking for it takes the host, as far as is known."""
        return self.copy_s is None or self.issue_s is None or self.issue_s < self.copy_s


NOTHING_MEASURED = Rates()


@dataclass(frozen=True, slots=True)
class RatesMeasured:
    """What this machine takes, as measured now."""

    rates: Rates


Event = (
    PrefillStarted
    | StepStarted
    | DraftRouted
    | TokenRouted
    | DraftFinished
    | LayerDemanded
    | NextGateGuessed
    | LayerFinished
    | PassRouted
    | StepFinished
    | RatesMeasured
)


class PrefetchRequest(NamedTuple):
    """A policy's wish: have `key` in a slot. Smaller `deadline` is copied first (use the layer that needs
    it first)."""

    key: ExpertKey
    deadline: float


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """A copy of `key` needs a slot.

    Attributes:
        candidates: experts that may be evicted, least recently used first.
        num_free: free slots.
        layer_slots: slots that the key's layer holds now.
        is_demand: the target waits for it (otherwise a prefetch).
    """

    key: ExpertKey
    candidates: Sequence[ExpertKey]
    num_free: int
    layer_slots: int
    is_demand: bool
