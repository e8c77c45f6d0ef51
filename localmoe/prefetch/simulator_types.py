"""What a simulation is given and what it counts: plain values. Simulates nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localmoe.core.stats import GenerationCounters

Experts = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that run through the target before anything is decoded. target: (n, L, K)."""

    target: Experts


@dataclass(frozen=True, slots=True)
class Window:
    """One step: what was drafted, and the n tokens that the target verifies, one more than were drafted.

    Attributes:
        draft: (d, L, K), the draft's routing of the first d window tokens, all but the last or all; d is 0
            without a self-draft.
        confidences: float32 (d, L, K).
        target: (n, L, K).
        accepted: drafted tokens that are kept.
        guesses: (n, L, K), what gate l makes of layer l - 1's router input; None: not known. Row 0 of the
            layers is not used.
    """

    draft: Experts
    confidences: NDArray[np.float32]
    target: Experts
    accepted: int
    guesses: Experts | None = None

    @property
    def drafted(self) -> int:
        """Tokens that were proposed."""
        return len(self.target) - 1


@dataclass(frozen=True, slots=True)
class Lane:
    """A CPU that computes missing experts beside the link.

    Attributes:
        first_s: an expert, for one token. further_s: for each further one.
        handover_s: of a layer's job.
        always: whether it is not tried out if passes are faster without (experts.lane_trial).
    """

    first_s: float
    further_s: float
    handover_s: float
    always: bool = False

    def seconds(self, tokens: int) -> float:
        """Of an expert."""
        return self.first_s + (tokens - 1) * self.further_s


@dataclass(frozen=True, slots=True)
class Disk:
    """All experts, of which RAM holds some.

    Attributes:
        ram_experts: how many, as many as a layer has at least.
        read_bytes: of an expert, in whole pages. read_s: how long that takes, beside others.
        start_s: how much longer where no other is read.
    """

    ram_experts: int
    read_bytes: int
    read_s: float
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Shape and rates of what is simulated. Seconds are of the model alone, waiting apart.

    Attributes:
        num_layers, num_experts, experts_per_token, num_slots: as in CacheShape.
        expert_bytes: what one copy moves.
        copy_s: how long it takes.
        draft_token_s: one draft pass.
        layer_s: a layer of a target pass without its experts.
        expert_s: each distinct expert of it, read from its slot.
        step_s: what else a step takes.
        start_s: until a copy starts that finds nothing running; layer by layer only.
        whole_passes: the host hears of passes before and after them only, as on a GPU; else layer by layer.
        lane: the CPU's; of whole passes only. None: it computes no experts.
        disk: where experts lie that come to the lane, or, layer by layer, to the CPU that computes all, which
            has no slots then. None: RAM holds all.
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    num_slots: int
    expert_bytes: int
    copy_s: float
    draft_token_s: float
    layer_s: float
    expert_s: float
    step_s: float = 0.0
    start_s: float = 0.0
    whole_passes: bool = True
    lane: Lane | None = None
    disk: Disk | None = None

    @property
    def in_place(self) -> bool:
        """Whether the CPU computes all experts where they lie, and there are no slots."""
        return self.disk is not None and not self.whole_passes


@dataclass(slots=True)
class Tally:
    """What a simulation counts, beside the counters of a real answer.

    Attributes:
        counters: as an engine's; times are simulated.
        copies: experts that were moved while decoding, and parts of such.
        reads: experts that were read from the disk meanwhile.
        demands: bool (L, E) of each prompt and step in order, for the offline optimum.
        counted: whether each of them is a step that was counted.
    """

    counters: GenerationCounters = field(default_factory=GenerationCounters)
    copies: float = 0
    reads: int = 0
    demands: list[NDArray[np.bool_]] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)

    @property
    def num_demands(self) -> int:
        """Experts that counted steps asked for."""
        counters = self.counters
        return counters.hits + counters.late + counters.misses + counters.computed
