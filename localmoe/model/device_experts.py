"""What a MoE layer's experts do where whole passes run on the GPU: packed codes when drafting, 16-bit weights
through the residency table in the target, and streamed or through the table for a long prompt.

Takes no part in prefetch or eviction, and never waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.stats import GenerationCounters
from localmoe.core.timeline import Timeline
from localmoe.core.types import Phase
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.prefill_stream import DryStream, ExpertGroup, PrefillStream
from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK
from localmoe.kernels.gpu.grouping import Groups, group_pairs
from localmoe.kernels.gpu.lowbit_experts import lowbit_moe
from localmoe.kernels.gpu.routed_experts import ExpertShape, combine, routed_experts, run_groups
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_reference import one_by_one
from localmoe.kernels.mirror import Mirror
from localmoe.kernels.rows import RowPadding
from localmoe.model.device_foresight import Foresight
from localmoe.model.device_lane import DeviceLane
from localmoe.model.device_mtp import DeviceMtp
from localmoe.model.device_rests import RestCopies
from localmoe.model.device_window import DeviceWindow
from localmoe.model.expert_module import expert_biases
from localmoe.model.prompt_ways import MOST_ASKED
from localmoe.model.routing_trace import RoutingRecorder
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.scheduler import Scheduler

WINDOW_ROWS = 16  # rows of a tile for a window
STREAM_ROWS = 64  # the same for a long prompt: what has no slot comes over the link once for so many
STREAM_SHARE = 128  # rows that a program takes there
# words of 32 bits that make whole 16 bytes: for what lies otherwise Triton has another kernel
_TOGETHER = 4
ALIGNED = 256  # bytes, to which parts of lent memory begin


@dataclass(slots=True)
class DevicePassState:
    """What the layers need to know of the pass that is running. One object, shared by all layers of a
    model."""

    memory: DeviceExpertMemory
    scheduler: Scheduler
    lookahead: LookaheadBuffer
    rows: RowPadding
    window: DeviceWindow
    draft: list[LowBitExperts] | None = None
    mtp: DeviceMtp | None = None  # drafts in its place
    lane: DeviceLane | None = None  # None: no expert is computed on the CPU
    lanes: str = "VRAM and PCIe"  # for people: where experts come from
    foresight: Foresight | None = None  # None: nothing is foretold of a layer before it begins
    rests: RestCopies | None = None  # None: without CPU lane
    ahead: bool = False  # whether that is worth it in the pass at hand: an expert may be missing
    phase: Phase = "prefill"
    stream: PrefillStream | DryStream | None = None  # of the long prompt that is running
    forced: Tensor | None = None  # int64 (T, L, K) in place of the routers' choices
    foretold: Tensor | None = None  # int64 (1, L, K) in place of what is foretold of them
    routed: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # layer -> (index, weights), last pass
    counters: GenerationCounters = field(default_factory=GenerationCounters)
    synthetic: SyntheticModel | None = None
    recorder: RoutingRecorder | None = None
    fused_draft: bool = True  # see core.switches
    experts_per_token: int = 1
    row_bytes: int = 0  # what experts compute of a token of a prompt, see `pair_bytes`
    prompt_rows: int = DEVICE_PREFILL_CHUNK  # of a prompt's pass that there is memory for
    timeline: Timeline | None = None  # told when things ran, while somebody wants to know

    @property
    def drafts(self) -> bool:
        """Whether there are draft passes."""
        return self.draft is not None or self.mtp is not None

    @property
    def lane_is_on(self) -> bool:
        """Whether the window's pass at hand takes the CPU lane."""
        return self.lane is not None and self.lane.on


def pair_bytes(shape: ExpertShape) -> int:
    """What an expert computes of a token of a prompt: the product of gate and up, and its output in
    float32."""
    return 2 * shape.inner + 4 * shape.hidden


