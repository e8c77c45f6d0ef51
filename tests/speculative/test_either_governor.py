"""When what was looked up takes a draft's place, in worlds whose texts and times are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from localmoe.speculative.either_governor import EitherGovernor
from localmoe.speculative.governor import AutoGovernor, FixedGovernor
from localmoe.speculative.prompt_lookup import MARGIN_A_TOKEN
from localmoe.speculative.step_record import StepRecord

LONG, SHORT = 20, 2  # tokens that agree
DRAFT_S = 0.1  # of a step with drafts, which emits four tokens


class Heard(FixedGovernor):
    """Of drafts' steps."""

    def __init__(self) -> None:
        super().__init__(3)
        self.steps: list[tuple[int, int]] = []

    def observe(self, step: StepRecord) -> None:
        assert not step.found
        self.steps.append((step.drafted, step.accepted))


@dataclass
class World:
    """Steps that find something of a kind, or nothing, and verify that or three drafted tokens. What was
    looked up takes `first_s` and for each token `row_s`."""

    first_s: float
    row_s: float
    rates: dict[int, float]
    kinds: tuple[int | None, ...]
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def step(self, governor: EitherGovernor) -> tuple[int | None, int]:
        """(tokens that agreed, looked-up tokens that were verified)."""
        kind = self.chance.choice(self.kinds)
        margins = [] if kind is None else [MARGIN_A_TOKEN * (kind + i) for i in range(64)]
        count = governor.instead(margins)
        if not count:
            governor.observe(StepRecord(3, 3, DRAFT_S / 2, DRAFT_S / 2, [5.0] * 3))
            return kind, 0
        assert kind is not None
        accepted = next((i for i in range(count) if self.chance.random() >= self.rates[kind]), count)
        governor.observe(
            StepRecord(count, accepted, 0.0, self.first_s + self.row_s * count, margins, found=True)
        )
        return kind, count

    def last(self, governor: EitherGovernor, steps: int = 900, of: int = 450) -> dict[int | None, float]:
        """Mean of the looked-up tokens that were verified in the last `of` steps, by kind."""
        seen: dict[int | None, list[int]] = {}
        for number in range(steps):
            kind, count = self.step(governor)
            if number >= steps - of:
                seen.setdefault(kind, []).append(count)
        return {kind: sum(counts) / len(counts) for kind, counts in seen.items()}


def test_what_agrees_long_takes_a_drafts_place_and_what_agrees_by_chance_does_not() -> None:
    drafts = Heard()
    governor = EitherGovernor(drafts, 48)
    world = World(0.04, 0.004, {LONG: 0.97, SHORT: 0.2}, (None, None, SHORT, SHORT, LONG))
    verified = world.last(governor)
    assert verified[None] == 0 and verified[SHORT] < 0.2
    assert verified[LONG] > 15
    assert set(drafts.steps) == {(3, 3)}  # nothing else is told to whoever chooses drafts' lengths


def test_where_drafts_are_faster_nothing_takes_their_place() -> None:
    # a step with drafts emits four tokens in 0.1 s: this one at best five in 0.2
    slow = World(0.2, 0.05, {LONG: 0.9}, (LONG,))
    assert slow.last(EitherGovernor(Heard(), 48))[LONG] < 0.5


def test_what_was_never_right_is_tried_again_some_time() -> None:
    world = World(0.04, 0.004, {LONG: 0.0}, (LONG,))
    governor = EitherGovernor(Heard(), 16)
    assert world.last(governor)[LONG] < 0.1
    world.rates[LONG] = 0.98
    assert world.last(governor, steps=6000)[LONG] > 8


def test_nothing_is_compared_before_steps_with_drafts_are_known_and_no_window_grows_at_once() -> None:
    governor = EitherGovernor(Heard(), 64)
    margins = [MARGIN_A_TOKEN * (LONG + i) for i in range(64)]
    for _ in range(8):
        assert governor.instead(margins) == 0
        governor.observe(StepRecord(3, 3, 0.05, 0.05, [5.0] * 3))
    assert governor.instead([]) == 0
    first = governor.instead(margins)
    assert 1 <= first <= 6
    governor.observe(StepRecord(first, first, 0.0, 0.05, margins, found=True))
    second = governor.instead(margins)
    assert first < second <= 2 * (first + 1)


def test_no_window_is_longer_than_it_may_be() -> None:
    governor = EitherGovernor(Heard(), 5)
    world = World(0.04, 0.001, {LONG: 1.0}, (LONG,))
    assert world.last(governor)[LONG] == pytest.approx(5, abs=0.1)


def test_lengths_are_those_of_whoever_chooses_them_without() -> None:
    governor, alone = EitherGovernor(AutoGovernor(16), 16), AutoGovernor(16)
    margins = [MARGIN_A_TOKEN * (LONG + i) for i in range(16)]
    for step in range(300):
        length, gate = governor.choose_gated(16)
        other, other_gate = alone.choose_gated(16)
        assert length == other and (gate is None) == (other_gate is None)
        assert governor.choose() == alone.choose()
        for told in (governor, alone):
            told.observe(StepRecord(length, length // 2, 0.002 * length, 0.02, [0.7] * length))
        count = governor.instead(margins) if step % 3 == 0 else 0
        if count:
            governor.observe(StepRecord(count, count, 0.0, 0.03, margins, found=True))
    assert AutoGovernor(16).instead(margins) == 0 and FixedGovernor(4).instead(margins) == 0
