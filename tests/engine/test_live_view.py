"""What a real engine shows while it answers, against what it counted and against its own table of slots."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from support.engines import (
    ask,
    check_consistent,
    load_with_slots,
    memory_of,
    runner_of,
    wait_until_idle,
)

from localmoe.core.config import GenerationRequest
from localmoe.core.errors import EngineClosedError, LocalMoeError
from localmoe.core.live_state import PromptState
from localmoe.core.types import ExpertKey, Phase
from localmoe.engine import Engine
from localmoe.hardware.needs import PREFILL_CHUNK
from localmoe.model.routing_trace import RoutingRecorder

PROMPT = "The fox said to the bear"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_with_slots("demo", 40) as loaded:
        yield loaded


def test_heat_is_that_of_the_experts_that_the_target_chose(engine: Engine) -> None:
    recorder = RoutingRecorder(engine.footprint.num_layers)
    recorder.begin()
    engine.record_routing(recorder)
    try:
        stats = ask(engine, PROMPT, 24, draft_length=0).stats
    finally:
        engine.record_routing(None)
    trace = recorder.trace("demo", engine.footprint.num_experts).experts.astype(int)  # (tokens, L, K)
    asked = np.zeros((len(trace), *engine.live.resident().shape), bool)
    np.put_along_axis(asked, trace, True, axis=2)
    prompt = asked[: -stats.steps].any(0)  # a pass of its own
    passes = np.stack([prompt, *asked[-stats.steps :]]).astype(float)
    weights = 0.5 ** (np.arange(len(passes))[::-1] / 16)
    expected = (passes * weights[:, None, None]).sum(0) / weights.sum()
    np.testing.assert_allclose(engine.live.state().heat, expected, rtol=1e-4)


def test_how_far_a_prompt_is_shows_until_the_first_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    runner, states = runner_of(engine), []
    run = runner.run

    def run_and_look(tokens: Sequence[int], phase: Phase, *, last_only: bool) -> torch.Tensor:
        if phase == "prefill":
            states.append(engine.live.prompt())
        return run(tokens, phase, last_only=last_only)

    monkeypatch.setattr(runner, "run", run_and_look)
    first = ask(engine, PROMPT * 100, 3, draft_length=0).stats
    tokens = first.prompt_tokens
    assert tokens > 2 * PREFILL_CHUNK
    assert states == [PromptState(tokens, read, 0) for read in range(0, tokens, PREFILL_CHUNK)]
    assert engine.live.prompt() is None
    states.clear()
    again = ask(engine, PROMPT * 100, 3, draft_length=0).stats
    assert states == [PromptState(tokens - again.reused_tokens, 0, 0)] and again.reused_tokens > 0
    engine.reset()
    stop = threading.Event()
    stop.set()
    list(engine.stream(GenerationRequest(prompt=PROMPT * 100), stop))
    assert engine.live.prompt() is None, "it has no token, and gets none"


@pytest.mark.parametrize("policy", ["on-demand", "moe-speq"])
def test_the_timeline_adds_up_to_what_was_counted(engine: Engine, policy: str) -> None:
    engine.reset()
    engine.live.record_timeline()
    stats = ask(engine, PROMPT, 20, draft_length=3, policy=policy).stats
    wait_until_idle(memory_of(engine))
    steps = engine.live.timeline()
    assert [step.name for step in steps] == ["prompt", *[f"step {n}" for n in range(1, stats.steps + 1)]]
    for step, following in itertools.pairwise(steps):
        assert step.end_s == following.start_s
    for step in steps:
        for span in step.spans:
            assert span.start_s <= span.end_s <= step.end_s
            assert span.start_s >= step.start_s or span.lane == "copies"
    spans = [span for step in steps for span in step.spans]

    def total(lane: str) -> float:
        return sum(span.end_s - span.start_s for span in spans if span.lane == lane)

    decoding = [span for step in steps[1:] for span in step.spans]
    tokens = [span for span in decoding if span.lane == "draft" and span.name.startswith("token")]
    assert len(tokens) == stats.drafted and all(span.name.startswith("draft ") for span in decoding
        if span.lane == "draft" and span not in tokens)  # fmt: skip
    assert total("draft") - sum(s.end_s - s.start_s for s in tokens) == pytest.approx(stats.draft_s, rel=1e-6)
    verified = sum(span.end_s - span.start_s for span in decoding if span.lane == "verify")
    assert verified == pytest.approx(stats.verify_s, rel=1e-6)
    stalled = sum(span.end_s - span.start_s for span in decoding if span.lane == "stall")
    assert stalled == pytest.approx(stats.stall_s, abs=1e-3)  # the first token is measured between the two
    layers = sum(span.lane == "cpu" for span in decoding)
    assert layers == stats.steps * engine.footprint.num_layers
    copies, size = [span for span in spans if span.lane == "copies"], engine.footprint.expert_bytes
    assert {span.num_bytes for span in copies} == {size}
    # a prefetch that is under way when the answer ends is in neither or in one
    under_way = 0 if policy == "on-demand" else 1
    assert abs(sum(span.num_bytes for span in copies) - stats.h2d_bytes) <= under_way * size
    prefetches = sum(span.name.startswith("prefetch") for span in copies)
    assert abs(prefetches - stats.prefetched) <= under_way
    engine.live.record_timeline(None)
    ask(engine, PROMPT, 4)
    assert engine.live.timeline() == () and not engine.live.recording


def test_no_cache_reuses_more_than_the_bound_and_one_with_room_for_all_reaches_it(engine: Engine) -> None:
    engine.reset()
    stats = ask(engine, PROMPT, 32, draft_length=2, policy="on-demand").stats
    bound = engine.live.reuse_bound()
    assert bound is not None and bound.demands == stats.expert_demands
    assert stats.hits <= bound.reusable < bound.demands  # it prefetches nothing, so its hits are reuse
    assert bound.reached == pytest.approx(1 - (stats.misses + stats.late) / stats.expert_demands)
    with load_with_slots("demo", engine.footprint.total_experts) as roomy:
        ask(roomy, PROMPT, 8)
        ask(roomy, PROMPT, 8)
        again = roomy.live.reuse_bound()
        assert again is not None and again.best == again.reached == 1.0


def test_others_may_look_at_any_time_and_the_answer_is_the_same(engine: Engine) -> None:
    engine.reset()
    alone = ask(engine, PROMPT, 32).tokens
    engine.reset()
    ended, looks, faults = threading.Event(), [], []

    def look() -> None:
        while not ended.wait(0.004):
            try:
                engine.live.record_timeline(8 if len(looks) % 3 else None)
                looks.append((engine.live.state(), engine.live.timeline(), engine.live.reuse_bound()))
            except LocalMoeError as error:
                faults.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    watched = ask(engine, PROMPT, 32).tokens
    ended.set()
    for thread in threads:
        thread.join()
    assert watched == alone and not faults and len(looks) > 2
    engine.live.record_timeline(None)
    for state, _, _ in looks:
        assert state.resident.sum() <= engine.plan.num_slots
        assert 0 <= state.heat.min() <= state.heat.max() <= 1
    wait_until_idle(memory_of(engine))
    found = {ExpertKey(*map(int, at)) for at in np.argwhere(engine.live.state().resident)}
    assert found == set(memory_of(engine).resident_keys()) and found
    check_consistent(engine)
    closed = load_with_slots("demo", 20)
    closed.close()
    with pytest.raises(EngineClosedError):
        closed.live.state()
