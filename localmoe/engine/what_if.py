"""What a loaded model would do on another card: what was observed of it is replayed in the simulator.
Observes nothing (observation does)."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localmoe.core.plan_types import MemoryPlan
from localmoe.core.synthetic import RoutingSpec, SyntheticSettings
from localmoe.core.types import ModelFootprint
from localmoe.engine.benchmark import check_stop
from localmoe.engine.observation import Observed
from localmoe.engine.planning import CUDA_LIBRARY_BYTES, MAX_WINDOW
from localmoe.hardware.cards import Card
from localmoe.hardware.context import check_context, unasked_context
from localmoe.hardware.needs import NeedsOptions
from localmoe.hardware.plan import plan_memory
from localmoe.hardware.prefill_chunk import choose_chunk
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.optimum import optimal_hits
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_machine import predict_machine
from localmoe.prefetch.simulator_sources import windows
from localmoe.prefetch.simulator_types import Disk, Machine, Prompt, Tally, Window

Prediction = dict[str, str | int | float | None]


def card_plan(
    footprint: ModelFootprint,
    card: Card,
    context: int | None,
    stored_bytes: int,
    *,
    drafting: bool,
    budget_bytes: int | None = None,
) -> MemoryPlan:
    """How the model would lie in the card's memory, or in so much of it. context None: as where none is
    named.

    Raises:
        BudgetError: it would not. ConfigError: it was made for a shorter context.
    """
    budget = min(card.budget_bytes, budget_bytes or card.budget_bytes)
    options = NeedsOptions(
        compute_bytes=2,
        checkpoint_bytes_per_weight=stored_bytes,
        max_window=MAX_WINDOW,
        library_bytes=CUDA_LIBRARY_BYTES,
        whole_passes=True,
    )
    if context is None:
        context = unasked_context(footprint, budget, options, drafting=drafting)
    check_context(context, footprint)
    options["prefill_chunk"] = choose_chunk(footprint, budget, context, options, drafting=drafting)
    return plan_memory(
        footprint,
        budget_bytes=budget,
        context=context,
        drafting=drafting,
        drafting_reason="" if drafting else "not asked for",
        **options,
    )


def predict(
    observed: Observed,
    footprint: ModelFootprint,
    card: Card,
    plan: MemoryPlan,
    policies: Sequence[str],
    draft_lengths: Sequence[int],
    *,
    cpu_bytes_per_s: float | None = None,
    disk: Disk | None = None,
    stop: threading.Event,
    on_row: Callable[[], None] = lambda: None,
) -> list[Prediction]:
    """One row a draft length and policy on the card, `plan` being its `card_plan`; lengths that need a draft
    which the plan or the model lacks are left out. cpu_bytes_per_s: at which the CPU computes experts; None:
    it does not. disk: where experts lie that come to the CPU; None: all lie in RAM.

    Raises:
        BenchmarkCancelledError: `stop` was set.
    """
    can_draft = plan.drafting and observed.acceptance is not None
    machine = predict_machine(
        footprint, plan.num_slots, card.rates, cpu_bytes_per_s=cpu_bytes_per_s, disk=disk
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="localmoe-") as folder:
        path = Path(folder) / "trace.npz"
        observed.trace.write(path)
        settings = SyntheticSettings(
            RoutingSpec("trace", path=path), observed.acceptance or 0.0, observed.match or 0.0
        )
        shape = footprint.num_layers, footprint.num_experts, footprint.experts_per_token
        model = SyntheticModel(settings, *shape)
        for length in (length for length in draft_lengths if length == 0 or can_draft):
            best: int | None = None
            for policy in policies:
                tally = simulate(policy, machine, _story(observed, model, length, stop))
                if best is None:  # demands are the routing's, whatever the policy
                    best = best_hits(tally, machine)
                rows.append(summary_of(policy, length, tally, best, machine))
                on_row()
    return rows


def best_hits(tally: Tally, machine: Machine) -> int:
    """What the offline optimum reaches on the same demands, of slots or, where there are none, of RAM."""
    places = machine.disk.ram_experts if machine.in_place and machine.disk else machine.num_slots
    return optimal_hits(tally.demands, places, whole_steps=machine.whole_passes, counted=tally.counted)


def summary_of(policy: str, draft_length: int, tally: Tally, best: int, machine: Machine) -> Prediction:
    """One setting's figures, for --json.

    `reuse_rate` is the share of demands that no copy was made for, nor the CPU asked (without a GPU, nor the
    disk read); prefetching can raise the hit rate beyond it, and only better eviction can raise it.
    `best_reuse_rate` is what the offline optimum reaches.
    """
    counters, stats = tally.counters, tally.counters.freeze()
    demands = max(1, stats.expert_demands)
    tokens = max(1, counters.new_tokens - 1)
    brought = tally.reads if machine.in_place else tally.copies
    if machine.lane is not None:  # copies are parts of experts then
        brought = counters.misses + counters.computed + counters.prefetched
    reuse, best_reuse = 1.0 - brought / demands, best / demands
    return {
        "policy": policy,
        "draft_length": draft_length,
        "tokens_per_s": stats.tokens_per_s,
        "tpot_s": stats.tpot_s,
        "hit_rate": stats.hit_rate,
        "late_rate": stats.late / demands,
        "reuse_rate": reuse,
        "best_reuse_rate": best_reuse,
        "share_of_best": reuse / best_reuse if best else None,
        "acceptance_rate": stats.acceptance_rate,
        "h2d_bytes_per_token": tally.copies * machine.expert_bytes / tokens,
        "disk_bytes_per_token": stats.disk_bytes_per_token,
        "computed_per_token": counters.computed / tokens,
        "prefetched_per_token": counters.prefetched / tokens,
        "wasted_per_token": counters.wasted / tokens,
        "stall_s_per_token": (counters.stall_s or 0.0) / tokens,
        "steps": counters.steps,
    }


@dataclass(frozen=True, slots=True)
class _Answer:
    """One recorded answer as the simulator's source of tokens."""

    model: SyntheticModel
    number: int

    def begin(self, answer: int) -> None:
        self.model.begin(self.number)

    def target_window(self, start: int, count: int) -> NDArray[np.int64]:
        return self.model.target_window(start, count)

    def draft_window(self, start: int, count: int) -> NDArray[np.int64]:
        return self.model.draft_window(start, count)

    def accepts(self, position: int) -> bool:
        return self.model.accepts(position)


def _story(
    observed: Observed, model: SyntheticModel, draft_length: int, stop: threading.Event
) -> Iterator[Prompt | Window]:
    """Every recorded prompt with its answer, each as long as it was."""
    starts = [*observed.trace.starts.tolist(), len(observed.trace.experts)]
    for number, prompt_tokens in enumerate(observed.prompt_tokens):
        rows = starts[number + 1] - starts[number]
        parts = windows(
            _Answer(model, number), draft_length=draft_length, answers=1, prompt_tokens=prompt_tokens,
            new_tokens=rows - prompt_tokens, seed=number,
        )  # fmt: skip
        for part in parts:
            check_stop(stop)
            yield part
