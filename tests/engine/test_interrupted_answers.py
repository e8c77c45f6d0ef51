"""However an answer ends, cache and statistics are consistent, and the next one is that of a fresh engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engines import (
    Answer,
    ask,
    check_consistent,
    check_stats,
    load_with_slots,
    memory_of,
    runner_of,
    wait_until_idle,
    watch_link,
)

from localmoe.core.config import DraftLength, GenerationRequest
from localmoe.core.errors import EngineClosedError, TransferError
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.prefetch.scheduler import Scheduler

ARCHITECTURE = "qwen2_moe"
PROMPTS = ("Hello there, how are", "Hello there, who are", "quite another prompt", "Hello")
NUM_TOKENS = 14
Tiny = Callable[[str], tuple[Path, Any]]


@pytest.fixture
def engine(tiny: Tiny) -> Iterator[Engine]:
    with load_with_slots(tiny(ARCHITECTURE)[0], 6) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def fresh_answer(tiny: Tiny) -> Callable[[str], list[int]]:
    """prompt -> the plain greedy answer of an engine that has answered nothing yet."""

    @cache
    def answer(prompt: str) -> list[int]:
        with load_with_slots(tiny(ARCHITECTURE)[0], 24, draft_length=0) as fresh:
            return ask(fresh, prompt, NUM_TOKENS).tokens

    return answer


@dataclass(frozen=True)
class Interruption:
    """Close after `events` events, set `stop` after them, or let some copies fail."""

    kind: str
    events: int = 0
    failing: range = range(0)


INTERRUPTIONS = st.one_of(
    st.builds(Interruption, st.sampled_from(["close", "stop"]), st.integers(0, 8)),
    st.builds(
        lambda first, count: Interruption("fail", failing=range(first, first + count)),
        st.integers(0, 60),
        st.integers(1, 6),
    ),
)
LENGTHS: st.SearchStrategy[DraftLength] = st.sampled_from([0, 1, 4, 8, "auto"])
POLICIES = st.sampled_from(["on-demand", "moe-speq"])


def interrupt(engine: Engine, request: GenerationRequest, interruption: Interruption) -> Answer:
    """The part of an answer that comes before it is interrupted."""
    watch_link(memory_of(engine), interruption.failing)
    stop, answer = threading.Event(), Answer()
    stream = engine.stream(request, stop)
    if interruption.kind == "stop" and interruption.events == 0:
        stop.set()
    try:
        while interruption.kind != "close" or len(answer.events) < interruption.events:
            event = next(stream, None)
            if event is None:
                break
            answer.events.append(event)
            if interruption.kind == "stop" and len(answer.events) == interruption.events:
                stop.set()
    except TransferError as error:
        assert "was made to fail" in str(error)
    stream.close()
    watch_link(memory_of(engine))
    return answer


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    interruption=INTERRUPTIONS,
    prompts=st.tuples(st.sampled_from(PROMPTS), st.sampled_from(PROMPTS)),
    lengths=st.tuples(LENGTHS, LENGTHS),
    policy=POLICIES,
)
def test_after_an_interruption_the_next_answer_is_that_of_a_fresh_engine(
    engine: Engine,
    fresh_answer: Callable[[str], list[int]],
    interruption: Interruption,
    prompts: tuple[str, str],
    lengths: tuple[DraftLength, DraftLength],
    policy: str,
) -> None:
    request = GenerationRequest(
        prompt=prompts[0], max_new_tokens=NUM_TOKENS, draft_length=lengths[0], policy=policy
    )
    part = interrupt(engine, request, interruption)
    assert part.tokens == fresh_answer(prompts[0])[: len(part.tokens)]
    if part.events:
        check_stats(part)
    if interruption.kind == "stop" and len(part.tokens) < NUM_TOKENS:
        assert part.finish_reason == "cancelled"
    check_consistent(engine)
    after = ask(engine, prompts[1], NUM_TOKENS, draft_length=lengths[1], policy=policy)
    assert after.tokens == fresh_answer(prompts[1])
    check_stats(after)
    check_consistent(engine)


def test_an_answer_that_was_stopped_can_be_continued_without_running_its_tokens_again(engine: Engine) -> None:
    request = GenerationRequest(prompt=PROMPTS[2], max_new_tokens=NUM_TOKENS, draft_length=4)
    part = interrupt(engine, request, Interruption("close", 3))
    again = ask(engine, PROMPTS[2], NUM_TOKENS, draft_length=4)
    assert again.tokens[: len(part.tokens)] == part.tokens
    assert again.stats.reused_tokens == len(PROMPTS[2]) - 1, "all but the last prompt token are still there"


def test_a_stop_before_the_start_gives_one_event_without_tokens(engine: Engine) -> None:
    request = GenerationRequest(prompt=PROMPTS[0], max_new_tokens=NUM_TOKENS)
    answer = interrupt(engine, request, Interruption("stop", 0))
    assert [event.finish_reason for event in answer.events] == ["cancelled"]
    assert answer.tokens == [] and answer.text == ""


def test_an_answer_that_nobody_reads_any_more_leaves_the_engine_free(engine: Engine) -> None:
    stream = engine.stream(GenerationRequest(prompt=PROMPTS[0], max_new_tokens=NUM_TOKENS))
    next(stream)
    del stream
    assert len(ask(engine, PROMPTS[0], NUM_TOKENS).tokens) == NUM_TOKENS
    check_consistent(engine)


def test_copies_that_failed_together_are_all_tried_again_by_the_next_demand(engine: Engine) -> None:
    memory = memory_of(engine)
    missing = [e for e in range(8) if not engine.live.resident()[0][e]][:3]
    assert len(missing) == 3
    link = watch_link(memory, failing=range(3))
    with pytest.raises(TransferError), memory.demand(0, missing) as (_, views):
        wait_until_idle(memory)
        assert link.started == 3, "all three copies failed before the first was asked for"
        next(views)
    with memory.demand(0, missing) as (_, views):
        assert sorted(view.expert for view in views) == missing
    check_consistent(engine)


@dataclass
class Watched:
    """A policy's events and wishes, seen on their way."""

    inner: Any
    events: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.inner.name)

    @property
    def wants_next_gate(self) -> bool:
        return bool(self.inner.wants_next_gate)

    def watch(self, residency: Any) -> None:
        self.inner.watch(residency)

    def observe(self, event: Any) -> Any:
        self.events.append(event)
        return self.inner.observe(event)

    def choose_victim(self, room: Any) -> Any:
        return self.inner.choose_victim(room)


