"""moe-speq: what it asks for in which phase, and whom it lets go."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PrefillStarted,
    RoomWanted,
    StepFinished,
    StepStarted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policy import CacheShape

SHAPE = CacheShape(num_layers=4, num_experts=8, experts_per_token=2, num_slots=6)
K = ExpertKey


def fresh() -> MoeSpeqPolicy:
    return MoeSpeqPolicy(SHAPE)


def wishes(policy: MoeSpeqPolicy, *events: Event) -> list[ExpertKey]:
    return [request.key for event in events for request in policy.observe(event)]


def room(
    key: ExpertKey, candidates: Sequence[ExpertKey], *, free: int = 0, is_demand: bool = True
) -> RoomWanted:
    return RoomWanted(key, candidates, free, 0, is_demand)


def test_phase_one_asks_for_every_expert_of_the_token_that_is_verified_in_any_case() -> None:
    policy = fresh()
    policy.observe(StepStarted(0, 4))
    assert wishes(policy, DraftRouted(0, 2, (5, 1), (0.99, 0.01))) == [K(2, 5), K(2, 1)]


def test_phase_two_asks_for_what_the_router_is_confident_of_and_what_several_tokens_want() -> None:
    policy = fresh()
    policy.observe(StepStarted(0, 4))
    # half an equal share of two experts is a quarter of the weight
    assert wishes(policy, DraftRouted(1, 0, (3, 4), (0.76, 0.24))) == [K(0, 3)]
    assert wishes(policy, DraftRouted(1, 1, (3, 4), (0.75, 0.25))) == [K(1, 3), K(1, 4)]
    assert wishes(policy, DraftRouted(2, 0, (7, 4), (0.9, 0.1))) == [K(0, 7), K(0, 4)]  # 4 is wanted again


def test_confidence_is_relative_to_the_tokens_own_total() -> None:
    policy = fresh()
    policy.observe(StepStarted(0, 4))
    assert wishes(policy, DraftRouted(1, 0, (3, 4), (7.6, 2.4))) == [K(0, 3)]
    assert wishes(policy, DraftRouted(1, 1, (3, 4), (0.0, 0.0))) == [
        K(1, 3),
        K(1, 4),
    ]  # no weight says anything


def test_phase_three_asks_for_the_rest_when_the_draft_is_done() -> None:
    policy = fresh()
    policy.observe(StepStarted(0, 4))
    early = wishes(policy, DraftRouted(0, 0, (1, 2), (0.5, 0.5)), DraftRouted(1, 0, (3, 4), (0.9, 0.1)))
    late = wishes(policy, DraftFinished(2))
    assert (set(early), late) == ({K(0, 1), K(0, 2), K(0, 3)}, [K(0, 4)])
    assert wishes(policy, DraftFinished(2)) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 3),
            st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True),
        ),
        max_size=30,
    )
)
def test_a_window_is_asked_for_once_each_and_every_request_carries_its_layer(
    routed: list[tuple[int, int, list[int]]],
) -> None:
    policy = fresh()
    policy.observe(StepStarted(0, 4))
    requests = []
    for token, layer, experts in routed:
        requests += policy.observe(DraftRouted(token, layer, tuple(experts), (0.9, 0.1)))
    requests += policy.observe(DraftFinished(4))
    keys = [request.key for request in requests]
    assert sorted(keys) == sorted({K(layer, e) for _, layer, experts in routed for e in experts})
    assert all(request.deadline == request.key.layer for request in requests)


def test_a_new_step_asks_afresh() -> None:
    policy = fresh()
    routed = DraftRouted(0, 0, (1, 2), (0.5, 0.5))
    assert wishes(policy, StepStarted(0, 1), routed, routed) == [K(0, 1), K(0, 2)]
    assert wishes(policy, StepStarted(1, 1), routed) == [K(0, 1), K(0, 2)]


def test_without_drafting_it_asks_for_nothing() -> None:
    policy = fresh()
    events = [PrefillStarted(3), LayerDemanded(0, (1, 2), 3), LayerFinished(0), StepStarted(0, 0)]
    events += [LayerDemanded(0, (1, 2), 1), LayerFinished(0), StepFinished(0, 0)]  # type: ignore[list-item]
    assert wishes(policy, *events) == []  # type: ignore[arg-type]


def test_a_free_slot_is_taken_before_anyone_is_evicted() -> None:
    assert fresh().choose_victim(room(K(0, 0), [K(1, 1)], free=1)) is None


def test_nobody_is_named_where_there_is_nobody() -> None:
    for is_demand in (True, False):
        assert fresh().choose_victim(room(K(0, 0), [], is_demand=is_demand)) is None


def drafted(*keys: ExpertKey) -> MoeSpeqPolicy:
    """A policy whose window needs these."""
    policy = fresh()
    policy.observe(StepStarted(0, 4))
    for key in keys:
        policy.observe(DraftRouted(0, key.layer, (key.expert,), (1.0,)))
    return policy


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 7))), st.data())
def test_what_the_window_needs_stays_while_anything_else_can_go(
    needed: set[tuple[int, int]], data: st.DataObject
) -> None:
    policy = drafted(*(K(*key) for key in needed))
    candidates = data.draw(
        st.lists(st.builds(K, st.integers(0, 3), st.integers(0, 7)), unique=True, max_size=8)
    )
    others = [key for key in candidates if key not in needed]
    is_demand = data.draw(st.booleans())
    victim = policy.choose_victim(room(K(9, 9), candidates, is_demand=is_demand))
    if others:
        assert victim in others
        assert victim == others[0]  # never used by the target: the least recently used goes
    elif victim is not None:
        assert victim.layer == max(key.layer for key in candidates)


def test_among_needed_experts_the_one_needed_last_makes_room_for_a_demand() -> None:
    policy = drafted(K(1, 0), K(3, 0), K(2, 0))
    candidates = [K(1, 0), K(3, 0), K(2, 0)]
    assert policy.choose_victim(room(K(3, 7), candidates)) == K(3, 0)
    assert policy.choose_victim(room(K(0, 7), candidates[::2])) == K(2, 0)


@pytest.mark.parametrize(("layer", "victim"), [(0, K(2, 0)), (1, K(2, 0)), (2, None), (3, None)])
def test_a_prefetch_displaces_a_needed_expert_only_if_that_one_is_needed_later(
    layer: int, victim: ExpertKey | None
) -> None:
    policy = drafted(K(1, 0), K(2, 0))
    assert policy.choose_victim(room(K(layer, 7), [K(1, 0), K(2, 0)], is_demand=False)) == victim


def test_an_expert_is_no_longer_needed_when_its_layer_is_done_or_the_step_is_over() -> None:
    policy = drafted(K(1, 0), K(2, 0))
    policy.observe(LayerDemanded(1, (0,), 2))
    policy.observe(LayerFinished(1))
    assert policy.choose_victim(room(K(3, 7), [K(2, 0), K(1, 0)])) == K(1, 0)
    policy.observe(StepStarted(1, 4))
    assert policy.choose_victim(room(K(3, 7), [K(2, 0), K(1, 0)])) == K(2, 0)  # used less than (1, 0)


def use(policy: MoeSpeqPolicy, *experts: int) -> None:
    policy.observe(LayerDemanded(0, experts, 1))
    policy.observe(LayerFinished(0))


def test_beyond_the_window_the_expert_used_least_goes_and_ties_go_to_the_least_recent() -> None:
    policy = fresh()
    policy.observe(StepStarted(0, 0))
    use(policy, 1, 2)
    use(policy, 1)
    assert policy.choose_victim(room(K(1, 0), [K(0, 1), K(0, 2)])) == K(0, 2)
    assert policy.choose_victim(room(K(1, 0), [K(0, 1), K(0, 2), K(0, 3)])) == K(0, 3)
    assert policy.choose_victim(room(K(1, 0), [K(0, 5), K(0, 4)])) == K(0, 5)


def test_old_uses_fade() -> None:
    policy = fresh()
    use(policy, 1)
    use(policy, 1)
    policy.observe(StepFinished(0, 0))
    use(policy, 2)
    assert policy.choose_victim(room(K(1, 0), [K(0, 1), K(0, 2)])) == K(0, 2)  # 2 * 0.9 against 1
    for _ in range(7):  # 2 * 0.9^8 = 0.86 against 0.9^7 + 1 = 1.48
        policy.observe(StepFinished(0, 0))
    use(policy, 2)
    assert policy.choose_victim(room(K(1, 0), [K(0, 1), K(0, 2)])) == K(0, 1)


def test_frequencies_decay_as_a_plain_sum_would_over_thousands_of_steps() -> None:
    policy, chance = fresh(), random.Random(4)
    plain = [0.0] * 8
    candidates = [K(0, expert) for expert in range(8)]
    for _ in range(3000):
        expert = chance.randrange(8)
        use(policy, expert)
        plain[expert] += 1.0
        lowest = policy.choose_victim(room(K(1, 0), candidates))
        assert lowest is not None
        assert plain[lowest.expert] <= min(plain) * (1 + 1e-6) + 1e-10
        policy.observe(StepFinished(0, 0))
        plain = [score * 0.9 for score in plain]
    assert np.isfinite(policy._score).all()
