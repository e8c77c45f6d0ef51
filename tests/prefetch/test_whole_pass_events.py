"""Policies told of whole passes: they want the same and keep the same as when told layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PassRouted,
    PrefetchRequest,
    PrefillStarted,
    RoomWanted,
    StepFinished,
    StepStarted,
    TokenRouted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policies.moe_infinity import MoeInfinityPolicy
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import CacheShape, Policy

LAYERS, EXPERTS, TOP_K = 3, 8, 3
SHAPE = CacheShape(LAYERS, EXPERTS, TOP_K, num_slots=10)
POLICIES = [MoeSpeqPolicy, OnDemandPolicy]
NEVER: NDArray[np.int64] = np.zeros((LAYERS, EXPERTS), dtype=np.int64)


@st.composite
def routed_tokens(draw: st.DrawFn) -> TokenRouted:
    """A token's choices at every layer; confidences are eighths, which sum exactly."""
    experts = [draw(st.permutations(range(EXPERTS)))[:TOP_K] for _ in range(LAYERS)]
    weights = draw(
        st.lists(
            st.lists(st.integers(0, 8), min_size=TOP_K, max_size=TOP_K), min_size=LAYERS, max_size=LAYERS
        )
    )
    confidences = np.array(weights, dtype=np.float32) / 8
    return TokenRouted(draw(st.integers(0, 4)), np.array(experts, dtype=np.int32), confidences)


def layer_by_layer(event: TokenRouted) -> list[Event]:
    return [
        DraftRouted(
            event.token, layer, tuple(event.experts[layer].tolist()), tuple(event.confidences[layer].tolist())
        )
        for layer in range(LAYERS)
    ]


def demanded_of(keys: set[tuple[int, int]]) -> NDArray[np.bool_]:
    demanded = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
    for key in keys:
        demanded[key] = True
    return demanded


def demands_of(demanded: NDArray[np.bool_]) -> list[Event]:
    events: list[Event] = []
    for layer, row in enumerate(demanded):
        events += [LayerDemanded(layer, tuple(np.flatnonzero(row).tolist()), 2), LayerFinished(layer)]
    return events


def wishes(policy: Policy, events: Sequence[Event]) -> list[PrefetchRequest]:
    return [request for event in events for request in policy.observe(event)]


some_keys = st.sets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), max_size=12)
steps = st.lists(st.tuples(st.lists(routed_tokens(), max_size=4), some_keys), min_size=1, max_size=4)


@pytest.mark.parametrize("make", POLICIES)
@settings(max_examples=50)
@given(steps)
def test_the_same_is_asked_for_and_kept_however_it_is_told(
    make: type[Policy], story: list[tuple[list[TokenRouted], set[tuple[int, int]]]]
) -> None:
    whole, by_layer = make(SHAPE), make(SHAPE)
    for number, (tokens, keys) in enumerate(story):
        for policy in (whole, by_layer):
            assert list(policy.observe(StepStarted(number, len(tokens)))) == []
        for token in tokens:
            assert list(whole.observe(token)) == wishes(by_layer, layer_by_layer(token))
        scores, others = whole.keep_scores(NEVER), by_layer.keep_scores(NEVER)
        assert np.array_equal(scores.scores, others.scores)
        drafted = DraftFinished(len(tokens))
        assert list(whole.observe(drafted)) == list(by_layer.observe(drafted))
        demanded = demanded_of(keys)
        assert wishes(whole, [PassRouted(demanded)]) == wishes(by_layer, demands_of(demanded)) == []
        assert np.array_equal(whole.keep_scores(NEVER).scores, by_layer.keep_scores(NEVER).scores)
        for policy in (whole, by_layer):
            policy.observe(StepFinished(len(tokens), 0))
        assert np.array_equal(whole.keep_scores(NEVER).scores, by_layer.keep_scores(NEVER).scores)


@pytest.mark.parametrize("make", [MoeSpeqPolicy, MoeInfinityPolicy])
@given(st.lists(arrays(np.int64, (LAYERS, EXPERTS), elements=st.integers(0, 9)), min_size=1, max_size=3))
def test_a_prompt_s_tokens_count_the_same_however_they_are_told(
    make: type[Policy], passes: list[NDArray[np.int64]]
) -> None:
    whole, by_layer = make(SHAPE), make(SHAPE)
    for counts in passes:
        for policy in (whole, by_layer):
            policy.observe(PrefillStarted(9))
        whole.observe(PassRouted(counts > 0, counts))
        for layer, row in enumerate(counts):
            asked = np.flatnonzero(row)
            by_layer.observe(LayerDemanded(layer, tuple(asked.tolist()), 9, tuple(row[asked].tolist())))
    for policy in (whole, by_layer):
        policy.observe(StepStarted(0, 0))
    assert np.allclose(whole.keep_scores(NEVER).scores, by_layer.keep_scores(NEVER).scores)


