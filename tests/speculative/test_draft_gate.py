"""When drafting ends, against what all possible ends are worth."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localmoe.speculative.draft_gate import DraftGate
from localmoe.speculative.margin_rates import MarginRates, class_of

SURE, UNSURE = 9.0, 0.05


def rates_of(sure: float, unsure: float, share: float = 0.9) -> MarginRates:
    """Rates that many steps have taught; `share` of the tokens are sure."""
    rates, chance = MarginRates(), random.Random(0)
    for _ in range(3000):
        margin = SURE if chance.random() < share else UNSURE
        rates.observe([margin], 1, int(chance.random() < (sure if margin == SURE else unsure)))
    return rates


def line(first_s: float, further_s: float, longest: int = 33) -> NDArray[np.float64]:
    return first_s + further_s * np.arange(longest)


def test_it_goes_on_while_the_draft_is_sure_and_stops_where_it_was_not() -> None:
    gate = DraftGate(rates_of(0.99, 0.4), 1e-3, line(20e-3, 3e-3), 150)
    sure = [SURE] * 6
    assert all(gate.goes_on(sure[:n]) for n in range(7))
    assert not gate.goes_on([*sure, UNSURE])  # 0.4 of the tokens behind it would be kept
    assert gate.worth_verifying(sure) == 6
    assert gate.worth_verifying([*sure, UNSURE]) == 6  # a further row costs 0.45 tokens


def test_a_row_that_does_not_pay_for_itself_may_pay_with_those_behind_it() -> None:
    verify_s = np.concatenate([line(20e-3, 3e-3, 8), np.full(8, 41e-3)])  # all experts are there after 8
    gate = DraftGate(rates_of(0.99, 0.4), 1e-3, verify_s, 150)
    assert gate.worth_verifying([*[SURE] * 6, UNSURE]) == 6
    assert gate.worth_verifying([*[SURE] * 6, UNSURE, SURE, SURE]) == 9


def test_a_token_that_costs_nothing_to_verify_is_verified_however_unsure_it_is() -> None:
    gate = DraftGate(rates_of(0.9, 0.1), 1e-3, line(20e-3, 0.0), 100)
    assert gate.worth_verifying([SURE, UNSURE, UNSURE]) == 3


def test_it_does_not_draft_where_a_draft_costs_more_than_it_can_bring() -> None:
    assert not DraftGate(rates_of(0.9, 0.5), 30e-3, line(20e-3, 1e-3), 50).goes_on(())
    assert not DraftGate(rates_of(0.1, 0.1), 5e-3, line(20e-3, 5e-3), 50).goes_on(())


def test_it_never_drafts_more_than_a_window_takes() -> None:
    gate = DraftGate(rates_of(1.0, 1.0), 1e-6, line(20e-3, 0.0, longest=5), 50)
    assert [gate.goes_on([SURE] * n) for n in range(6)] == [True] * 4 + [False] * 2
    assert not DraftGate(rates_of(1.0, 1.0), 1e-6, line(20e-3, 0.0, longest=1), 50).goes_on(())


def test_tokens_that_are_not_heard_of_count_as_any_other() -> None:
    gate = DraftGate(rates_of(0.95, 0.2, share=0.6), 1e-3, line(20e-3, 4e-3), 150)
    assert gate.goes_on([SURE]) and not gate.goes_on([SURE], unheard=4)


@given(
    st.lists(st.sampled_from([0.05, 0.3, 0.6, 1.2, 5.0]), max_size=12), st.floats(0.1e-3, 5e-3),
    st.floats(1e-3, 50e-3), st.floats(0, 10e-3), st.floats(1, 300), st.integers(0, 99),
)  # fmt: skip
def test_the_part_that_is_verified_is_the_best_of_all(
    margins: list[float], draft_s: float, first_s: float, further_s: float, speed: float, seed: int
) -> None:
    """Against the sums themselves: expected tokens less the speed times the seconds."""
    rates, chance = MarginRates(), random.Random(seed)
    for _ in range(40):
        rates.observe([chance.uniform(0, 6) for _ in range(4)], 4, chance.randint(0, 4))
    verify_s = line(first_s, further_s)
    gate = DraftGate(rates, draft_s, verify_s, speed)

    def worth(count: int) -> float:
        tokens, survives = 0.0, 1.0
        for margin in margins[:count]:
            survives *= rates.rates()[class_of(margin)]
            tokens += survives
        return tokens - speed * float(verify_s[count])

    best = max(worth(count) for count in range(len(margins) + 1))
    assert worth(gate.worth_verifying(margins)) == pytest.approx(best)
    survives = float(np.prod([rates.rates()[class_of(margin)] for margin in margins]))
    # drafting one more, and verifying it whatever its margin, must not be better than the gate thinks
    blind = worth(len(margins)) + survives * rates.mean() - speed * further_s - speed * draft_s
    if blind > best + 1e-9:
        assert gate.goes_on(margins)
