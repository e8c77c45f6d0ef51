"""An expert memory in simulated time, and steps over it layer by layer: the CPU engine's way. One copy at a
time, by the rules of experts.claims; the policy decides through the scheduler. Copies and computes nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    LayerDemanded,
    LayerFinished,
    NextGateGuessed,
    PrefillStarted,
    StepFinished,
    StepStarted,
)
from localmoe.core.expert_counts import demanded_of
from localmoe.core.types import ExpertKey
from localmoe.experts.claims import Claim, VictimChooser, claim_copy
from localmoe.experts.queue import DEMAND_DEADLINE, CopyQueue
from localmoe.experts.residency import ResidencyTable
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_in_place import InPlaceMemory
from localmoe.prefetch.simulator_types import Experts, Machine, Prompt, Tally, Window

PROMPT_PASS = 256  # tokens of a prompt in one pass


class LayerMemory:
    """Slots, and a worker that makes one copy after the other, each `copy_s` long."""

    def __init__(self, machine: Machine, choose_victim: VictimChooser) -> None:
        self.now = 0.0
        self.stall_s = 0.0
        self.copies = self.prefetched = self.wasted = 0
        self._machine = machine
        self._choose_victim = choose_victim
        self._table = ResidencyTable(machine.num_slots, (machine.num_layers, machine.num_experts))
        self._queue = CopyQueue()
        self._awaited: set[ExpertKey] = set()
        self._running: tuple[Claim, float] | None = None  # and when it is complete

    @property
    def lock(self) -> AbstractContextManager[object]:
        """There is one thread."""
        return nullcontext()

    @property
    def reads(self) -> int:
        """Experts that came from the disk."""
        return 0

    def residency(self) -> NDArray[np.bool_]:
        """(L, E): in a slot, or on its way there."""
        return self._table.here

    def copy_s(self) -> float:
        """Seconds of one copy."""
        return self._machine.copy_s

    def begin_answer(self) -> None:
        """What was prefetched for the answer before is no waste of the next one, as in an engine."""
        self._table.forget_unused()

    def prefetch(self, key: ExpertKey, deadline: float) -> None:
        """Ask for a copy ahead of need."""
        if not self._table.here[key]:
            self._queue.push(key, deadline)
            self._start()

    def drop_prefetches(self, layer: int | None = None) -> None:
        """Withdraw what has not started."""
        self._queue.drop_prefetches(layer)

    def advance(self, seconds: float) -> None:
        """Let time pass; copies go on."""
        until = self.now + seconds
        while self._running is not None and self._running[1] <= until:
            self._finish()
        self.now = until

    def demand(self, layer: int, experts: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Ask for a layer's experts now: which are here, on their way, missing. `compute` comes next."""
        table = self._table
        hits = [e for e in experts if table.is_resident(ExpertKey(layer, e))]
        late = [e for e in experts if table.is_loading(ExpertKey(layer, e))]
        misses = [e for e in experts if not table.here[layer, e]]
        for expert in hits:
            table.pin(ExpertKey(layer, expert))
        self._awaited.update(ExpertKey(layer, e) for e in (*late, *misses))
        for expert in misses:
            self._queue.push(ExpertKey(layer, expert), DEMAND_DEADLINE)
        self._start()
        return hits, late, misses

    def note_tokens(self, layer: int, chosen: Experts) -> None:
        """Slots go by what the policy has heard."""

    def compute(self, layer: int, ready: list[int], awaited: list[int]) -> None:
        """Read the experts, those that are here first, the others as they arrive."""
        for expert in ready:
            self._read(ExpertKey(layer, expert))
        remaining = [ExpertKey(layer, expert) for expert in awaited]
        while remaining:
            key = next((key for key in remaining if self._table.is_resident(key)), None)
            if key is None:
                assert self._running is not None, "a demand always goes on"
                waited_from = self.now
                self._finish()
                self.stall_s += self.now - waited_from
                continue
            remaining.remove(key)
            self._awaited.discard(key)
            self._table.pin(key)
            self._read(key)

    def _read(self, key: ExpertKey) -> None:
        self.advance(self._machine.expert_s)
        self._table.unpin(key)
        self._start()

    def _start(self, delay_s: float | None = None) -> None:
        if self._running is None and len(self._queue):
            claim = claim_copy(self._table, self._queue, self._awaited, self._choose_victim)
            if claim is not None:
                self.wasted += claim.wasted
                delay_s = self._machine.start_s if delay_s is None else delay_s
                self._running = claim, self.now + delay_s + self._machine.copy_s

    def _finish(self) -> None:
        assert self._running is not None
        claim, at = self._running
        self.now, self._running = max(at, self.now), None
        self._table.finish_copy(claim.key, prefetch=not claim.is_demand)
        self.copies += 1
        self.prefetched += not claim.is_demand
        self._start(delay_s=0.0)


