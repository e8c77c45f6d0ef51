"""next-gate, adapmoe, moe-infinity and sp-moe: their decisions on examples worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.events import (
    DraftRouted,
    Event,
    LayerDemanded,
    NextGateGuessed,
    PassRouted,
    PrefillStarted,
    Rates,
    RatesMeasured,
    RoomWanted,
    StepFinished,
    StepStarted,
    TokenRouted,
)
from localmoe.core.types import ExpertKey as K
from localmoe.prefetch.policies.adapmoe import AdapMoePolicy, best_shares, expected_copies
from localmoe.prefetch.policies.moe_infinity import CAPACITY, MoeInfinityPolicy
from localmoe.prefetch.policies.next_gate import NextGatePolicy
from localmoe.prefetch.policies.sp_moe import SpMoePolicy, cutoff_layers
from localmoe.prefetch.policy import CacheShape, Policy

SHAPE = CacheShape(num_layers=3, num_experts=8, experts_per_token=2, num_slots=12)


def holding(policy: Policy, *keys: K) -> np.ndarray:
    """The policy sees these in slots; the table, to be changed."""
    here = np.zeros((SHAPE.num_layers, SHAPE.num_experts), dtype=np.bool_)
    for key in keys:
        here[key] = True
    policy.watch(lambda: here)
    return here


def wishes(policy: Policy, *events: Event) -> list[K]:
    return [request.key for event in events for request in policy.observe(event)]


def room(key: K, candidates: Sequence[K], *, free: int = 0, held: int = 9, demand: bool = True) -> RoomWanted:
    return RoomWanted(key, candidates, free, held, demand)


# -- next-gate


def test_next_gate_asks_for_the_next_layers_likeliest_experts_that_are_not_here() -> None:
    policy = NextGatePolicy(SHAPE)
    holding(policy, K(1, 5))
    assert wishes(policy, NextGateGuessed(1, (5, 2, 7), (0.6, 0.3, 0.1), 1)) == [K(1, 2)]
    assert policy.wants_next_gate and policy.needs_layers
    assert wishes(policy, StepStarted(0, 2), DraftRouted(0, 0, (1, 2), (0.5, 0.5))) == []


def test_a_guess_of_next_gate_displaces_nothing_until_it_is_used() -> None:
    """12 slots: 3 are the buffer, so each of the 3 layers has 3."""
    policy = NextGatePolicy(SHAPE)
    own = [K(0, e) for e in range(3)] + [K(1, e) for e in range(3)] + [K(2, e) for e in range(3)]
    here = holding(policy, *own)
    assert wishes(policy, NextGateGuessed(1, (6, 7), (0.6, 0.4), 1)) == [K(1, 6), K(1, 7)]
    assert policy.choose_victim(room(K(1, 6), own, free=3, held=3, demand=False)) is None, "a buffer slot"
    assert policy.choose_victim(room(K(1, 6), own, free=0, held=3, demand=False)) is None, "so it waits"
    here[1, 6] = here[1, 7] = True
    policy.observe(LayerDemanded(1, (6, 0), 1))  # 6 was right, 7 was not
    assert policy.choose_victim(room(K(2, 7), own, demand=False)) == K(1, 0), (
        "layer 1 has more than its share"
    )
    # layer 1 is done: a demand takes the wrong guess before anything that was ever used
    assert policy.choose_victim(room(K(0, 7), [*own, K(1, 7)], held=3)) == K(0, 0), "layer 1 may still come"
    assert policy.choose_victim(room(K(2, 7), [*own, K(1, 7)], held=3)) == K(1, 7)
    assert policy.choose_victim(room(K(2, 7), own, held=3)) == K(2, 0), "else as on-demand"


# -- adapmoe


def test_adapmoe_prefetches_the_first_guess_that_is_not_here() -> None:
    policy = AdapMoePolicy(SHAPE)
    holding(policy, K(1, 5))
    assert wishes(policy, NextGateGuessed(1, (5, 2, 7), (0.6, 0.3, 0.1), 1)) == [K(1, 2)]
    assert wishes(policy, NextGateGuessed(1, (5, 5), (0.6, 0.3), 1)) == []


@pytest.mark.parametrize("policy", [NextGatePolicy(SHAPE), AdapMoePolicy(SHAPE)])
def test_what_is_no_expert_is_not_asked_for(policy: Policy) -> None:
    holding(policy, K(1, 5), K(1, 7))
    asked = wishes(policy, NextGateGuessed(1, (8, -1, 5, 2), (0.4, 0.3, 0.2, 0.1), 1))
    assert asked == [K(1, 2)]
    assert wishes(policy, NextGateGuessed(1, (-1, 8, 900), (0.6, 0.3, 0.1), 1)) == []


@given(st.integers(0, 8), st.floats(0, 1))
def test_adapmoes_cost_is_the_papers_for_two_of_eight_experts(s: int, a: float) -> None:
    missing_both, missing_one = (8 - s) * (7 - s) / 56, 2 * (8 - s) * s / 56
    paper = 2 * missing_both * (1 - a) + missing_both * a + missing_one * (1 - a)
    assert expected_copies(8, 2, np.array([a]))[0, s] == pytest.approx(paper, abs=1e-12)


@given(st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=2, max_size=3), st.integers(2, 9))
def test_adapmoes_shares_are_the_cheapest_of_all(rows: list[list[float]], slots: int) -> None:
    costs = np.array(rows)
    budget = max(len(rows), min(slots, len(rows) * 3))
    shares = best_shares(costs, budget)
    options = [s for s in product(range(1, 4), repeat=len(rows)) if sum(s) == budget]
    cheapest = min(sum(row[n] for row, n in zip(rows, option, strict=True)) for option in options)
    assert sum(shares) == budget and min(shares) >= 1
    assert sum(row[n] for row, n in zip(rows, shares, strict=True)) == pytest.approx(cheapest)


def test_adapmoe_gives_slots_to_layers_whose_guesses_fail() -> None:
    policy = AdapMoePolicy(SHAPE)
    holding(policy)
    for _ in range(200):
        for event in (
            NextGateGuessed(1, (3, 4), (0.6, 0.4), 1), LayerDemanded(1, (3, 5), 1),  # right
            NextGateGuessed(2, (3, 4), (0.6, 0.4), 1), LayerDemanded(2, (6, 7), 1),  # wrong
            StepFinished(0, 0),
        ):  # fmt: skip
            policy.observe(event)
    shares = policy._cache.shares
    assert sum(shares) == 12 and shares[1] < shares[2] and shares[1] < shares[0], shares
    full = [K(1, e) for e in range(shares[1])]
    assert policy.choose_victim(room(K(1, 7), full, free=2, held=shares[1])) == K(1, 0)
    assert policy.choose_victim(room(K(0, 7), full, free=2, held=shares[1])) is None


# -- moe-infinity


def sequence(policy: Policy, *demands: tuple[int, tuple[int, ...]]) -> None:
    """A whole sequence: a prompt that uses these."""
    policy.observe(PrefillStarted(4))
    for layer, experts in demands:
        policy.observe(LayerDemanded(layer, experts, 4))
    policy.observe(StepStarted(0, 0))


def test_moe_infinity_predicts_what_the_most_similar_sequence_used_nearer_layers_first() -> None:
    policy = MoeInfinityPolicy(SHAPE)
    here = holding(policy)
    sequence(policy, (0, (1,)), (1, (2, 3)), (2, (4,)))
    sequence(policy, (0, (5,)), (1, (6,)), (2, (7,)))
    assert wishes(policy, LayerDemanded(0, (5,), 1)) == [K(2, 4), K(1, 2), K(1, 3)], "the only one there is"
    sequence(policy, (0, (5,)), (1, (0, 2, 7)), (2, (5,)))  # but for layer 0, which is masked, like the first
    requests = policy.observe(LayerDemanded(0, (1,), 1))
    # p: layer 1 half each at (1 - 1/4), layer 2 all at (1 - 2/4)
    assert [(r.key, pytest.approx(-r.deadline, abs=1e-6)) for r in requests] == [
        (K(2, 4), 0.5), (K(1, 2), 0.375), (K(1, 3), 0.375)
    ]  # fmt: skip
    here[2, 4] = here[2, 7] = True
    assert wishes(policy, LayerDemanded(1, (2,), 1)) == []
    assert policy.needs_layers and not policy.wants_next_gate


def test_moe_infinity_forgets_the_sequence_that_was_matched_least() -> None:
    policy = MoeInfinityPolicy(SHAPE)
    holding(policy)
    for number in range(CAPACITY + 3):
        sequence(policy, (1, (number % 4,)), (2, (number % 3,)))
    assert len(policy._collection) == CAPACITY and len(policy._matched) == CAPACITY


def test_moe_infinity_evicts_what_is_rare_foreign_to_the_sequence_or_far_ahead() -> None:
    policy = MoeInfinityPolicy(SHAPE)
    holding(policy)
    sequence(policy, (0, (1,)), (0, (1,)), (0, (2,)), (2, (1,)))
    policy.observe(LayerDemanded(1, (0,), 1))
    candidates = [K(0, 1), K(0, 2), K(2, 1)]
    # frequency x share x nearness from layer 1: 2 x 2/3 x (1 - 2/4), 1 x 1/3 x 1/2, 1 x 1 x (1 - 1/4)
    assert policy.choose_victim(room(K(1, 5), candidates)) == K(0, 2)
    assert policy.choose_victim(room(K(1, 5), candidates[::2])) == K(0, 1)
    assert policy.choose_victim(room(K(1, 5), candidates, free=1)) is None
    assert policy.choose_victim(room(K(1, 5), [])) is None
    policy.observe(PassRouted(np.ones((3, 8), dtype=np.bool_)))
    scores = policy.keep_scores(np.zeros((3, 8), dtype=np.int64)).scores
    assert scores.shape == (3, 8) and scores[0, 1] > scores[0, 2] > scores[0, 3] > 0


# -- sp-moe


@pytest.mark.parametrize(
    ("slots", "copy_s", "layer_s", "cutoff"),
    [
        (99, 1.0, 2.0, 10),  # N t_io = 2 L <= 20: all ten layers, though (L - 1) 2 + 2 <= 20 is just met
        (99, 1.0, 1.0, 5),  # 2 L <= 10
        (99, 3.0, 1.0, 1),  # 6 L <= 10
        (99, 6.0, 1.0, 0),  # one layer's experts take longer than the draft
        (7, 1.0, 2.0, 3),  # the slots hold three layers' experts
        (99, 1.5, 2.0, 6),  # 3 L <= 20
    ],
)
def test_the_cutoff_of_sp_moe_is_the_last_layer_whose_experts_come_in_time(
    slots: int, copy_s: float, layer_s: float, cutoff: int
) -> None:
    shape = CacheShape(10, 8, 2, slots)
    assert cutoff_layers(shape, Rates(copy_s, 10 * layer_s)) == cutoff
    assert cutoff_layers(shape, Rates()) == min(10, slots // 2), "unmeasured, only the slots count"
    # of the link and the host that asks, the slower counts
    assert cutoff_layers(shape, Rates(copy_s / 2, 10 * layer_s, issue_s=copy_s)) == cutoff
    assert cutoff_layers(shape, Rates(copy_s, 10 * layer_s, issue_s=copy_s / 2)) == cutoff


def test_sp_moe_asks_for_a_drafted_layers_experts_together_up_to_the_cutoff() -> None:
    policy = SpMoePolicy(SHAPE)
    holding(policy, K(0, 4))
    assert wishes(policy, DraftRouted(0, 0, (4, 1), (0.5, 0.5)), DraftRouted(0, 2, (6, 7), (0.5, 0.5))) == [
        K(0, 1), K(2, 6), K(2, 7)
    ]  # fmt: skip
    policy.observe(RatesMeasured(Rates(copy_s=1.0, draft_token_s=4.0)))  # 2 L <= 4
    assert policy.cutoff == 2
    assert wishes(policy, DraftRouted(1, 1, (4, 8), (0.5, 0.5))) == [K(1, 4)], "8 is no expert"
    assert wishes(policy, DraftRouted(1, 2, (4, 1), (0.5, 0.5))) == []
    experts = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32)
    whole = policy.observe(TokenRouted(1, experts, np.full((3, 2), 0.5, dtype=np.float32)))
    assert [r.key for r in whole] == [K(0, 1), K(0, 2), K(1, 3), K(1, 4)]
    assert whole[0].deadline == whole[1].deadline < whole[2].deadline, "in the order of the batches"
    policy.observe(RatesMeasured(Rates(copy_s=9.0, draft_token_s=4.0)))
    assert wishes(policy, DraftRouted(2, 0, (2, 3), (0.5, 0.5))) == [], "solved anew when the link slows down"


def test_sp_moe_evicts_the_least_recently_used_of_all_layers() -> None:
    policy = SpMoePolicy(SHAPE)
    for demand in (True, False):
        assert policy.choose_victim(room(K(0, 1), [K(2, 2), K(0, 3)], demand=demand)) == K(2, 2)
        assert policy.choose_victim(room(K(0, 1), [K(2, 2)], free=1, demand=demand)) is None
        assert policy.choose_victim(room(K(0, 1), [], demand=demand)) is None
    last_use = np.arange(24).reshape(3, 8)
    kept = policy.keep_scores(last_use)
    assert np.array_equal(kept.scores, last_use) and not kept.per_layer
