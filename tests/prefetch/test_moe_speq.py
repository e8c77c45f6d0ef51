"""moe-speq: what it asks for in which phase, and whom it lets go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PassRouted,
    PrefillStarted,
    Rates,
    RatesMeasured,
    RoomWanted,
    StepFinished,
    StepStarted,
    TokenRouted,
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
    assert wishes(policy, DraftRouted(0, 2, (5, 1), (0.99, 0.01))) == [K(2, 1), K(2, 5)]


def test_phase_two_asks_for_what_the_router_is_confident_of_and_what_several_tokens_want() -> None:
    policy = fresh()
    policy.observe(StepStarted(0, 4))
    # half an equal share of two experts is a quarter of the weight
    assert wishes(policy, DraftRouted(1, 0, (3, 4), (0.76, 0.24))) == [K(0, 3)]
    assert wishes(policy, DraftRouted(1, 1, (3, 4), (0.75, 0.25))) == [K(1, 3), K(1, 4)]
    assert wishes(policy, DraftRouted(2, 0, (7, 4), (0.9, 0.1))) == [K(0, 4), K(0, 7)]  # 4 is wanted again


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
    ),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 7))),
)
def test_a_window_is_asked_for_once_each_but_for_what_is_here_and_every_request_carries_its_layer(
    routed: list[tuple[int, int, list[int]]], resident: set[tuple[int, int]]
) -> None:
    policy, here = fresh(), np.zeros((4, 8), dtype=np.bool_)
    for key in resident:
        here[key] = True
    policy.watch(lambda: here)
    policy.observe(StepStarted(0, 4))
    requests = []
    for token, layer, experts in routed:
        requests += policy.observe(DraftRouted(token, layer, tuple(experts), (0.9, 0.1)))
    requests += policy.observe(DraftFinished(4))
    keys = [request.key for request in requests]
    assert sorted(keys) == sorted({K(layer, e) for _, layer, experts in routed for e in experts} - resident)
    assert all(request.deadline == request.key.layer for request in requests)


def whole_token(token: int, *experts: tuple[int, int]) -> TokenRouted:
    """What a token wants at each of the four layers, of equal weight."""
    return TokenRouted(token, np.array(experts, dtype=np.int32), np.full((4, 2), 0.5, dtype=np.float32))


def test_while_drafting_no_more_is_asked_for_than_the_link_copies_until_the_next_token() -> None:
    """A copy takes 1 s and a draft token 2: two copies a token, and one to keep the link busy meanwhile."""
    policy = fresh()
    policy.observe(RatesMeasured(Rates(copy_s=1.0, draft_token_s=2.0)))
    policy.observe(StepStarted(0, 4))
    first = wishes(policy, whole_token(0, (0, 1), (0, 1), (0, 1), (0, 1)))
    assert first == [K(0, 0), K(1, 0), K(2, 0)], "a layer's second expert comes after the others' first"
    second = wishes(policy, whole_token(1, (0, 1), (0, 1), (0, 1), (4, 5)))
    assert len(second) == 2 and not set(first) & set(second)
    assert wishes(policy, RatesMeasured(Rates(copy_s=10.0, draft_token_s=2.0))) == []
    assert wishes(policy, whole_token(2, (2, 3), (2, 3), (2, 3), (2, 3))) == [], "the link is behind already"


def test_a_layer_far_below_its_share_of_the_slots_is_served_first() -> None:
    policy, here = fresh(), np.zeros((4, 8), dtype=np.bool_)
    here[0, 5:8] = here[1, 6:8] = True  # shares are 1.5 slots each
    policy.watch(lambda: here)
    policy.observe(RatesMeasured(Rates(copy_s=1.0, draft_token_s=2.0)))
    policy.observe(StepStarted(0, 4))
    asked = wishes(policy, whole_token(0, (0, 1), (0, 1), (0, 1), (0, 1)))
    assert asked == [K(2, 0), K(3, 0), K(2, 1)]


def test_before_the_verify_pass_only_copies_that_meet_their_deadline_are_asked_for() -> None:
    """A copy takes two layers' time: of the copies in layer order, the first that is in time is layer 2's,
    and layer 3's would be complete after four layers' time."""
    policy = fresh()
    policy.observe(StepStarted(0, 4))
    policy.observe(RatesMeasured(Rates(copy_s=1.0, draft_token_s=0.0, target_layer_s=0.5)))
    early = wishes(policy, whole_token(0, (0, 1), (0, 1), (0, 1), (0, 1)))
    assert early == [K(0, 0)]
    assert wishes(policy, DraftFinished(1)) == [K(2, 0)]
    policy.observe(StepStarted(1, 4))
    policy.observe(RatesMeasured(Rates(copy_s=1.0, draft_token_s=0.0, target_layer_s=0.0)))
    wishes(policy, whole_token(0, (0, 1), (0, 1), (0, 1), (0, 1)))
    assert wishes(policy, DraftFinished(1)) == [], "layers that take no time leave none for copies"


def test_where_the_cpu_helps_copies_end_before_the_verify_pass() -> None:
    """The link brings experts in the pass itself then; a copy takes 1 s and a draft token 2."""
    policy = fresh()
    policy.observe(RatesMeasured(Rates(copy_s=1.0, draft_token_s=2.0, target_layer_s=9.0, cpu_helps=True)))
    policy.observe(StepStarted(0, 2))
    assert len(wishes(policy, whole_token(0, (0, 1), (0, 1), (0, 1), (0, 1)))) == 3
    assert wishes(policy, whole_token(1, (2, 3), (2, 3), (2, 3), (2, 3))) == [], (
        "the last one that is drafted"
    )
    assert wishes(policy, DraftFinished(2)) == []
    policy.observe(RatesMeasured(Rates(copy_s=1.0, draft_token_s=2.0, target_layer_s=9.0)))
    assert wishes(policy, DraftFinished(2)), "without the CPU all of it is in time"


def test_a_draft_that_ends_early_has_a_last_token_too() -> None:
    policy = fresh()
    policy.observe(RatesMeasured(Rates(copy_s=1.0, draft_token_s=2.0, target_layer_s=9.0, cpu_helps=True)))
    for last in (False, True):
        policy.observe(StepStarted(0, 9))
        policy.observe(whole_token(0, (0, 1), (0, 1), (0, 1), (0, 1)))
        asked = wishes(policy, replace(whole_token(1, (2, 3), (2, 3), (2, 3), (2, 3)), last=last))
        assert bool(asked) != last
    policy.observe(StepStarted(1, 9))
    assert wishes(policy, whole_token(0, (0, 1), (0, 1), (0, 1), (0, 1))), "the next step's is not over"


def test_nothing_is_asked_for_that_costs_the_host_more_than_it_spares_the_link() -> None:
    policy = fresh()
    rates = Rates(copy_s=1.0, draft_token_s=2.0, target_layer_s=9.0, issue_s=1.0)
    policy.observe(RatesMeasured(rates))
    policy.observe(StepStarted(0, 4))
    assert wishes(policy, whole_token(0, (0, 1), (0, 1), (0, 1), (0, 1))) == []
    assert not policy.asks_after_drafts and wishes(policy, DraftFinished(4)) == []
    policy.observe(RatesMeasured(replace(rates, issue_s=0.9)))
    assert policy.asks_after_drafts and wishes(policy, DraftFinished(4))
    policy.observe(StepStarted(1, 4))
    assert wishes(policy, whole_token(0, (2, 3), (2, 3), (2, 3), (2, 3)))


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
        assert victim == others[0]  # never used by the target: the least recently used goes
    elif is_demand and candidates:
        assert victim is not None and victim.layer == max(key.layer for key in candidates)
    else:
        assert victim is None, "a prefetch displaces nothing that the window needs"


def test_what_a_later_token_turns_out_to_need_stays_from_then_on() -> None:
    policy = drafted(K(1, 0))
    assert policy.choose_victim(room(K(3, 7), [K(2, 5), K(2, 6)])) == K(2, 5)
    policy.observe(DraftRouted(1, 2, (5,), (1.0,)))
    assert policy.choose_victim(room(K(3, 7), [K(2, 5), K(2, 6)])) == K(2, 6)


def test_among_needed_experts_the_one_needed_last_makes_room_for_a_demand() -> None:
    policy = drafted(K(1, 0), K(3, 0), K(2, 0))
    candidates = [K(1, 0), K(3, 0), K(2, 0)]
    assert policy.choose_victim(room(K(3, 7), candidates)) == K(3, 0)
    assert policy.choose_victim(room(K(0, 7), candidates[::2])) == K(2, 0)


def test_an_expert_is_no_longer_needed_when_its_layer_is_done_or_the_step_is_over() -> None:
    policy = drafted(K(1, 0), K(2, 0))
    policy.observe(LayerDemanded(1, (0,), 2))
    policy.observe(LayerFinished(1))
    assert policy.choose_victim(room(K(3, 7), [K(2, 0), K(1, 0)])) == K(1, 0)
    policy.observe(StepStarted(1, 4))
    assert policy.choose_victim(room(K(3, 7), [K(2, 0), K(1, 0)])) == K(2, 0)  # used less than (1, 0)


def test_what_the_pass_at_hand_used_counts_as_the_most_recent() -> None:
    policy = fresh()
    for used in ((0, (1,)), (0, (2,))):
        for event in (StepStarted(0, 0), LayerDemanded(*used, 1), LayerFinished(0), StepFinished(0, 0)):
            policy.observe(event)
    assert policy.choose_victim(room(K(1, 0), [K(0, 2), K(0, 1)])) == K(0, 1)
    policy.observe(StepStarted(2, 0))
    policy.observe(LayerDemanded(0, (1,), 1))
    assert policy.choose_victim(room(K(1, 0), [K(0, 2), K(0, 1)])) == K(0, 2)


def test_layers_above_their_share_of_the_slots_give_first() -> None:
    policy, here = fresh(), np.zeros((4, 8), dtype=np.bool_)
    here[2, :3] = here[3, 0] = True
    policy.watch(lambda: here)
    for event in (StepStarted(0, 0), LayerDemanded(2, (0, 1, 2), 1), StepFinished(0, 0)):
        policy.observe(event)
    candidates = [K(3, 0), K(2, 1), K(2, 0)]
    assert policy.choose_victim(room(K(1, 0), candidates)) == K(2, 1), "used, but its layer has 3 of 1.5"
    scores = policy.keep_scores(np.zeros((4, 8), dtype=np.int64)).scores
    assert scores[2].max() < scores[3].min() and np.isfinite(scores).all()


def test_a_prompts_pass_is_learnt_from_like_steps() -> None:
    """Told layer by layer with counts, or as a whole: what it used is kept before what it did not."""
    for told in (
        [LayerDemanded(0, (1, 3), 4, (4, 1)), LayerFinished(0)],
        [PassRouted(demanded((0, 1), (0, 3)))],
    ):
        policy = fresh()
        for event in (PrefillStarted(4), *told, StepStarted(0, 0)):
            policy.observe(event)
        assert policy.choose_victim(room(K(1, 0), [K(0, 1), K(0, 2), K(0, 3)])) == K(0, 2)
        if len(told) == 2:
            assert policy.choose_victim(room(K(1, 0), [K(0, 1), K(0, 3)])) == K(0, 3), "by fewer tokens"


def demanded(*keys: tuple[int, int]) -> NDArray[np.bool_]:
    found = np.zeros((4, 8), dtype=np.bool_)
    for key in keys:
        found[key] = True
    return found