@pytest.mark.parametrize("draft_length", [0, 4])
@pytest.mark.parametrize("policy", ["on-demand", "moe-speq", "next-gate"])
def test_statistics_are_those_of_what_ran(engine: Engine, policy: str, draft_length: int) -> None:
    memory = memory_of(engine)
    ask(engine, "warm up", 2, policy=policy)
    wait_until_idle(memory)
    scheduler: Scheduler = runner_of(engine).passes.scheduler
    watched = Watched(scheduler.policy)
    scheduler.use(watched)
    link = watch_link(memory)
    answer = ask(engine, PROMPTS[1], NUM_TOKENS, policy=policy, draft_length=draft_length)
    copied_in_answer = link.copied_bytes  # the copy that is running, if any, has not been counted either
    scheduler.use(watched.inner)
    check_stats(answer)
    kinds = [type(event).__name__ for event in watched.events]
    decode = watched.events[kinds.index("StepStarted") :]
    stats, record = answer.stats, memory.store.layouts[0].num_bytes(memory.store.dtype)
    demands = [e for e in decode if type(e).__name__ == "LayerDemanded"]
    finished = [e for e in decode if type(e).__name__ == "StepFinished"]
    assert stats.expert_demands == sum(len(e.experts) for e in demands)
    assert (stats.steps, stats.drafted) == (len(finished), sum(e.drafted for e in finished))
    assert stats.accepted == sum(e.accepted for e in finished)
    assert stats.prompt_tokens - stats.reused_tokens == sum(
        e.num_tokens for e in watched.events if type(e).__name__ == "PrefillStarted"
    )
    assert abs(stats.h2d_bytes - copied_in_answer) <= record, "one copy may end while the answer ends"
    decode_copies, rest = divmod(stats.h2d_bytes - stats.prefill_h2d_bytes, record)
    assert rest == 0 and decode_copies >= stats.misses
    if policy == "on-demand":
        assert decode_copies == stats.misses and stats.prefetched == stats.wasted == stats.late == 0
    else:
        assert abs(decode_copies - stats.misses - stats.prefetched) <= 1
    guesses = [e for e in watched.events if type(e).__name__ == "NextGateGuessed"]
    layers = engine.footprint.num_layers
    asked = [e.layer + 1 for e in demands if e.layer + 1 < layers] if policy == "next-gate" else []
    assert [e.layer for e in guesses] == asked, "once a layer, and only for who asks for it"
    assert stats.h2d_bytes_per_token == decode_copies * record / (stats.new_tokens - 1)
    assert (stats.expert_match_rate is None) == (draft_length == 0)


def test_closing_the_engine_ends_a_running_answer_with_a_clear_error(tiny: Tiny) -> None:
    engine = load_with_slots(tiny(ARCHITECTURE)[0], 6)
    stream = engine.stream(GenerationRequest(prompt=PROMPTS[0], max_new_tokens=200))
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises((EngineClosedError, TransferError), match="closed"):
        list(stream)
    with pytest.raises(EngineClosedError, match="closed"):
        ask(engine, PROMPTS[0])


def test_a_copy_that_ends_as_the_next_answer_begins_is_wasted_by_that_one_alone_if_it_counts_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, arrived, begin = memory_of(engine), threading.Event(), engine._session.text.begin
    ask(engine, PROMPTS[0], NUM_TOKENS, policy="on-demand", draft_length=0)
    copy = memory.link.copy

    def held(*given: Any) -> None:
        assert arrived.wait(5)
        copy(*given)

    def bring_back(*given: Any, **how: Any) -> int:
        arrived.set()
        wait_until_idle(memory)
        return begin(*given, **how)

    monkeypatch.setattr(memory.link, "copy", held)
    monkeypatch.setattr(engine._session.text, "begin", bring_back)
    last, resident = memory.store.num_layers - 1, memory.resident_keys()
    keys = (ExpertKey(last, expert) for expert in range(memory.store.num_experts))
    memory.prefetch(next(key for key in keys if key not in resident), 0.0)
    stats = ask(engine, PROMPTS[2], NUM_TOKENS, policy="on-demand", draft_length=0).stats
    assert (stats.prefetched, stats.wasted) == (1, 1)
