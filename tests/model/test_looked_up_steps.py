"""Steps on the device that verify what was looked up in the text, with passes that a table plays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from model.device_table import (
    GREEDY,
    NO_END,
    PENALISED,
    PROMPT,
    SAMPLED,
    CpuHelps,
    HastyPolicy,
    Moody,
    Rig,
    sampled,
)
from speculative.table_model import Table

from localmoe.core.gates import Gate
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import Policy
from localmoe.speculative.drafters import Proposal
from localmoe.speculative.lookup_governor import LookupGovernor
from localmoe.speculative.prompt_lookup import PromptLookupDrafter
from localmoe.speculative.step_record import StepRecord

pytestmark = pytest.mark.interpreted
LENGTHS = st.lists(st.sampled_from([0, 0, 0, 0, 1, 3, 6]), max_size=24)


class Guesses(PromptLookupDrafter):
    """Proposes right tokens and wrong ones, and now and then none."""

    def __init__(self, table: Table, seed: int, end: frozenset[int] = NO_END) -> None:
        super().__init__(end)
        self.table, self.chance = table, random.Random(seed)
        self.asked: list[int] = []  # lengths of the text

    def look_up(self, history: Sequence[int], count: int) -> Proposal:
        self.asked.append(len(history))
        right = self.table.greedy(list(history), count)
        tokens = [token if self.chance.random() < 0.7 else self.chance.randrange(4) for token in right]
        tokens = self._up_to_end(tokens[: self.chance.choice([0, count, count])])
        return Proposal(tokens, [], [0.5] * len(tokens))


@settings(max_examples=60)
@given(
    st.integers(0, 999), st.integers(1, 13), LENGTHS,
    st.sampled_from([MoeSpeqPolicy, OnDemandPolicy, HastyPolicy]), st.integers(1, 25), st.integers(1, 40),
    st.sets(st.integers(0, 3), max_size=1), st.booleans(),
)  # fmt: skip
def test_greedy_text_is_the_same_whatever_is_proposed_and_an_answer_may_end_anywhere(
    seed: int, slots: int, lengths: list[int], make: type[Policy], events: int, limit: int, end: set[int],
    guesses: bool,
) -> None:  # fmt: skip
    table, ends = Table(agreement=0.8, seed=seed), frozenset(end)
    rig = Rig(table, slots, make)
    lookup = Guesses(table, seed, ends) if guesses else PromptLookupDrafter(ends)
    steps = rig.loop(Moody(list(lengths)), end=ends, lookup=lookup).run(PROMPT, limit)
    said: list[int] = []
    for _, step in zip(range(events), steps, strict=False):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    steps.close()
    assert said == table.greedy(PROMPT, len(said))
    assert "draft" not in rig.passes.issued
    rig.experts.check()
    rest = [token for step in rig.loop(2).run([*PROMPT, *said], 9) for token in step.tokens]
    assert [*said, *rest] == table.greedy(PROMPT, len(said) + 9)
    rig.experts.check()


@settings(max_examples=8)
@given(st.integers(0, 999), LENGTHS, st.sampled_from([SAMPLED, PENALISED]))
def test_sampled_text_is_the_same_whatever_is_proposed(seed: int, lengths: list[int], config) -> None:
    table = Table(agreement=0.8, seed=seed)
    rig = Rig(table, 5)
    lookup = Guesses(table, seed)
    first, *rest = rig.loop(Moody(list(lengths)), sampling=config, lookup=lookup).run(PROMPT, 11)
    text = [*PROMPT, *first.tokens]
    assert [token for step in rest for token in step.tokens] == sampled(table, text, 10, config)


def test_text_in_circles_takes_fewer_steps_than_tokens() -> None:
    table = Table(seed=2)
    rig = Rig(table, 12, OnDemandPolicy)
    governor = LookupGovernor(15)
    said = [
        token
        for step in rig.loop(governor, lookup=PromptLookupDrafter(NO_END)).run(PROMPT, 120)
        for token in step.tokens
    ]
    counters = rig.state.counters
    assert said == table.greedy(PROMPT, 120)
    assert counters.accepted == counters.drafted > 60  # a table is always right
    assert counters.steps < 60


class Whim(Moody):
    """Drafts, or verifies what was looked up, at random. heard: tokens and margins of steps by what they
    verified."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        super().__init__(lengths)
        self.chance = random.Random(seed)
        self.heard: dict[bool, list[tuple[int, int]]] = {True: [], False: []}

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return min(self.choose(), most), self.chance.choice([None, self])  # type: ignore[return-value]

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        return self.chance.random() < 0.7

    def worth_verifying(self, margins: Sequence[float]) -> int:
        assert 0.5 not in margins, "what was looked up is no draft's"
        return self.chance.randint(0, len(margins))

    def instead(self, margins: Sequence[float]) -> int:
        return self.chance.randint(0, len(margins))

    def observe(self, step: StepRecord) -> None:
        assert step.accepted <= step.drafted
        assert not step.found or (step.drafted and set(step.margins) == {0.5})
        self.heard[step.found].append((step.drafted, len(step.margins)))


