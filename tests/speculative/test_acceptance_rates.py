"""How likely drafted tokens are accepted: on texts with known rates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.speculative.acceptance_rates import AcceptanceRates


def text(rates: AcceptanceRates, truth: list[float], steps: int, seed: int = 0) -> None:
    """A text whose drafted token i is accepted at the rate truth[i], drafted in full length."""
    chance = random.Random(seed)
    for _ in range(steps):
        accepted = 0
        while accepted < len(truth) and chance.random() < truth[accepted]:
            accepted += 1
        rates.observe(len(truth), accepted)


def test_before_any_evidence_four_of_five_are_taken_to_be_accepted() -> None:
    rates = AcceptanceRates(4)
    assert rates.rates() == pytest.approx([0.8] * 4)
    assert rates.expected_tokens() == pytest.approx([1, 1.8, 2.44, 2.952, 3.3616])


def test_expected_tokens_are_the_sum_of_the_survival_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceptanceRates, "rates", lambda self: [0.5, 0.8, 0.5])
    assert AcceptanceRates(3).expected_tokens() == pytest.approx([1, 1.5, 1.9, 2.1])


def test_what_follows_a_rejection_is_no_evidence_of_its_own() -> None:
    rates = AcceptanceRates(8)
    rates.observe(6, 2)
    found = rates.rates()
    assert found[0] == found[1] > found[3] > found[2]
    assert found[3:] == [found[3]] * 5  # what all positions have in common: two of three


@pytest.mark.parametrize("truth", [[0.3] * 4, [0.97] * 16, [0.95, 0.9, 0.7, 0.5], [0.6, 0.8, 0.95, 0.95]])
def test_rates_come_near_to_the_truth(truth: list[float]) -> None:
    rates, seen = AcceptanceRates(len(truth)), []
    text(rates, truth, 200)
    for seed in range(20):  # a single look is as uncertain as twenty tokens are
        text(rates, truth, 40, seed + 1)
        seen.append(rates.rates())
    means = [sum(column) / len(column) for column in zip(*seen, strict=True)]
    assert means == pytest.approx(truth, abs=0.12)


def test_one_early_rejection_does_not_speak_against_what_lies_behind_it() -> None:
    rates = AcceptanceRates(16)
    text(rates, [0.98] * 8, 100)
    before = rates.rates()[12]
    rates.observe(12, 11)  # the first look at position 11
    assert rates.rates()[12] >= 0.98 * before
    assert rates.rates()[11] >= 0.85


def test_a_change_of_the_text_is_followed() -> None:
    rates = AcceptanceRates(4)
    text(rates, [0.98] * 4, 200)
    text(rates, [0.2] * 4, 60, seed=1)
    assert rates.rates()[0] < 0.4
    text(rates, [0.98] * 4, 60, seed=2)
    assert min(rates.rates()) > 0.85


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=200))
def test_every_rate_is_a_probability_and_longer_drafts_never_yield_less(
    longest: int, steps: list[tuple[int, int]]
) -> None:
    rates = AcceptanceRates(longest)
    for drafted, accepted in steps:
        rates.observe(min(drafted, longest), min(accepted, drafted, longest))
    assert all(0 <= rate <= 1 for rate in rates.rates()) and len(rates.rates()) == longest
    tokens = rates.expected_tokens()
    assert tokens == sorted(tokens) and tokens[0] == 1 and tokens[-1] <= 1 + longest
