"""What the host does around passes on the device, with passes that a table plays: answers, slots, what is
told, and what interruptions leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from model.device_table import EXPERTS, LAYERS, NO_END, PROMPT, TOP_K, CpuHelps, HastyPolicy, Rig, routed
from speculative.table_model import Table

from localmoe.core.events import (
    DraftFinished,
    PassRouted,
    StepFinished,
    StepStarted,
    TokenRouted,
)
from localmoe.core.timeline import Timeline
from localmoe.experts.copy_times import CopyTimes
from localmoe.model import side_stream
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.prompt_ways import WINDOW
from localmoe.model.side_stream import SideStream
from localmoe.model.step_graphs import PassOutput
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import Policy
from localmoe.speculative.governor import FixedGovernor
from localmoe.speculative.prompt_lookup import PromptLookupDrafter
from localmoe.speculative.step_record import StepRecord

pytestmark = pytest.mark.interpreted


@settings(max_examples=40)
@given(
    st.integers(0, 999), st.integers(0, 6), st.integers(1, 13), st.floats(0, 1), st.booleans(),
    st.sampled_from([MoeSpeqPolicy, CpuHelps, OnDemandPolicy]), st.sets(st.integers(0, 3), max_size=1),
    st.booleans(),
)  # fmt: skip
def test_answers_are_the_targets_own_and_slots_are_right_after_every_step(
    seed: int, length: int, slots: int, agreement: float, on_device: bool, make: type[Policy], end: set[int],
    whole: bool,
) -> None:  # fmt: skip
    table = Table(agreement=agreement, seed=seed)
    rig = Rig(table, slots, make)
    said: list[int] = []
    for step in rig.loop(length, on_device=on_device, end=frozenset(end), whole=whole).run(PROMPT, 14):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    rig.experts.check()
    assert said == table.greedy(PROMPT, 14, frozenset(end))
    counters = rig.state.counters
    if counters.steps:
        assert counters.hits + counters.misses + counters.late > 0
        assert counters.token_hits <= counters.token_demands
        drafts = rig.passes.issued.count("draft")
        assert counters.drafted <= drafts
        assert counters.routed_pairs == LAYERS * (drafts - counters.left_out)
        assert counters.left_out <= (on_device and bool(end)), "one draft behind an end token at most"


@pytest.mark.parametrize("length", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_what_capturing_passes_takes_is_no_time_of_a_step(length: int, on_device: bool) -> None:
    rig = Rig(Table(agreement=1.0, seed=6), 5)
    passes, seconds = rig.passes, []
    draft, window = passes.draft, passes.window

    def capture(issue: Callable[..., PassOutput]) -> Callable[..., PassOutput]:
        def run(*args: int) -> PassOutput:
            began = time.perf_counter()
            time.sleep(0.03)
            passes.capture_s += time.perf_counter() - began  # on a busy machine it sleeps for longer
            return issue(*args)

        return run

    passes.draft, passes.window = capture(draft), capture(window)  # type: ignore[method-assign]

    class Watching(FixedGovernor):
        def observe(self, step: StepRecord) -> None:
            seconds.append((step.draft_s, step.verify_s, step.host_s))

    list(rig.loop(Watching(length), on_device=on_device).run(PROMPT, 12))
    assert len(seconds) >= 3
    for part in zip(*seconds, strict=True):
        assert min(part) >= 0 and sorted(part)[len(part) // 4] < 0.02  # the machine may be busy


def test_a_timeline_has_every_pass_and_every_copy_and_changes_no_answer() -> None:
    table, prompt_and_steps = Table(agreement=0.7, seed=6), []
    for record in (False, True):
        rig = Rig(table, num_slots=4)
        if record:
            rig.state.timeline, rig.experts.memory.times = Timeline(), CopyTimes(rig.experts.memory.transfers)
        prompt_and_steps.append([step.tokens for step in rig.loop(3).run(PROMPT, 14)])
    assert prompt_and_steps[0] == prompt_and_steps[1]
    counters, (prompt, *steps) = rig.state.counters, rig.state.timeline.steps()
    assert prompt.name == "prompt" and [span.lane for span in prompt.spans if span.lane != "host"] == [
        "verify"
    ]
    assert len(steps) == counters.steps
    main = [[span for span in step.spans if span.lane in ("draft", "verify")] for step in steps]
    assert sum(span.lane == "draft" for spans in main for span in spans) == rig.passes.issued.count("draft")
    assert [[span.lane for span in spans].count("verify") for spans in main] == [1] * len(steps)
    for step, spans in zip(steps, main, strict=True):
        ends = [time for span in spans for time in (span.start_s, span.end_s)]
        assert ends == sorted(ends) and step.start_s <= ends[0] and ends[-1] <= step.end_s
        lengths = [s.end_s - s.start_s for s in step.spans if s.lane in ("draft", "verify", "host")]
        assert sum(lengths) == pytest.approx(step.end_s - step.start_s, abs=1e-7)
    copies = [span for step in steps for span in step.spans if span.lane == "copies"]
    assert len(copies) == rig.experts.memory.counters().prefetched > 0


def test_a_step_tells_the_policy_its_story_in_order() -> None:
    rig = Rig(Table(agreement=1.0, seed=6), num_slots=3)
    steps = rig.loop(2).run(PROMPT, 7)
    next(steps)
    rig.events.clear()
    next(steps)
    kinds = [type(event) for event in rig.events]
    story = [StepStarted, TokenRouted, TokenRouted, DraftFinished, PassRouted, StepFinished]
    assert kinds == [*story, StepStarted]  # the next step is being drafted already
    done = rig.events[5]
    assert isinstance(done, StepFinished) and (done.drafted, done.accepted) == (2, 2)
    assert done.draft_token_s is not None and done.draft_token_s * 2 <= rig.state.counters.draft_s + 1e-9
    first = rig.events[1]
    assert isinstance(first, TokenRouted) and first.token == 0
    assert np.array_equal(first.experts, routed(rig.passes.held[3], 3))
    demanded = rig.events[4]
    assert isinstance(demanded, PassRouted)
    asked = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
    for position in (3, 4, 5):
        for layer, experts in enumerate(routed(rig.passes.held[position], position)):
            asked[layer, experts] = True
    assert np.array_equal(demanded.demanded, asked)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("make", "waits"),
    [(MoeSpeqPolicy, True), (CpuHelps, False), (OnDemandPolicy, False), (HastyPolicy, False)],
)
def test_the_window_waits_for_the_last_draft_only_where_something_is_asked_for_then(
    make: type[Policy], waits: bool, length: int
) -> None:
    rig = Rig(Table(agreement=1.0, seed=6), 5, make)
    heard: list[int] = []
    issue = rig.passes.window

    def window(count: int, start: int) -> PassOutput:
        steps = [i for i, event in enumerate(rig.events) if isinstance(event, StepStarted)]
        since = rig.events[steps[-1] :] if steps else []
        heard.append(sum(isinstance(event, TokenRouted) for event in since))
        return issue(count, start)

    rig.passes.window = window  # type: ignore[method-assign]
    said = [token for step in rig.loop(length).run(PROMPT, 1 + 4 * (length + 1)) for token in step.tokens]
    assert said == rig.passes.table.greedy(PROMPT, len(said))
    assert heard[1:] == [length if waits else length - 1] * 4
    kinds = [type(event) for event in rig.events if not isinstance(event, PassRouted)]
    story = [StepStarted, *[TokenRouted] * length, DraftFinished, StepFinished]
    assert kinds[-4 * len(story) :] == story * 4, "the same story, whenever the pass is issued"


def test_what_the_draft_asks_for_is_on_its_way_before_the_window_runs() -> None:
    rig = Rig(Table(agreement=1.0, seed=6), num_slots=LAYERS * EXPERTS)
    list(rig.loop(3).run(PROMPT, 5))
    assert rig.passes.copies_before[0] == rig.experts.memory.counters().prefetched > 0
    window = rig.state.counters
    # only what the window's last token alone asks for was not drafted
    assert window.misses <= LAYERS * TOP_K * window.steps


@settings(max_examples=40)
@given(st.integers(0, 999), st.integers(0, 4), st.sampled_from([3, 7, LAYERS * EXPERTS]), st.integers(1, 6))
def test_an_answer_that_is_dropped_while_the_next_step_runs_can_go_on(
    seed: int, length: int, slots: int, events: int
) -> None:
    table = Table(agreement=0.8, seed=seed)
    rig = Rig(table, slots)
    steps, said = rig.loop(length).run(PROMPT, 30), []
    for _, step in zip(range(events), steps, strict=False):
        said += step.tokens
    steps.close()
    assert rig.tokens() == [*PROMPT, *said][:-1]
    rig.experts.check()
    steps_counted = rig.state.counters.steps
    assert steps_counted == events - 1 or len(said) == 30
    rest = [token for step in rig.loop(length).run([*PROMPT, *said], 9) for token in step.tokens]
    assert [*said, *rest] == table.greedy(PROMPT, len(said) + 9)
    rig.experts.check()


@pytest.mark.parametrize("make", [MoeSpeqPolicy, CpuHelps, OnDemandPolicy])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("broken", range(1, 10))
@pytest.mark.parametrize("looks_up", [False, True])
def test_an_interrupted_pass_is_undone_and_no_wrong_weights_stay(
    looks_up: bool, broken: int, late: bool, make: type[Policy]
) -> None:
    table = Table(agreement=0.8, seed=12)
    rig = Rig(table, 5, make)
    rig.passes.break_at, rig.passes.broken_late = broken, late
    said: list[int] = []
    try:
        for step in rig.loop(2, lookup=PromptLookupDrafter(NO_END) if looks_up else None).run(PROMPT, 12):
            said += step.tokens
    except (RuntimeError, KeyboardInterrupt):
        assert rig.tokens() == ([*PROMPT, *said][:-1] if said else [])
    else:
        assert late or len(rig.passes.issued) < broken, "only draft passes do not break late"
    rig.experts.check()
    rig.passes.break_at = None
    left = 12 - len(said)
    steps = rig.loop(2).run([*PROMPT, *said], left) if left else iter(())
    rest = [token for step in steps for token in step.tokens]
    assert [*said, *rest] == table.greedy(PROMPT, 12)
    rig.experts.check()


@pytest.mark.parametrize(("way", "slots"), [("stream", 2), ("stream", 5), ("stream", 12), ("ask", 4)])
def test_a_long_prompt_that_is_interrupted_leaves_no_slot_that_nobody_knows(way: str, slots: int) -> None:
    table = Table(seed=3)
    rig = Rig(table, slots)
    if way == "ask":
        rig.runner._prompt.ways[None].asks = lambda tokens, missing: True  # type: ignore[method-assign]
    prompt = [i % 4 for i in range(WINDOW + 5)]
    rig.passes.break_at, rig.passes.broken_late = 1, True
    with pytest.raises(KeyboardInterrupt):
        list(rig.loop(0).run(prompt, 4))
    rig.experts.check()
    assert rig.cache.length == 0
    rig.passes.break_at = None
    steps = rig.loop(2).run(prompt, 6)
    said = list(next(steps).tokens)
    if way == "stream":
        assert (rig.experts.memory._last_use == 1).all()  # all by the prompt's pass
    said += [token for step in steps for token in step.tokens]
    assert said == table.greedy(prompt, 6)
    assert rig.passes.issued[:2] == [way, way]
    rig.experts.check()


def test_a_prompts_pass_asks_where_that_is_faster_and_says_the_same() -> None:
    table = Table(seed=3)
    prompt = [i % 4 for i in range(WINDOW + 25)]
    for stream_s, first in ((9.0, "ask"), (0.0, "stream")):
        rig = Rig(table, 4)
        ways = rig.runner._prompt.ways[None]
        ways.note_asked(WINDOW, 1.0)
        ways.note_streamed(WINDOW + 1, rig.experts.memory.missing, stream_s)
        assert [token for step in rig.loop(0).run(prompt, 6) for token in step.tokens] == table.greedy(
            prompt, 6
        )
        assert rig.passes.issued[:2] == [first, "window"]
        rig.experts.check()
        told = [event.counts for event in rig.events if isinstance(event, PassRouted)]
        counts = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
        for position, token in enumerate(prompt):
            np.add.at(counts, (np.arange(LAYERS)[:, None], routed(token, position)), 1)
        of_prompt = sum(one for one in told if one is not None)
        assert np.array_equal(of_prompt, counts), "policies hear what the whole prompt asked for"


def test_a_short_prompt_runs_as_a_window_and_logits_are_float32_rows() -> None:
    rig = Rig(Table(seed=3), 4)
    with torch.inference_mode():
        logits = rig.runner.run(PROMPT, "prefill", last_only=False)
        assert logits.shape == (3, 4) and logits.dtype == torch.float32
        assert rig.runner.run([1], "prefill", last_only=True).shape == (1, 4)
    assert rig.passes.issued == ["window", "window"] and rig.cache.length == 4
    assert rig.state.counters.hits + rig.state.counters.misses == 0  # prompts are not counted


def test_what_a_failed_pass_began_beside_is_waited_for_before_its_slots_are_free() -> None:
    order: list[str] = []

    class Copies(SideStream):
        def join(self) -> None:
            order.append("joined")
            side_stream._forked.sides.discard(self)

    side_stream._forked.sides.add(Copies(torch.device("cpu")))
    runner: Any = SimpleNamespace(
        passes=SimpleNamespace(memory=SimpleNamespace(abandon_pass=lambda: order.append("free")), lane=None),
        sequence=SimpleNamespace(states=None, length=7, truncate=lambda length: order.append(str(length))),
    )
    DeviceRunner.rewind(runner, 5)
    assert order == ["joined", "free", "5"]
