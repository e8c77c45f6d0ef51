"""Simulated routing and acceptance: the promised distributions, whatever is asked first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.errors import ConfigError
from localmoe.core.routing_trace import RoutingTrace
from localmoe.core.synthetic import RoutingSpec, SyntheticSettings
from localmoe.model.synthetic import BLOCK, Experts, SyntheticGate, SyntheticModel

UNIFORM = RoutingSpec("uniform")


def sticky(repeat: float) -> RoutingSpec:
    return RoutingSpec("sticky", repeat=repeat)


def model(
    routing: RoutingSpec | None = UNIFORM,
    shape: tuple[int, int, int] = (4, 16, 3),
    *,
    acceptance: float | None = 0.7,
    match: float | None = 0.8,
    seed: int = 0,
) -> SyntheticModel:
    return SyntheticModel(SyntheticSettings(routing, acceptance, match, seed), *shape)


def repeats(routing: Experts) -> np.ndarray:
    """(T - 1, L): how many of a layer's experts the position before used too."""
    shared: np.ndarray = (routing[1:, :, :, None] == routing[:-1, :, None, :]).any(-1).sum(-1)
    return shared


def trace_file(folder: Path, experts: np.ndarray, starts: list[int], num_experts: int) -> RoutingSpec:
    trace = RoutingTrace("a model", num_experts, experts.astype(np.int16), np.array(starts, np.int64))
    trace.write(folder / "trace.npz")
    return RoutingSpec("trace", path=folder / "trace.npz")


shapes = st.integers(1, 12).flatmap(
    lambda experts: st.tuples(st.integers(1, 4), st.just(experts), st.integers(1, experts))
)
routings = st.one_of(st.just(UNIFORM), st.floats(0, 1).map(sticky))


@settings(max_examples=40)
@given(
    shape=shapes, routing=routings, match=st.floats(0, 1), seed=st.integers(0, 2**63 - 1),
    windows=st.lists(
        st.tuples(st.integers(0, 2 * BLOCK), st.integers(1, 40), st.booleans()), min_size=1, max_size=5
    ),
)  # fmt: skip
def test_windows_asked_in_any_order_agree_with_positions_asked_one_by_one(
    shape: tuple[int, int, int],
    routing: RoutingSpec,
    match: float,
    seed: int,
    windows: list[tuple[int, int, bool]],
) -> None:
    layers, experts, top_k = shape
    match = 1.0 if experts == top_k else match
    asked = model(routing, shape, match=match, seed=seed)
    again = model(routing, shape, match=match, seed=seed)
    targets = again.target_window(0, 3 * BLOCK)
    for start, count, draft_first in windows:
        first, second = ("draft", "verify") if draft_first else ("prefill", "draft")
        for phase in (first, second):
            got = asked.forced(phase, start, count)  # type: ignore[arg-type]
            assert got is not None and got.dtype == np.int64 and got.shape == (count, layers, top_k)
            assert got.min() >= 0 and got.max() < experts
            assert (np.diff(np.sort(got, axis=-1), axis=-1) > 0).all(), "an expert was chosen twice"
            if phase == "draft":
                assert (got[0] == again.draft_routing(start)).all()
                missing = (got[:, :, :, None] != targets[start : start + count, :, None, :]).all(-1).sum(-1)
                assert missing.max() <= 1, "a draft differs by one expert at most"
                assert match < 1 or not missing.any()
            else:
                assert (got == targets[start : start + count]).all()
                assert (got[-1] == again.target_routing(start + count - 1)).all()


@pytest.mark.parametrize("routing", [UNIFORM, sticky(0.0), sticky(0.4), sticky(0.9)], ids=str)
def test_every_expert_is_used_alike_often_at_every_layer(routing: RoutingSpec) -> None:
    layers, experts, top_k = 3, 10, 3
    # sticky positions depend on each other, answers do not
    used = np.zeros((layers, experts))
    pairs = np.zeros((experts, experts))
    simulated = model(routing, (layers, experts, top_k))
    answers = 400
    for answer in range(answers):
        simulated.begin(answer)
        for position in (0, 7):
            for layer, chosen in enumerate(simulated.target_routing(position)):
                used[layer, chosen] += 1
                pairs[np.ix_(chosen, chosen)] += 1
    expected, spread = 2 * answers * top_k / experts, np.sqrt(2 * answers * 0.3 * 0.7)
    assert abs(used - expected).max() < 5.5 * spread, "twice the independent spread, as neighbours repeat"
    both = pairs[~np.eye(experts, dtype=bool)]
    expected = 2 * answers * layers * top_k * (top_k - 1) / experts / (experts - 1)
    assert abs(both - expected).max() < 5.5 * np.sqrt(2 * expected), "experts are drawn without preference"