@settings(max_examples=60)
@given(
    st.integers(0, 999), st.integers(1, 13), LENGTHS,
    st.sampled_from([MoeSpeqPolicy, OnDemandPolicy, HastyPolicy, CpuHelps]), st.integers(1, 25),
    st.integers(1, 40), st.sets(st.integers(0, 3), max_size=1), st.booleans(), st.booleans(),
)  # fmt: skip
def test_text_is_the_same_whatever_takes_the_place_of_drafts(
    seed: int, slots: int, lengths: list[int], make: type[Policy], events: int, limit: int, end: set[int],
    on_device: bool, drawn: bool,
) -> None:  # fmt: skip
    table, ends = Table(agreement=0.8, seed=seed), frozenset(end)
    rig, whim = Rig(table, slots, make), Whim(list(lengths), seed)
    config = SAMPLED if drawn and on_device else GREEDY
    loop = rig.loop(
        whim, end=ends, lookup=Guesses(table, seed, ends), beside=True, on_device=on_device, sampling=config
    )
    steps = loop.run(PROMPT, limit)
    said: list[int] = []
    for _, step in zip(range(events), steps, strict=False):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    steps.close()
    if config.greedy:
        assert said == table.greedy(PROMPT, len(said))
    else:
        assert said[1:] == sampled(table, [*PROMPT, said[0]], len(said) - 1, config)
    assert rig.state.counters.looked_up == sum(drafted for drafted, _ in whim.heard[True])
    rig.experts.check()


def test_a_draft_that_runs_already_is_dropped_for_what_was_looked_up_and_none_is_begun_behind_that() -> None:
    table = Table(agreement=1.0, seed=3)
    rig, found = Rig(table, 12, CpuHelps), [0, 0, 3, 3, 3, 0, 0]

    class Turns(Moody):
        def choose(self) -> int:
            return 2

        def instead(self, margins: Sequence[float]) -> int:
            return min(found.pop(0) if found else 0, len(margins))

    class Right(Guesses):
        def look_up(self, history: Sequence[int], count: int) -> Proposal:
            return Proposal(self.table.greedy(list(history), count), [], [0.5] * count)

    steps = rig.loop(Turns([]), lookup=Right(table, 0), beside=True).run(PROMPT, 30)
    said = [token for step in steps for token in step.tokens]
    assert said == table.greedy(PROMPT, 30)
    issued = "".join(kind[0] for kind in rig.passes.issued[rig.passes.issued.index("draft") :])
    # two steps with drafts, each with the next one's first, the last of which is dropped for three steps of
    # four tokens, behind which nothing is drafted; then drafts again
    assert issued.startswith("ddwddwdwwwddwd"), issued
    assert rig.state.counters.looked_up == 9


class NothingFits(Guesses):
    def look_up(self, history: Sequence[int], count: int) -> Proposal:
        self.asked.append(len(history))
        return Proposal([], [])


class Late(Guesses):
    """Has something to propose from some length of the text on."""

    def look_up(self, history: Sequence[int], count: int) -> Proposal:
        self.asked.append(len(history))
        tokens = self.table.greedy(list(history), count if len(history) >= 16 else 0)
        return Proposal(tokens, [], [0.5] * len(tokens))


class Always(Moody):
    """Three tokens; hears of what was proposed."""

    def __init__(self) -> None:
        super().__init__([])
        self.heard: list[tuple[int, int]] = []  # margins, verified

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return min(3, most), None

    def observe(self, step: StepRecord) -> None:
        self.heard.append((len(step.margins), step.drafted))


def test_steps_run_behind_each_other_until_something_is_found_which_waits_for_one_step() -> None:
    table = Table(seed=3)
    behind: dict[str, list[int]] = {}
    for name, lookup in (("none", NothingFits(table, 0)), ("late", Late(table, 0))):
        rig, governor = Rig(table, 12, OnDemandPolicy), Always()
        memory, opened = rig.experts.memory, behind.setdefault(name, [])
        open_behind = memory.open_behind

        def watched(opened: list[int] = opened, go_on=open_behind, cache=rig.cache) -> None:
            opened.append(cache.length)
            go_on()

        memory.open_behind = watched  # type: ignore[method-assign]
        steps = rig.loop(governor, lookup=lookup).run(PROMPT, 40)
        assert [token for step in steps for token in step.tokens] == table.greedy(PROMPT, 40)
        if name == "late":
            found = [heard for heard in governor.heard if heard != (0, 0)]
            assert len(found) >= 5 and set(found[:-1]) == {(3, 3)}  # what waited is nobody's proposal
    assert len(behind["none"]) > 30
    assert behind["late"] and max(behind["late"]) < 16
    assert behind["late"] == behind["none"][: len(behind["late"])]
