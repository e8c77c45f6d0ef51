"""How likely a drafted token is accepted by its margin, on texts of which that is known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.speculative.margin_rates import CLASSES, MarginRates, class_of

MARGINS = st.floats(0, 30) | st.just(math.inf)


def read(
    rates: MarginRates, truth: dict[float, float], steps: int, *, length: int = 8, seed: int = 0
) -> None:
    """Steps whose tokens have one of these margins each, and are accepted at the rate that belongs to it."""
    chance = random.Random(seed)
    for _ in range(steps):
        margins = [chance.choice(list(truth)) for _ in range(length)]
        accepted = 0
        while accepted < length and chance.random() < truth[margins[accepted]]:
            accepted += 1
        rates.observe(margins, length, accepted)


def test_before_any_evidence_larger_margins_are_taken_to_be_safer() -> None:
    rates = MarginRates().rates()
    assert rates == sorted(rates) and rates[0] == 0.5 and rates[-1] == 0.99
    assert len(rates) == CLASSES and class_of(0.0) == 0 and class_of(math.inf) == CLASSES - 1


@pytest.mark.parametrize(
    "truth", [{0.05: 0.5, 0.6: 0.8, 5.0: 0.99}, {0.05: 0.9, 5.0: 0.9}, {0.3: 0.3, 9.0: 0.6}]
)
def test_rates_and_their_mean_come_near_to_the_truth(truth: dict[float, float]) -> None:
    rates = MarginRates()
    read(rates, truth, 600)
    found, shares = rates.rates(), rates.shares()
    for margin, rate in truth.items():
        assert found[class_of(margin)] == pytest.approx(rate, abs=0.12)
        assert shares[class_of(margin)] == pytest.approx(1 / len(truth), abs=0.15)
    assert sum(shares) == pytest.approx(1)
    assert rates.mean() == pytest.approx(sum(truth.values()) / len(truth), abs=0.1)


def test_what_nobody_asked_the_target_about_says_nothing_of_acceptance_but_of_how_frequent_it_is() -> None:
    rates = MarginRates()
    before = rates.rates()
    rates.observe([9.0, 0.05], 1, 1)  # the second one was drafted, and cut off
    assert rates.rates()[:-1] == before[:-1] and rates.rates()[-1] > before[-1]
    assert rates.shares()[0] == pytest.approx(rates.shares()[-1], rel=0.01)
    assert rates.known == 2


def test_what_follows_a_rejection_is_no_evidence() -> None:
    rates = MarginRates()
    rates.observe([0.15, 0.3, 0.6, 9.0], 4, 1)
    before, found = MarginRates().rates(), rates.rates()
    assert found[class_of(0.15)] > before[class_of(0.15)] and found[class_of(0.3)] < before[class_of(0.3)]
    assert found[class_of(0.6)] == before[class_of(0.6)] and found[-1] == before[-1]
    assert rates.shares()[class_of(0.6)] == rates.shares()[-1] == 0.0


def test_expected_tokens_are_the_sum_of_the_survival_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MarginRates, "mean", lambda self: 0.5)
    assert MarginRates().expected_tokens(3) == pytest.approx([1, 1.5, 1.75, 1.875])


@given(st.lists(st.tuples(st.lists(MARGINS, max_size=9), st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_rates_and_shares_stay_what_they_are(steps: list[tuple[list[float], int, int]]) -> None:
    rates = MarginRates()
    for margins, drafted, accepted in steps:
        drafted = min(drafted, len(margins))
        rates.observe(margins, drafted, min(accepted, drafted))
    assert all(0 <= rate <= 1 for rate in [*rates.rates(), *rates.shares(), rates.mean()])
    assert sum(rates.shares()) == pytest.approx(1)
