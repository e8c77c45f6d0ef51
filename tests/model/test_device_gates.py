"""Steps on the device whose drafts end early or begin early, with passes that a table plays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("triton")

from model.device_table import (
    EXPERTS,
    GREEDY,
    LAYERS,
    PROMPT,
    SAMPLED,
    CpuHelps,
    HastyPolicy,
    Moody,
    Rig,
    sampled,
)
from speculative.table_model import Table

from localmoe.core.config import SamplingConfig
from localmoe.core.events import (
    DraftFinished,
    Event,
    StepFinished,
    TokenRouted,
)
from localmoe.core.gates import Gate
from localmoe.core.timeline import Timeline
from localmoe.experts.copy_times import CopyTimes
from localmoe.model.window_report import WindowReport
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import Policy
from localmoe.speculative.governor import FixedGovernor, Governor
from localmoe.speculative.step_record import StepRecord


class Whim(FixedGovernor):
    """Stops drafts, and cuts off what was drafted, at random. heard: margins of each step."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.chance = random.Random(seed)
        self.heard: list[list[float]] = []

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return self.chance.randint(0, min(most, 6)), self.chance.choice([None, self, self])

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        assert unheard <= 1
        return self.chance.random() < 0.7

    def worth_verifying(self, margins: Sequence[float]) -> int:
        return self.chance.randint(0, len(margins))

    def observe(self, step: StepRecord) -> None:
        assert min(step.host_s, step.draft_s, step.verify_s) >= 0
        assert step.accepted <= step.drafted <= len(step.margins)
        self.heard.append(list(step.margins))


@settings(max_examples=25)
@given(
    st.integers(0, 999), st.integers(1, 13) | st.just(LAYERS * EXPERTS), st.floats(0, 1), st.integers(1, 20),
    st.sampled_from([MoeSpeqPolicy, CpuHelps, OnDemandPolicy, HastyPolicy]),
    st.sets(st.integers(0, 3), max_size=1), st.booleans(), st.sampled_from([GREEDY, GREEDY, "sampled"]),
)  # fmt: skip
# the first draft of a step runs when its predecessor turns out to have brought the last expert into a slot
@pytest.mark.interpreted
@example(1, 12, 0.0, 8, MoeSpeqPolicy, set(), False, GREEDY)
def test_drafts_may_end_anywhere_and_any_part_of_them_may_be_verified(
    seed: int, slots: int, agreement: float, limit: int, make: type[Policy], end: set[int], record: bool,
    sampling: SamplingConfig | str,
) -> None:  # fmt: skip
    table, config = Table(agreement=agreement, seed=seed), SAMPLED if sampling == "sampled" else GREEDY
    rig, whim = Rig(table, slots, make), Whim(seed)
    if record:
        rig.state.timeline, rig.experts.memory.times = Timeline(), CopyTimes(rig.experts.memory.transfers)
    said: list[int] = []
    for step in rig.loop(whim, end=frozenset(end), sampling=config).run(PROMPT, limit):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    if config.greedy:
        assert said == table.greedy(PROMPT, limit, frozenset(end))
    else:
        rest = sampled(table, [*PROMPT, said[0]], len(said) - 1, config)
        assert said[1:] == rest
    rig.experts.check()
    counters, drafts = rig.state.counters, rig.passes.issued.count("draft")
    assert counters.drafted <= drafts
    for event, following in itertools.pairwise(rig.events):  # each step's last token is told to be it
        if isinstance(event, TokenRouted):
            assert event.last == (not isinstance(following, TokenRouted))
    told = sum(len(margins) for margins in whim.heard)  # none of what was drafted behind an end token
    assert told <= counters.drafted + counters.left_out <= drafts
    assert end or counters.drafted + counters.left_out == drafts
    finished = [event for event in rig.events if isinstance(event, DraftFinished | StepFinished)]
    assert counters.drafted <= sum(e.drafted for e in finished if isinstance(e, StepFinished))
    if record:
        spans = [span for each in rig.state.timeline.steps() for span in each.spans]
        assert sum(span.lane == "draft" for span in spans) == drafts


