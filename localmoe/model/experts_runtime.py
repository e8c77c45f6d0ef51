"""What a MoE layer's experts do in each phase: INT4 codes when drafting, 16-bit weights in the target,
through slots or where they lie.

One object a layer stands in for the transformers experts module. It records the draft's routing in the
lookahead buffer, asks the expert memory for what the target's router chose, and counts how that went.
Decides neither prefetch nor eviction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from localmoe.core.events import LayerDemanded, LayerFinished
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.stats import GenerationCounters
from localmoe.core.timeline import Timeline
from localmoe.core.types import Phase
from localmoe.experts.in_place import InPlaceMemory
from localmoe.experts.memory import DemandReport, ExpertMemory
from localmoe.kernels.activations import inner_function
from localmoe.kernels.experts import ExpertWeights, combine, expert_mlp
from localmoe.kernels.rows import RowPadding
from localmoe.model.draft_experts import DraftExpert, run_experts
from localmoe.model.expert_module import expert_biases
from localmoe.model.foretold import LayerwiseForetold
from localmoe.model.host_linear import HostLinears
from localmoe.model.next_gate import Gate, guess
from localmoe.model.pair_rows import pair_rows, rows_by_expert
from localmoe.model.routing_trace import RoutingRecorder
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.scheduler import Scheduler


@dataclass(slots=True)
class PassState:
    """What the layers need to know of the pass that is running. One object, shared by all layers of a
    model."""

    memory: ExpertMemory | InPlaceMemory
    scheduler: Scheduler
    lookahead: LookaheadBuffer
    rows: RowPadding
    draft: list[list[DraftExpert]] | None = None  # [layer][expert]
    phase: Phase = "prefill"
    live_rows: int = 0  # rows after these are padding
    draft_token: int = 0  # window token that the draft is at
    counters: GenerationCounters = field(default_factory=GenerationCounters)
    synthetic: SyntheticModel | None = None  # of random weights: what routes and accepts in their place
    forced_index: Tensor | None = None  # (live rows, L, K) int64 in place of the router's choice, this pass
    recorder: RoutingRecorder | None = None  # told of the target's routing
    gates: list[Gate | None] = field(default_factory=list)  # of each MoE layer
    timeline: Timeline | None = None  # told when things ran, while somebody wants to know
    linears: HostLinears | None = None  # layers that keep their 16-bit weights


class RoutedExperts:
    """Computes the routed experts of MoE layer `layer`."""

    def __init__(self, layer: int, module: Any, state: PassState) -> None:
        self._layer = layer
        self._state = state
        self._gate = inner_function(module)
        self._transposed = bool(module.is_transposed)
        self._biases = expert_biases(module)

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H), (T, K), (T, K) -> (T, H); padding rows come out as zeros and demand nothing."""
        live = self._state.live_rows
        x, index, weights = hidden[:live], top_k_index[:live], top_k_weights[:live]
        if self._state.forced_index is not None:
            index = self._state.forced_index[:, self._layer]
        if self._state.recorder is not None and self._state.phase != "draft":
            self._state.recorder.record(self._layer, index)
        chosen: list[list[int]] = index.tolist()
        if self._state.phase == "draft":
            self._record_draft(chosen, weights)
            out = self._draft(x, chosen)
        else:
            out = self._target(x, chosen)
        if isinstance(self._state.memory, InPlaceMemory):
            combined = self._state.memory.combine(out, index, weights)
        else:
            combined = combine(out, index, weights, hidden.dtype)
        if live == hidden.shape[0]:
            return combined
        return torch.cat([combined, combined.new_zeros(hidden.shape[0] - live, hidden.shape[1])])

    def _record_draft(self, chosen: list[list[int]], weights: Tensor) -> None:
        foretold = LayerwiseForetold(self._state)
        for row, (experts, confidences) in enumerate(zip(chosen, weights.tolist(), strict=True)):
            foretold.foretell(self._state.draft_token + row, self._layer, experts, confidences)

    def _draft(self, x: Tensor, chosen: list[list[int]]) -> Tensor:
        assert self._state.draft is not None, "no draft is loaded"
        return run_experts(self._state.draft[self._layer], x, chosen, self._gate, self._biases)

    def _target(self, x: Tensor, chosen: list[list[int]]) -> Tensor:
        state = self._state
        rows = rows_by_expert(chosen, state.memory.store.num_experts)
        wanted = tuple(sorted(rows))
        top_k = len(chosen[0])
        counts = tuple(len(rows[expert]) for expert in wanted)
        state.scheduler.notify(LayerDemanded(self._layer, wanted, len(chosen), counts))
        timeline = state.timeline if x.device.type == "cpu" else None
        started = 0.0 if timeline is None else timeline.now()
        if isinstance(state.memory, InPlaceMemory):
            self._guess_next(x)
            report, out = state.memory.compute(self._layer, x, rows, top_k)
        else:
            report, out = self._through_slots(state.memory, x, rows, top_k)
        if timeline is not None:
            timeline.add("cpu", f"layer {self._layer}: {len(wanted)} experts", started)
        state.scheduler.notify(LayerFinished(self._layer))
        if state.phase == "verify":
            self._count(chosen, report)
        return out

    def _through_slots(
        self, memory: ExpertMemory, x: Tensor, rows: dict[int, list[int]], top_k: int
    ) -> tuple[DemandReport, Tensor]:
        """How the experts were found, and each pair's output (T, K, H), as they come."""
        out = x.new_zeros(x.shape[0], top_k, x.shape[1])
        flat = out.view(-1, x.shape[1])
        wanted = sorted(rows)
        pairs = pair_rows(rows, top_k, x.device, self._state.rows.multiple)
        memory.store.note_demand(self._layer, wanted)
        with memory.demand(self._layer, wanted) as (report, views):
            self._guess_next(x)
            for view in views:
                mine = pairs[view.expert]
                weights = ExpertWeights(view.gate_up, view.down, *self._bias(view.expert), self._transposed)
                y = expert_mlp(x.index_select(0, mine.tokens), weights, self._gate)
                flat.index_copy_(0, mine.places, y[: len(mine.places)])
        return report, out

    def _guess_next(self, x: Tensor) -> None:
        """Tell a policy that asks for it what the next layer's gate makes of this layer's input (not for
        prompts, which want nearly all experts)."""
        state = self._state
        if state.phase != "verify" or not state.scheduler.wants_next_gate:
            return
        guessed = guess(state.gates, self._layer + 1, x, state.memory.store.num_experts)
        if guessed is not None:
            state.scheduler.notify(guessed)

    def _bias(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        gate_up, down = self._biases
        return (None if gate_up is None else gate_up[expert]), (None if down is None else down[expert])

    def _count(self, chosen: list[list[int]], report: DemandReport) -> None:
        counters, lookahead = self._state.counters, self._state.lookahead
        counters.hits += len(report.hits)
        counters.late += len(report.late)
        counters.misses += len(report.misses)
        counters.token_demands += sum(len(experts) for experts in chosen)
        counters.token_hits += sum(expert in report.hits for experts in chosen for expert in experts)
        named: set[int] = set()
        for token, experts in enumerate(chosen):
            entry = lookahead.get(token, self._layer)
            if entry is not None:
                named.update(entry.experts)
                counters.routed_pairs += 1
                counters.matched_pairs += set(entry.experts) == set(experts)
                counters.ordered_pairs += entry.experts == tuple(experts)
        counters.covered += len(report.hits) + len(report.late) + len(report.misses & named)
