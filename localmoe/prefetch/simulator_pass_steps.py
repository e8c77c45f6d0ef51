"""Steps over an expert memory in simulated time where whole passes run without the host: the GPU engine's
way. Keeps no memory (simulator_passes does)."""

from __future__ import annotations

import numpy as np

from localmoe.core.events import (
    DraftFinished,
    PassRouted,
    PrefillStarted,
    StepFinished,
    StepStarted,
    TokenRouted,
)
from localmoe.core.expert_counts import demanded_of, tokens_of
from localmoe.prefetch.scheduler import Scheduler
from localmoe.prefetch.simulator_passes import PassMemory
from localmoe.prefetch.simulator_types import Machine, Prompt, Tally, Window


class PassSteps:
    """Runs prompts and windows through one memory, and tells the scheduler what an engine would tell it."""

    def __init__(self, machine: Machine, scheduler: Scheduler, memory: PassMemory) -> None:
        self.memory = memory
        self._machine = machine
        self._scheduler = scheduler
        self._steps = 0

    def prompt(self, prompt: Prompt) -> None:
        """A prompt in one pass."""
        counts = tokens_of(prompt.target, self._machine.num_experts)
        self._scheduler.notify(PrefillStarted(len(prompt.target)))
        self.memory.stream(counts)
        self.memory.note_prompt(prompt.target)
        self._scheduler.notify(PassRouted(counts > 0, counts))

    def step(self, window: Window, tally: Tally) -> None:
        """Draft, verify, count."""
        notify, memory, counters = self._scheduler.notify, self.memory, tally.counters
        began, decides = memory.now, memory.may_copy and window.drafted > 0
        memory.begin_step(window.drafted)
        notify(StepStarted(self._steps, window.drafted))
        self._steps += 1
        for token, (experts, confidences) in enumerate(zip(window.draft, window.confidences, strict=True)):
            memory.advance(self._machine.draft_token_s)
            notify(TokenRouted(token, experts, confidences))
            memory.pump()
        if decides:
            notify(DraftFinished(window.drafted))
        drafted_at = memory.now
        tokens = tokens_of(window.target, self._machine.num_experts)
        demanded = tokens > 0
        hits, late = memory.run_pass(tokens)
        memory.advance(self._machine.step_s)
        notify(PassRouted(demanded))
        notify(StepFinished(window.drafted, window.accepted))
        counters.hits += int(hits.sum())
        counters.late += int(late.sum())
        counters.computed += int(memory.computed.sum())
        counters.misses += int((demanded & ~hits & ~late & ~memory.computed).sum())
        named = demanded_of(window.draft, self._machine.num_experts)
        counters.covered += int((hits | late | (demanded & named)).sum())
        layers = np.arange(self._machine.num_layers)[None, :, None]
        counters.token_demands += window.target.size
        counters.token_hits += int(hits[layers, window.target].sum())
        counters.draft_s += drafted_at - began
        counters.verify_s += memory.now - drafted_at
        counters.decode_s += memory.now - began