@pytest.mark.interpreted
def test_the_next_draft_is_issued_before_the_last_one_is_heard_of_if_the_gate_expects_to_want_it() -> None:
    asked: list[tuple[int, int, int]] = []

    class Steady(FixedGovernor):
        def choose_gated(self, most: int) -> tuple[int, Gate | None]:
            return min(6, most), self

        def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
            asked.append((len(margins), unheard, rig.passes.issued.count("draft")))
            return len(margins) + unheard < 3

        def worth_verifying(self, margins: Sequence[float]) -> int:
            return len(margins) - 1

    rig = Rig(Table(agreement=1.0, seed=6), 5)
    steps = rig.loop(Steady(0)).run(PROMPT, 8)
    assert len(next(steps).tokens) == 1 and len(next(steps).tokens) == 3
    # three passes, of which two were issued while the one before them ran; then it does not go on
    assert asked[:4] == [(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 0, 3)]
    steps.close()


@pytest.mark.interpreted
@pytest.mark.parametrize("make", [CpuHelps, OnDemandPolicy, MoeSpeqPolicy])
def test_where_the_policy_asks_for_nothing_more_the_verify_pass_does_not_wait_for_it_to_hear(
    make: type[Policy],
) -> None:
    class Steady(FixedGovernor):
        def choose_gated(self, most: int) -> tuple[int, Gate | None]:
            return min(6, most), self

        def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
            return len(margins) + unheard < 3

        def worth_verifying(self, margins: Sequence[float]) -> int:
            return len(margins) - 1

    rig = Rig(Table(agreement=1.0, seed=6), 5, make)
    told: list[tuple[int, int]] = []  # drafts and windows issued when the policy hears of a draft
    uploads: list[int] = []  # windows issued when the table is uploaded
    notify, block = rig.state.scheduler.notify, rig.experts.block
    upload = block.upload

    def watched(event: Event) -> None:
        if isinstance(event, TokenRouted):
            told.append((rig.passes.issued.count("draft"), rig.passes.issued.count("window")))
        notify(event)

    def watched_upload(*args: Any) -> None:
        uploads.append(rig.passes.issued.count("draft"))
        upload(*args)

    rig.state.scheduler.notify = watched  # type: ignore[method-assign]
    block.upload = watched_upload  # type: ignore[method-assign]
    steps = rig.loop(Steady(0)).run(PROMPT, 8)
    assert len(next(steps).tokens) == 1
    uploads.clear()
    assert len(next(steps).tokens) == 3
    at_once = make is not MoeSpeqPolicy
    prompt = rig.passes.issued.index("draft")  # passes before the first step
    # of three drafts, the last is heard of when the verify pass and the next step's first draft are issued
    assert told[:3] == [(2, prompt), (3, prompt), (4, prompt + 1) if at_once else (3, prompt)]
    assert rig.passes.issued[prompt:] == ["draft"] * 3 + ["window", "draft"]
    assert uploads == [3], "once, behind the third draft or before the verify pass"
    steps.close()


@pytest.mark.interpreted
def test_a_steps_first_draft_is_issued_behind_the_verify_pass_and_dropped_if_none_is_wanted() -> None:
    def run(length: int | Governor, limit: int, end: set[int]) -> tuple[Rig, list[int], list[int]]:
        rig = Rig(Table(agreement=1.0, seed=6), 5)
        read, seen = rig.passes.read_window, []

        def reported(report: NDArray[np.int32], count: int, rows: int) -> WindowReport:
            seen.append(rig.passes.issued.count("draft"))
            return read(report, count, rows)

        rig.passes.read_window = reported  # type: ignore[method-assign]
        steps = list(rig.loop(length, end=frozenset(end)).run(PROMPT, limit))
        return rig, [len(step.tokens) for step in steps], seen[1:]

    rig, emitted, seen = run(Moody([2, 1, 0, 2, 2]), 11, set())
    assert emitted == [1, 3, 2, 1, 3, 1]
    # behind steps of 2, 1 and 2 tokens; the second is not wanted, and for a fourth there is no room
    assert seen == [3, 4, 4, 6, 6]
    counters = rig.state.counters
    assert (counters.drafted, counters.left_out) == (5, 1)
    rig, emitted, seen = run(2, 30, {rig.passes.table.greedy(PROMPT, 2)[1]})
    assert emitted == [1, 1] and seen == [3], "the first drafted token ends the answer"
    assert rig.state.counters.left_out == 1 and rig.tokens() == [*PROMPT, *rig.passes.table.greedy(PROMPT, 1)]
