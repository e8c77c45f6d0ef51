"""Watches a loaded model answer: which experts its target uses, and how well its draft agrees. Predicts
nothing (what_if does)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from localmoe.core.config import GenerationRequest
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.routing_trace import RoutingTrace
from localmoe.core.types import ModelFootprint
from localmoe.engine.benchmark import Subject, check_stop
from localmoe.model.routing_trace import RoutingRecorder

PROBE_DRAFT_LENGTH = 4  # of the answers by which acceptance and match are measured


class Recordable(Subject, Protocol):
    """An engine whose routing can be listened to."""

    @property
    def footprint(self) -> ModelFootprint:
        """Sizes of the model."""

    @property
    def plan(self) -> MemoryPlan:
        """Whether it drafts."""

    def record_routing(self, recorder: RoutingRecorder | None) -> None:
        """Tell the recorder of every target pass; None ends it."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of a loaded model.

    Attributes:
        trace: the target's routing, prompt by prompt.
        prompt_tokens: of each prompt; the rest of its rows are its answer's.
        acceptance: probability that a drafted token is accepted if those before it were; None: not drafted.
        match: share of (token, layer) that the draft routes as the target does.
    """

    trace: RoutingTrace
    prompt_tokens: tuple[int, ...]
    acceptance: float | None
    match: float | None


def observe(
    engine: Recordable,
    requests: Sequence[GenerationRequest],
    name: str,
    *,
    stop: threading.Event,
    on_answer: Callable[[int], None] = lambda done: None,
) -> Observed:
    """Answer the requests greedily, once without a draft and, where the model's own low-bit draft is loaded,
    once with that. What another model or a layer drafts routes nothing, and is not what the simulator has.

    Args:
        name: of the model, for the trace.
        on_answer: told how many of the answers (of both kinds) are done.

    Raises:
        BenchmarkCancelledError: `stop` was set.
        LocalMoeError: as `Engine.stream`.
    """
    recorder = RoutingRecorder(engine.footprint.num_layers)
    prompt_tokens = []
    engine.record_routing(recorder)
    try:
        for number, request in enumerate(requests):
            engine.reset()  # a prefix that is reused would not be routed again
            recorder.begin()
            for event in engine.stream(replace(request, draft_length=0), stop):
                check_stop(stop)
                stats = event.stats
            prompt_tokens.append(stats.prompt_tokens)
            on_answer(number + 1)
    finally:
        engine.record_routing(None)
    trace = recorder.trace(name, engine.footprint.num_experts)
    if not drafts_itself(engine):
        return Observed(trace, tuple(prompt_tokens), None, None)
    agreement = Agreement()
    for number, request in enumerate(requests):
        agreement.begin()
        for event in engine.stream(replace(request, draft_length=PROBE_DRAFT_LENGTH), stop):
            check_stop(stop)
            stats = event.stats
            agreement.add(stats.drafted, stats.accepted)
        if stats.expert_match_rate is not None:
            agreement.matches.append(stats.expert_match_rate)
        on_answer(len(requests) + number + 1)
    return Observed(trace, tuple(prompt_tokens), agreement.acceptance, agreement.match)


def drafts_itself(engine: Recordable) -> bool:
    """Whether it drafts, and with the model's own low-bit experts."""
    return engine.plan.drafting and not engine.footprint.draft_model_bytes


class Agreement:
    """Counts steps in which a drafted token was refused. Tokens after it were never judged, so the chance
    that one is accepted is accepted / (accepted + refusals): the maximum-likelihood estimate of a
    geometric law whose long runs are cut off at the draft length."""

    def __init__(self) -> None:
        self.matches: list[float] = []
        self._accepted = self._refused = 0
        self._seen = (0, 0)

    def begin(self) -> None:
        """Another answer's counters start at zero."""
        self._seen = (0, 0)

    def add(self, drafted: int, accepted: int) -> None:
        """An answer's counters after one more step."""
        new_drafted, new_accepted = drafted - self._seen[0], accepted - self._seen[1]
        self._seen = (drafted, accepted)
        self._accepted += new_accepted
        self._refused += new_accepted < new_drafted

    @property
    def acceptance(self) -> float | None:
        """None if nothing was drafted."""
        judged = self._accepted + self._refused
        return self._accepted / judged if judged else None

    @property
    def match(self) -> float | None:
        """The mean over answers."""
        return sum(self.matches) / len(self.matches) if self.matches else None