def test_uniform_routing_repeats_as_often_as_chance_does() -> None:
    share = repeats(model(UNIFORM, (8, 16, 4)).target_window(0, 4 * BLOCK)).mean() / 4
    assert share == pytest.approx(4 / 16, abs=0.01)


@pytest.mark.parametrize(
    ("repeat", "shape"),
    [(0.0, (8, 16, 4)), (0.3, (8, 16, 4)), (0.3, (8, 60, 4)), (0.75, (8, 8, 2)), (1.0, (8, 16, 4))],
)
def test_sticky_routing_repeats_with_its_probability_and_each_expert_on_its_own(
    repeat: float, shape: tuple[int, int, int]
) -> None:
    top_k = shape[2]
    shared = repeats(model(sticky(repeat), shape).target_window(0, 4 * BLOCK))
    size = shared.size * top_k
    assert shared.mean() / top_k == pytest.approx(repeat, abs=5 * np.sqrt(0.25 / size) if repeat % 1 else 0)
    assert shared.var() == pytest.approx(top_k * repeat * (1 - repeat), rel=0.1), "a binomial count"


def test_sticky_routing_goes_on_where_a_block_of_positions_ends() -> None:
    window = model(sticky(0.9), (2000, 16, 4)).target_window(BLOCK - 1, 2)
    assert repeats(window).mean() / 4 == pytest.approx(0.9, abs=0.02)


def test_sticky_routing_with_few_other_experts_replaces_as_many_as_there_are() -> None:
    shared = repeats(model(sticky(0.0), (6, 5, 3)).target_window(0, 2 * BLOCK))
    assert (shared >= 1).all() and (shared == 1).mean() > 0.3  # two others at most
    everyone = model(sticky(0.0), (2, 4, 4), match=1.0).target_window(0, 50)
    assert (np.sort(everyone, -1) == np.arange(4)).all()


@pytest.mark.parametrize("match", [0.0, 0.25, 0.9, 1.0])
def test_the_draft_routes_as_the_target_with_the_probability_of_a_match(match: float) -> None:
    simulated = model(sticky(0.4), (8, 12, 3), match=match)
    target, draft = simulated.target_window(0, 4 * BLOCK), simulated.draft_window(0, 4 * BLOCK)
    same = (np.sort(target, -1) == np.sort(draft, -1)).all(-1)
    assert same.mean() == pytest.approx(match, abs=5 * np.sqrt(0.25 / same.size) if match % 1 else 0)
    if match == 0.0:
        places = np.bincount((target != draft).argmax(-1).ravel(), minlength=3) / same.size
        assert places == pytest.approx(1 / 3, abs=0.03), "any of the experts is replaced"
        others = draft[target != draft]
        assert np.bincount(others, minlength=12) / len(others) == pytest.approx(1 / 12, abs=0.015)


@pytest.mark.parametrize("acceptance", [0.0, 0.35, 0.9, 1.0])
def test_a_drafted_token_is_accepted_with_its_probability_at_any_position(acceptance: float) -> None:
    simulated = model(acceptance=acceptance)
    accepted = np.array([simulated.accepts(position) for position in range(6000)])
    assert accepted.mean() == pytest.approx(acceptance, abs=0.035 if acceptance % 1 else 0)
    assert model(acceptance=acceptance).accepts(3000) == accepted[3000], "asked for first of all"
    following = (accepted[1:] & accepted[:-1]).mean()
    assert following == pytest.approx(acceptance**2, abs=0.04), "positions are independent"


@pytest.mark.parametrize("routing", [UNIFORM, sticky(0.5)], ids=str)
def test_another_answer_or_seed_is_routed_differently_and_the_first_again_the_same(
    routing: RoutingSpec,
) -> None:
    simulated = model(routing)
    first = simulated.target_window(0, 20), simulated.draft_window(0, 20)
    simulated.begin(0)
    assert (simulated.target_window(0, 20) == first[0]).all()
    simulated.begin(1)
    other = simulated.target_window(0, 20), [simulated.accepts(i) for i in range(60)]
    assert (other[0] != first[0]).any()
    simulated.begin(0)
    assert (simulated.target_window(0, 20) == first[0]).all()
    assert (simulated.draft_window(0, 20) == first[1]).all()
    assert [simulated.accepts(i) for i in range(60)] != other[1]
    assert (model(routing, seed=1).target_window(0, 20) != first[0]).any()


