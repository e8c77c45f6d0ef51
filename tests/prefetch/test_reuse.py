"""What experts are worth, against plain sums over every token of text; and layers' shares of the slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localmoe.prefetch.reuse import ReuseScores, slot_shares

EXPERTS = 5
used = st.sets(st.integers(0, EXPERTS - 1), max_size=4)


def mask(experts: set[int]) -> NDArray[np.bool_]:
    """One layer's experts."""
    found = np.zeros((1, EXPERTS), dtype=np.bool_)
    found[0, sorted(experts)] = True
    return found


@given(st.lists(st.tuples(st.lists(used, max_size=3), used, st.integers(0, 3)), min_size=1, max_size=6))
def test_worth_is_recent_use_that_halves_with_every_token_and_the_share_of_tokens(
    story: list[tuple[list[set[int]], set[int], int]],
) -> None:
    """Each use by name: the plain sums of R and F."""
    scores = ReuseScores(1, EXPERTS, 4)
    recent, frequency = [0.0] * EXPERTS, [0.0] * EXPERTS
    for routed, demanded, wanted in story:
        drafted = len(routed)
        accepted = min(wanted, drafted)
        told = np.array([mask(one) for one in routed], dtype=np.bool_).reshape(-1, 1, EXPERTS)
        scores.learn_step(mask(demanded), told, accepted, drafted)
        for expert in range(EXPERTS):
            recent[expert] *= 0.5 ** (accepted + 1)
            frequency[expert] *= 0.99 ** (accepted + 1)
            if expert not in demanded:
                continue
            tokens = [t for t, one in enumerate(routed) if expert in one] or [drafted if routed else accepted]
            for token in tokens:
                recent[expert] += 0.5 ** abs(accepted - token)
                frequency[expert] += 0.01 * (token <= accepted)
    expected = np.array(recent) + 5 * np.array(frequency)
    assert scores.worth()[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_prompt_counts_by_the_share_of_its_tokens() -> None:
    told, untold = ReuseScores(1, EXPERTS, 4), ReuseScores(1, EXPERTS, 4)
    shares = np.array([[1.0, 0.5, 0.0, 0.0, 0.0]])
    told.learn_prompt(mask({0, 1}), shares, 100)
    untold.learn_prompt(mask({0, 1}), None, 100)
    kept = 0.99**100
    assert told.worth()[0].tolist() == pytest.approx([2 + 5 * (1 - kept), 1 + 2.5 * (1 - kept), 0, 0, 0])
    assert untold.worth()[0].tolist() == pytest.approx([1.05, 1.05, 0, 0, 0])


def test_a_prompt_of_one_token_counts_as_that_token_does() -> None:
    prompt, step = ReuseScores(1, EXPERTS, 4), ReuseScores(1, EXPERTS, 4)
    prompt.learn_prompt(mask({0, 2}), np.array([[1.0, 0.0, 1.0, 0.0, 0.0]]), 1)
    step.learn_step(mask({0, 2}), np.zeros((0, 1, EXPERTS), dtype=np.bool_), 0, 0)
    assert prompt.worth()[0].tolist() == pytest.approx(step.worth()[0].tolist())


def test_layers_get_slots_by_the_number_of_experts_that_they_use_effectively() -> None:
    frequency = np.array([[1.0, 1, 1, 1], [1, 1, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
    assert slot_shares(frequency).tolist() == pytest.approx([4 / 11, 2 / 11, 1 / 11, 4 / 11])
    scores = ReuseScores(2, 4, 8)
    assert scores.quota().tolist() == [4.0, 4.0]
    for _ in range(40):
        one, two = np.zeros((2, 4), dtype=np.bool_), np.zeros((2, 4), dtype=np.bool_)
        one[0, 0] = one[1, 0] = two[0, 1] = two[1, 0] = True
        scores.learn_step(one, np.zeros((0, 2, 4), dtype=np.bool_), 0, 0)
        scores.learn_step(two, np.zeros((0, 2, 4), dtype=np.bool_), 0, 0)
    assert scores.quota().tolist() == pytest.approx([16 / 3, 8 / 3], rel=0.01)