class DeviceRoutedExperts:
    """Computes the routed experts of MoE layer `layer`."""

    def __init__(self, layer: int, module: Any, shape: ExpertShape, state: DevicePassState) -> None:
        self._layer = layer
        self._shape = shape
        self._state = state
        self._gate_up_bias, self._down_bias = expert_biases(module)
        # a streamed prompt's experts, group after group, and then their addresses
        words = 2 * _TOGETHER * state.memory.store.num_experts
        self._groups = Mirror(words, state.window.start.device)

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H), (T, K), (T, K) -> (T, H)."""
        state, layer = self._state, self._layer
        index = top_k_index if state.forced is None else state.forced[: hidden.shape[0], layer]
        state.routed[layer] = (index, top_k_weights)
        if state.phase == "draft":
            assert state.draft is not None, "no draft is loaded"
            run = lowbit_moe if state.fused_draft else one_by_one
            return run(hidden, state.draft[layer], index, top_k_weights, activation=self._shape.activation)
        if state.stream is not None:
            return self._streamed(state.stream, hidden, index, top_k_weights)
        asks = state.phase == "prefill"  # a prompt's pass, longer than a window
        residency = state.memory.block.view(layer)
        lane = state.lane.block.view(layer) if state.lane is not None and state.lane.on else None
        foresight = state.foresight if state.ahead and hidden.shape[0] == 1 else None
        stage = None if foresight is None or lane is not None else foresight.stage_of(layer)
        groups = group_pairs(index, state.window.live, residency, lane, stage, MOST_ASKED if asks else 0)
        if foresight is not None:
            self._foretell_next(foresight, hidden, lane)
        out = routed_experts(
            hidden, groups, index, top_k_weights, state.window.live, residency.done, self._shape,
            state.memory.store.num_experts, gate_up_bias=self._gate_up_bias, down_bias=self._down_bias,
            block_rows=STREAM_ROWS if asks else WINDOW_ROWS, lane=lane,
            before_waiting=None if state.lane is None or not asks else state.lane.wait_on_host,
        )  # fmt: skip
        if foresight is not None:
            foresight.use_link()
        if lane is not None and lane.rest is not None:
            assert state.rests is not None, "an expert that is to be completed would stay a part"
            state.rests.copy(lane.rest)
        return out

    def _foretell_next(self, foresight: Foresight, hidden: Tensor, lane: LaneView | None) -> None:
        """Beside this layer's experts."""
        state, following = self._state, self._layer + 1
        if self._layer == 0:
            foresight.begin()
        if following < state.memory.store.num_layers:
            forced = None if state.foretold is None else state.foretold[:, following]
            foresight.tell(following, hidden, state.memory.block.view(following), lane, forced)

    def _streamed(
        self, stream: PrefillStream | DryStream, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        tokens, top_k = index.shape
        num_experts = self._state.memory.store.num_experts
        chosen, order = index.reshape(-1).sort(stable=True)
        bounds = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=hidden.device)).int()
        pairs = order.int()
        inner, out = self._room(stream.lent, hidden, tokens * top_k)
        done = self._state.memory.block.done
        planned = stream.plan(self._layer)
        tiles = self._tiles(planned, bounds)
        for group, (begin, end, expert, address) in zip(
            stream.bring(self._layer, planned), tiles, strict=True
        ):
            assert len(group.experts) == len(expert)
            run_groups(
                hidden, Groups(pairs, begin, end, expert, address), top_k, done, self._shape, inner, out,
                self._gate_up_bias, self._down_bias, STREAM_ROWS, STREAM_SHARE,
            )  # fmt: skip
        return combine(out, index, weights, self._state.window.live, num_experts, hidden.dtype)

    def _tiles(self, planned: list[ExpertGroup], bounds: Tensor) -> list[tuple[Tensor, ...]]:
        """Ranges of pairs, experts and addresses of each group; bounds: int32 (E + 1,) of experts' pairs."""
        sizes = [len(group.experts) for group in planned]
        begins = list(accumulate((-(-size // _TOGETHER) * _TOGETHER for size in sizes), initial=0))
        room = begins[-1]
        host = self._groups.host
        host[: 2 * room] = 0
        for begin, size, group in zip(begins, sizes, planned, strict=False):
            host[begin : begin + size] = group.experts
            host[room + begin : room + begin + size] = group.addresses
        words = self._groups.upload(0, 2 * room)
        experts, addresses = words[:room], words[room:]
        of_all = bounds[experts], bounds[experts + 1], experts.int(), addresses
        return [
            tuple(words[begin : begin + size] for words in of_all)
            for begin, size in zip(begins, sizes, strict=False)
        ]

    def _room(self, lent: Tensor | None, hidden: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """For what experts compute of so many pairs of token and expert: (P, I), and float32 (P, H)."""
        width = hidden.shape[1]
        if lent is None:
            out = hidden.new_empty(pairs, width, dtype=torch.float32)
            return hidden.new_empty(pairs, self._shape.inner), out
        at, size = 4 * pairs * width, hidden.element_size() * pairs * self._shape.inner
        out = lent[:at].view(torch.float32).view(pairs, width)
        begin = -(-at // ALIGNED) * ALIGNED
        return lent[begin : begin + size].view(hidden.dtype).view(pairs, -1), out