def test_margins_are_small_where_tokens_are_rejected_and_the_same_however_they_are_asked_for() -> None:
    simulated = SyntheticModel(SyntheticSettings(acceptance=0.9), 2, 8, 2)
    margins = simulated.margins(0, 4000)
    accepted = [simulated.accepts(at) for at in range(4000)]
    assert margins[300:340] == [margin for at in range(300, 340) for margin in simulated.margins(at, 1)]
    assert np.median([m for m, kept in zip(margins, accepted, strict=True) if kept]) > 2
    assert np.median([m for m, kept in zip(margins, accepted, strict=True) if not kept]) < 0.3
    sure = [kept for m, kept in zip(margins, accepted, strict=True) if m > 1]
    assert len(sure) > 2500 and sum(sure) / len(sure) > 0.985
    simulated.begin(1)
    assert simulated.margins(0, 50) != margins[:50]
    simulated.begin(0)
    assert simulated.margins(0, 50) == margins[:50]


def test_a_gate_hears_the_simulated_margins_instead_of_its_models() -> None:
    simulated, heard = SyntheticModel(SyntheticSettings(acceptance=0.9), 2, 8, 2), []

    class Listening:
        def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
            heard.append((margins, unheard))
            return True

        def worth_verifying(self, margins: Sequence[float]) -> int:
            heard.append((margins, 0))
            return 2

    gate = SyntheticGate(Listening(), simulated, 30)
    assert gate.goes_on([0.0, 0.0], unheard=1) and gate.worth_verifying([0.0] * 3) == 2
    assert heard == [(simulated.margins(30, 2), 1), (simulated.margins(30, 3), 0)]


def test_what_is_not_simulated_is_left_to_the_router() -> None:
    alone = model(None, match=None)
    assert alone.forced("verify", 0, 4) is None and alone.forced("draft", 0, 4) is None
    target_only = model(UNIFORM, match=None)
    assert target_only.forced("verify", 0, 4) is not None and target_only.forced("draft", 0, 4) is None


def test_a_trace_is_replayed_from_each_prompt_on_around_its_end(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    experts = rng.random((300, 2, 8)).argsort(-1)[:, :, :3]
    routing = trace_file(tmp_path, experts, [0, 40, 110], 8)
    simulated = model(routing, (2, 8, 3), match=0.5)
    for answer, begin in ((0, 0), (1, 40), (2, 110), (3, 0), (4, 40)):
        simulated.begin(answer)
        rows = (begin + np.arange(700)) % 300
        assert (simulated.target_window(0, 700) == experts[rows]).all()
        same = (np.sort(simulated.draft_window(0, 700)) == np.sort(experts[rows])).all(-1)
        assert same.mean() == pytest.approx(0.5, abs=0.08)


def test_a_trace_of_another_shape_is_refused_with_the_numbers(tmp_path: Path) -> None:
    routing = trace_file(tmp_path, np.zeros((5, 2, 1)), [0], 8)
    for shape in ((3, 8, 1), (2, 16, 1), (2, 7, 1), (2, 8, 2)):
        with pytest.raises(ConfigError, match=r"2 MoE layers of 8 experts, 1 a token.*has") as refusal:
            model(routing, shape)
        assert f"{shape[0]} layers of {shape[1]} experts, {shape[2]} a token" in str(refusal.value)
    model(routing, (2, 8, 1))


def test_a_draft_cannot_differ_where_every_expert_is_used() -> None:
    with pytest.raises(ConfigError, match="All 4 experts"):
        model(UNIFORM, (2, 4, 4), match=0.5)


def test_sixteen_tokens_cost_far_less_than_a_step() -> None:
    def per_window() -> float:
        simulated = model(sticky(0.5), (24, 60, 4))
        started = time.perf_counter()
        for i in range(64):
            simulated.target_window(16 * i, 16)
        return (time.perf_counter() - started) / 64

    assert min(per_window() for _ in range(5)) < 0.3e-3  # s