def test_moe_speq_keeps_what_the_window_needs_until_the_pass_is_over() -> None:
    policy = MoeSpeqPolicy(SHAPE)
    policy.observe(StepStarted(0, 1))
    experts = np.array([[0, 1, 2]] * LAYERS, dtype=np.int32)
    policy.observe(TokenRouted(0, experts, np.full((LAYERS, TOP_K), 1 / 3, dtype=np.float32)))
    kept = policy.keep_scores(NEVER)
    assert np.isinf(kept.scores[:, :3]).all() and (kept.scores[:, 3:] == 0).all()
    assert not kept.per_layer and kept.scores.dtype == np.float32
    policy.observe(PassRouted(demanded_of({(0, 0), (2, 5)})))
    expected = np.zeros((LAYERS, EXPERTS), dtype=np.float32)
    expected[0, 0] = expected[2, 5] = 1.0
    assert np.array_equal(policy.keep_scores(NEVER).scores, expected)


def test_moe_speq_does_not_ask_for_choices_that_are_no_expert() -> None:
    policy = MoeSpeqPolicy(SHAPE)
    policy.observe(StepStarted(0, 1))
    experts = np.array([[EXPERTS, 1, -1], [2, EXPERTS + 3, 0], [-5, -1, 99]], dtype=np.int32)
    routed = TokenRouted(0, experts, np.full((LAYERS, TOP_K), 0.5, dtype=np.float32))
    assert [request.key for request in policy.observe(routed)] == [(0, 1), (1, 0), (1, 2)]
    assert list(policy.observe(DraftFinished(1))) == []
    assert int(np.isinf(policy.keep_scores(NEVER).scores).sum()) == 3


@given(st.lists(some_keys, min_size=1, max_size=6), some_keys, some_keys, st.integers(0, 999))
def test_moe_speqs_lowest_score_is_the_victim_that_it_would_name(
    passes: list[set[tuple[int, int]]], needed: set[tuple[int, int]], here: set[tuple[int, int]], seed: int
) -> None:
    policy = MoeSpeqPolicy(SHAPE)
    for number, keys in enumerate(passes):
        policy.observe(PassRouted(demanded_of(keys)))
        policy.observe(StepFinished(number, 0))
    policy.observe(StepStarted(9, 1))
    for layer, expert in needed:
        policy.observe(DraftRouted(0, layer, (expert,), (1.0,)))
    candidates = [ExpertKey(*key) for key in sorted(here)]
    np.random.default_rng(seed).shuffle(candidates)  # type: ignore[arg-type]
    candidates = [ExpertKey(*key) for key in candidates]
    scores = policy.keep_scores(NEVER).scores
    finite = [key for key in candidates if np.isfinite(scores[key])]
    assert set(finite) == {key for key in candidates if key not in needed}
    if finite:
        victim = policy.choose_victim(RoomWanted(ExpertKey(0, 0), candidates, 0, 2, True))
        assert victim is not None
        assert scores[victim] == min(scores[key] for key in finite)


@given(st.permutations(range(LAYERS * EXPERTS)), st.integers(1, 12), some_keys)
def test_on_demands_lowest_score_is_the_victim_that_it_would_name(
    order: list[int], num_slots: int, here: set[tuple[int, int]]
) -> None:
    policy = OnDemandPolicy(CacheShape(LAYERS, EXPERTS, TOP_K, num_slots))
    last_use = np.array(order, dtype=np.int64).reshape(LAYERS, EXPERTS)
    kept = policy.keep_scores(last_use)
    assert kept.per_layer == (num_slots >= LAYERS) and kept.scores.dtype == np.float32
    candidates = [ExpertKey(*key) for key in sorted(here, key=lambda key: last_use[key])]
    for layer in range(LAYERS):
        victim = policy.choose_victim(RoomWanted(ExpertKey(layer, 0), candidates, 0, 99, True))
        eligible = [key for key in candidates if not kept.per_layer or key.layer == layer]
        assert victim == min(eligible, key=lambda key: kept.scores[key], default=None)


def test_on_demand_asks_for_nothing() -> None:
    policy = OnDemandPolicy(SHAPE)
    experts = np.zeros((LAYERS, TOP_K), dtype=np.int32)
    assert list(policy.observe(TokenRouted(0, experts, experts.astype(np.float32)))) == []
    assert list(policy.observe(PassRouted(demanded_of({(0, 0)})))) == []