class LayerSteps:
    """Runs prompts and windows through one memory, and tells the scheduler what an engine would tell it."""

    def __init__(self, machine: Machine, scheduler: Scheduler, memory: LayerMemory | InPlaceMemory) -> None:
        self.memory = memory
        self._machine = machine
        self._scheduler = scheduler
        self._steps = 0

    def prompt(self, prompt: Prompt) -> None:
        """A prompt, pass by pass."""
        for first in range(0, len(prompt.target), PROMPT_PASS):
            experts = prompt.target[first : first + PROMPT_PASS]
            self._scheduler.notify(PrefillStarted(len(experts)))
            self._target(experts, None, None, None)

    def step(self, window: Window, tally: Tally) -> None:
        """Draft, verify, count."""
        notify, memory, counters = self._scheduler.notify, self.memory, tally.counters
        began = memory.now
        notify(StepStarted(self._steps, window.drafted))
        self._steps += 1
        self._draft(window)
        if window.drafted:
            notify(DraftFinished(window.drafted))
        drafted_at = memory.now
        named = demanded_of(window.draft, self._machine.num_experts)
        self._target(window.target, window.guesses, tally, named)
        notify(StepFinished(window.drafted, window.accepted))
        memory.advance(self._machine.step_s)
        counters.draft_s += drafted_at - began
        counters.verify_s += memory.now - drafted_at
        counters.decode_s += memory.now - began

    def _draft(self, window: Window) -> None:
        machine, notify = self._machine, self._scheduler.notify
        layer_s = machine.draft_token_s / machine.num_layers
        for token, (experts, confidences) in enumerate(
            zip(window.draft.tolist(), window.confidences.tolist(), strict=True)
        ):
            for layer in range(machine.num_layers):
                self.memory.advance(layer_s)
                notify(DraftRouted(token, layer, tuple(experts[layer]), tuple(confidences[layer])))

    def _target(
        self,
        experts: Experts,
        guesses: Experts | None,
        tally: Tally | None,
        named: NDArray[np.bool_] | None,
    ) -> None:
        machine, memory, notify = self._machine, self.memory, self._scheduler.notify
        demanded = demanded_of(experts, machine.num_experts)
        counts = _counts(experts, machine.num_experts)
        for layer in range(machine.num_layers):
            memory.advance(machine.layer_s)
            wanted = demanded[layer].nonzero()[0].tolist()
            chosen = counts[layer][wanted]
            notify(LayerDemanded(layer, tuple(wanted), len(experts), tuple(chosen.tolist())))
            hits, late, misses = memory.demand(layer, wanted)
            memory.note_tokens(layer, experts[:, layer])
            if guesses is not None and layer + 1 < machine.num_layers and self._scheduler.wants_next_gate:
                notify(guessed_event(layer + 1, guesses[:, layer + 1], machine.num_experts))
            if tally is not None and named is not None:
                _count(tally, hits, late, misses, counts[layer])
                tally.counters.covered += len(hits) + len(late) + int(named[layer][misses].sum())
            memory.compute(layer, hits, late + misses)
            notify(LayerFinished(layer))


def guessed_event(layer: int, experts: Experts, num_experts: int) -> NextGateGuessed:
    """The event of guesses (n, K), each of the same weight."""
    counts = np.bincount(experts[experts < num_experts].ravel(), minlength=num_experts)
    order = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    weights = counts[order] / experts.shape[1]
    return NextGateGuessed(layer, tuple(order.tolist()), tuple(weights.tolist()), len(experts))


def _counts(experts: Experts, num_experts: int) -> NDArray[np.int64]:
    """int (L, E): tokens of (n, L, K) that choose each expert."""
    _, layers, _ = experts.shape
    counts = np.zeros((layers, num_experts + 1), dtype=np.int64)
    np.add.at(counts, (np.arange(layers)[None, :, None], np.minimum(experts, num_experts)), 1)
    return counts[:, :num_experts]


def _count(
    tally: Tally, hits: list[int], late: list[int], misses: list[int], counts: NDArray[np.int64]
) -> None:
    counters = tally.counters
    counters.hits += len(hits)
    counters.late += len(late)
    counters.misses += len(misses)
    counters.token_demands += int(counts.sum())
    counters.token_hits += int(counts[hits].sum())
