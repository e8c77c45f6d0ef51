"""How much of what was looked up is verified, in worlds whose texts and times are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.speculative.lookup_governor import LookupGovernor
from localmoe.speculative.prompt_lookup import MARGIN_A_TOKEN
from localmoe.speculative.step_record import StepRecord

LONG, SHORT = 20, 2  # tokens that agree


@dataclass
class World:
    """Steps with a chance of each kind of proposal, accepted at a rate by kind. A further row takes
    `row_s`."""

    row_s: float
    rates: dict[int, float]
    kinds: tuple[int | None, ...]
    longest: int = 16
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    tokens: int = 0

    def step(self, governor: LookupGovernor) -> tuple[int | None, int]:
        """(tokens that agreed, tokens that were verified)."""
        kind = self.chance.choice(self.kinds)
        most, gate = governor.choose_gated(self.longest)
        assert 0 <= most <= self.longest
        margins = [] if kind is None else [MARGIN_A_TOKEN * (kind + i) for i in range(most)]
        drafted = len(margins) if gate is None else gate.worth_verifying(margins)
        rate = 0.0 if kind is None else self.rates[kind]
        accepted = next((i for i in range(drafted) if self.chance.random() >= rate), drafted)
        took_s = 0.1 + self.row_s * drafted
        governor.observe(StepRecord(drafted, accepted, 0.0, took_s, margins))
        self.seconds += took_s
        self.tokens += accepted + 1
        return kind, drafted

    def last(self, governor: LookupGovernor, steps: int = 600, of: int = 300) -> dict[int | None, float]:
        """Mean of the tokens that were verified in the last `of` steps, by kind."""
        seen: dict[int | None, list[int]] = {}
        for number in range(steps):
            if number == steps - of:
                self.seconds, self.tokens = 0.0, 0
            kind, drafted = self.step(governor)
            if number >= steps - of:
                seen.setdefault(kind, []).append(drafted)
        return {kind: sum(drafted) / len(drafted) for kind, drafted in seen.items()}


def test_what_agrees_long_is_verified_and_what_agrees_by_chance_is_not() -> None:
    world = World(0.04, {LONG: 0.97, SHORT: 0.2}, (None, None, SHORT, SHORT, LONG))
    verified = world.last(LookupGovernor(16))
    assert verified[LONG] >= 8 and verified[SHORT] < 0.5
    plain = World(0.04, world.rates, (None,))
    plain.last(LookupGovernor(16))
    assert world.tokens / world.seconds > 1.2 * plain.tokens / plain.seconds


def test_where_a_further_row_costs_as_much_as_a_step_hardly_anything_is_verified() -> None:
    world = World(0.11, {LONG: 0.9, SHORT: 0.2}, (None, SHORT, LONG))
    verified = world.last(LookupGovernor(16))
    assert verified[LONG] < 0.5 and verified[SHORT] < 0.5
    assert world.tokens / world.seconds > 0.97 * 10, "what is tried now and then costs little"


def test_where_rows_cost_nothing_all_is_verified() -> None:
    verified = World(0.0, {LONG: 0.9, SHORT: 0.2}, (None, SHORT, LONG)).last(LookupGovernor(16))
    assert verified[LONG] == verified[SHORT] == 16


def test_what_was_not_worth_it_is_tried_again() -> None:
    governor = LookupGovernor(16)
    bad = World(0.04, {LONG: 0.0}, (None, LONG))
    assert bad.last(governor)[LONG] < 0.2
    assert World(0.04, {LONG: 1.0}, (None, LONG)).last(governor, 2000)[LONG] >= 8


def test_the_first_step_is_a_plain_one_and_windows_grow() -> None:
    governor = LookupGovernor(16)
    world = World(0.01, {LONG: 1.0}, (LONG,))
    assert [world.step(governor)[1] for _ in range(4)] == [0, 3, 8, 16]


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_windows_may_be_as_short_as_they_are(longest: int) -> None:
    World(0.01, {LONG: 0.9, SHORT: 0.2}, (None, SHORT, LONG), longest).last(LookupGovernor(16), 100, 50)
    World(0.01, {LONG: 0.9, SHORT: 0.2}, (None, SHORT, LONG)).last(LookupGovernor(longest), 100, 50)


@given(
    st.lists(st.tuples(st.integers(0, 16), st.floats(0, 1e3), st.sampled_from([SHORT, 7, LONG])), max_size=40)
)
def test_whatever_is_measured_a_length_is_chosen(steps: list[tuple[int, float, int]]) -> None:
    governor = LookupGovernor(16)
    for accepted, seconds, agree in steps:
        most, gate = governor.choose_gated(16)
        margins = [MARGIN_A_TOKEN * (agree + i) for i in range(most)]
        drafted = most if gate is None else gate.worth_verifying(margins)
        assert 0 <= drafted <= most <= 16
        governor.observe(StepRecord(drafted, min(accepted, drafted), 0.0, seconds, margins))
