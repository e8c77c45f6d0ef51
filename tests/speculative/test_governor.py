"""Who picks the draft length: simulated machines with known costs, on which the best choice is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.speculative.acceptance_rates import AcceptanceRates
from localmoe.speculative.governor import CANDIDATES, AutoGovernor, FixedGovernor, Governor
from localmoe.speculative.step_record import StepRecord

Cost = Callable[[int], float]


def accepted_of(drafted: int, rate: float, chance: random.Random) -> int:
    kept = 0
    while kept < drafted and chance.random() < rate:
        kept += 1
    return kept


def simulate(
    governor: AutoGovernor, steps: int, *, rate: float, draft_s: float, verify: Cost, seed: int = 0
) -> list[int]:
    """The lengths that it chose."""
    chance, chosen = random.Random(seed), []
    for _ in range(steps):
        length = governor.choose()
        chosen.append(length)
        noise = chance.uniform(0.95, 1.05)
        governor.observe(
            StepRecord(
                length,
                accepted_of(length, rate, chance),
                draft_s * length * noise,
                verify(length + 1) * noise,
            )
        )
    return chosen


def true_rate(length: int, rate: float, draft_s: float, verify: Cost) -> float:
    tokens = sum(rate**i for i in range(length + 1))
    return tokens / (length * draft_s + verify(length + 1))


@pytest.mark.parametrize("rate", [1.0, 0.95, 0.4])
@pytest.mark.parametrize(
    ("draft_s", "verify_s", "further_s", "host_s"),
    [
        (0.22e-3, 0.2e-3, 0.01e-3, 1.0e-3),  # a tiny model, that waits for the host
        (0.5e-3, 0.6e-3, 0.1e-3, 0.7e-3),
        (1.8e-3, 8e-3, 4e-3, 1.0e-3),  # a large one, whose passes hide it
    ],
)
def test_what_the_host_takes_beside_the_passes_is_reckoned_with(
    rate: float, draft_s: float, verify_s: float, further_s: float, host_s: float
) -> None:
    """The host works beside the passes of steps that are alike in a row; the first of another kind waits for
    it."""

    def passes_s(length: int) -> float:
        return draft_s * length + verify_s + further_s * length

    def speed(length: int) -> float:
        tokens = sum(rate**i for i in range(length + 1))
        return tokens / max(host_s, passes_s(length))

    governor, chance, before, speeds = AutoGovernor(24), random.Random(0), 0, []
    for _ in range(600):
        length = governor.choose()
        took = max(host_s, passes_s(length)) if bool(length) == bool(before) else host_s + passes_s(length)
        governor.observe(StepRecord(
            length, accepted_of(length, rate, chance), draft_s * length, verify_s + further_s * length, (),
            took - passes_s(length),
        ))  # fmt: skip
        before = length
        speeds.append(speed(length))
    best = max(speed(length) for length in CANDIDATES if length <= 24)
    assert sum(speeds[-300:]) / 300 > 0.88 * best


def test_somebody_who_was_slow_to_take_tokens_for_a_moment_is_forgotten() -> None:
    governor, chance, chosen = AutoGovernor(24), random.Random(0), []
    for step in range(900):
        length = governor.choose()
        host_s = 0.02 if 300 <= step < 320 and not length else 0.0
        governor.observe(
            StepRecord(length, accepted_of(length, 0.3, chance), 2e-3 * length, 5e-3, (), host_s)
        )
        chosen.append(length)
    assert chosen[200:300].count(0) > 80
    assert chosen[320:360].count(0) < 20, "it was not seen"
    assert chosen[-200:].count(0) > 160


def flat(window: int) -> float:
    return 10e-3


def per_token(window: int) -> float:
    return 10e-3 * window


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_fixed_length_is_fixed(length: int) -> None:
    governor = FixedGovernor(length)
    for _ in range(5):
        assert governor.choose() == length
        governor.observe(StepRecord(length, 0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("rate", "draft_s", "verify"),
    [
        (0.05, 3e-3, flat),  # the draft is nearly always wrong
        (0.8, 20e-3, flat),  # drafting a token costs two target passes
        (0.9, 5e-3, per_token),  # verifying n tokens costs n passes
    ],
)
def test_drafting_is_given_up_where_it_does_not_pay(rate: float, draft_s: float, verify: Cost) -> None:
    chosen = simulate(AutoGovernor(64), 400, rate=rate, draft_s=draft_s, verify=verify)
    assert Counter(chosen[200:])[0] >= 190  # but for a look at a neighbour now and then
    assert max(chosen[200:]) <= 1


def test_windows_are_long_where_nearly_everything_is_accepted_and_verifying_costs_the_same() -> None:
    chosen = simulate(AutoGovernor(64), 300, rate=0.995, draft_s=0.5e-3, verify=flat)
    assert Counter(chosen[150:]).most_common(1)[0][0] >= 48  # 3 % slower than 64


@pytest.mark.parametrize(
    "rate", [0.3, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.6, 0.8)), 0.9]
)
@pytest.mark.parametrize("draft_s", [0.5e-3, 2e-3, 5e-3])
@pytest.mark.parametrize("slope_s", [0.0, 0.5e-3, 2e-3])
def test_the_speed_that_it_reaches_is_close_to_the_best_there_is(
    rate: float, draft_s: float, slope_s: float
) -> None:
    def verify(window: int) -> float:
        return 10e-3 + slope_s * (window - 1)

    chosen = simulate(AutoGovernor(64), 500, rate=rate, draft_s=draft_s, verify=verify, seed=1)
    best = max(true_rate(length, rate, draft_s, verify) for length in CANDIDATES)
    reached = [true_rate(length, rate, draft_s, verify) for length in chosen[200:]]
    assert sum(reached) / len(reached) >= 0.85 * best


def shared_experts(window: int) -> float:
    """Uniform routing, 4 of 60: the share of all experts that a window asks for costs up to 120 ms."""
    return 12e-3 + 120e-3 * (1 - (56 / 60) ** window)


@pytest.mark.parametrize(("rate", "longest"), [(0.97, 64), (0.9, 64), (0.97, 16)])
def test_long_windows_are_found_soon_where_their_tokens_share_experts(rate: float, longest: int) -> None:
    """Verifying 9 tokens costs 66 ms, 49 cost 128: a straight line through the short ones says 346."""
    shares = []
    for seed in range(8):
        chosen = simulate(
            AutoGovernor(longest), 60, rate=rate, draft_s=1.6e-3, verify=shared_experts, seed=seed
        )
        reached = [true_rate(length, rate, 1.6e-3, shared_experts) for length in chosen[30:]]
        best = max(true_rate(g, rate, 1.6e-3, shared_experts) for g in CANDIDATES if g <= longest)
        shares.append(sum(reached) / len(reached) / best)
    assert sorted(shares)[1] >= 0.85, shares


@pytest.mark.parametrize("rate", [0.9, 0.97])
def test_lengths_that_were_tried_while_the_cache_was_empty_are_tried_again(rate: float) -> None:
    """Whatever was tried first met an empty cache, and what is used most is measured with a full one."""
    shares = []
    for seed in range(8):
        governor, chance, chosen = AutoGovernor(64), random.Random(seed), []
        best = max(true_rate(g, rate, 1.4e-3, shared_experts) for g in CANDIDATES)
        for step in range(200):
            length = governor.choose()
            chosen.append(true_rate(length, rate, 1.4e-3, shared_experts))
            cold = 1 + 4 * 0.8**step
            governor.observe(StepRecord(
                length, accepted_of(length, rate, chance), 1.4e-3 * length,
                cold * shared_experts(length + 1) * chance.uniform(0.95, 1.05),
            ))  # fmt: skip
        shares.append(sum(chosen[60:]) / len(chosen[60:]) / best)
    assert sorted(shares)[1] >= 0.85, shares


def test_it_notices_that_a_text_became_easy_while_it_hardly_drafted() -> None:
    """Where one token is drafted a step, or none, there is little evidence that more would be accepted."""

    def verify(window: int) -> float:
        return 2e-3 + 98e-3 * (1 - (56 / 60) ** window)

    best, shares = max(true_rate(length, 0.99, 1.5e-3, verify) for length in CANDIDATES), []
    for seed in range(8):
        governor, reached = AutoGovernor(64), []
        for turn in range(3):
            simulate(governor, 150, rate=0.9, draft_s=1.5e-3, verify=verify, seed=seed + 10 * turn)
            easy = simulate(governor, 150, rate=0.99, draft_s=1.5e-3, verify=verify, seed=seed + 100 + turn)
            reached += [true_rate(length, 0.99, 1.5e-3, verify) / best for length in easy]
        shares.append(sum(reached) / len(reached))
    assert sorted(shares)[2] >= 0.65, shares  # no drafting at all: 0.48


def test_it_follows_a_change_of_the_text() -> None:
    governor = AutoGovernor(64)
    simulate(governor, 200, rate=0.98, draft_s=1e-3, verify=flat)
    hard = simulate(governor, 300, rate=0.1, draft_s=4e-3, verify=flat, seed=2)
    assert Counter(hard[150:]).most_common(1)[0][0] <= 1


@pytest.mark.parametrize("spoilt", range(6))
def test_one_measurement_a_hundred_times_too_slow_does_not_turn_drafting_off_for_good(spoilt: int) -> None:
    governor = AutoGovernor(64)
    for step in range(6):  # the first passes of a process compile kernels and touch cold memory
        length = governor.choose()
        slow = 100 if step == spoilt else 1
        governor.observe(StepRecord(length, length, 0.5e-3 * length * slow, flat(length + 1) * slow))
    chosen = simulate(governor, 400, rate=0.99, draft_s=0.5e-3, verify=flat)
    reached = sum(true_rate(length, 0.99, 0.5e-3, flat) for length in chosen[200:]) / 200
    assert reached >= 0.5 * max(true_rate(length, 0.99, 0.5e-3, flat) for length in CANDIDATES)


@given(st.integers(0, 16), st.floats(0, 1), st.floats(0, 1))
def test_after_a_single_measurement_every_prediction_is_a_finite_rate(
    drafted: int, draft_s: float, verify_s: float
) -> None:
    governor = AutoGovernor(16)
    governor.observe(StepRecord(drafted, drafted // 2, draft_s, verify_s))
    for length in CANDIDATES:
        assert 0 < governor.expected_tokens_per_s(length) < float("inf")
    assert governor.choose() in CANDIDATES


@given(
    st.integers(0, 70),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 20), st.floats(0, 1)), max_size=120),
)
def test_it_never_leaves_its_candidates_nor_the_longest_length_allowed(
    longest: int, steps: list[tuple[float, float, int, float]]
) -> None:
    governor = AutoGovernor(longest)
    for draft_s, verify_s, shortened_to, share in steps:
        length = governor.choose()
        assert length in CANDIDATES
        assert length <= longest
        assert governor.choose() == length  # asking twice changes nothing
        drafted = min(length, shortened_to)  # the end of the answer may cut a draft short
        governor.observe(StepRecord(drafted, int(share * drafted), draft_s, verify_s))


def test_the_time_of_a_window_not_seen_yet_lies_on_the_line_through_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    governor = AutoGovernor(16)
    for length, verify_s in ((4, 14e-3), (0, 10e-3), (8, 26e-3)):
        governor.observe(StepRecord(length, 0, 0.0, verify_s))
    monkeypatch.setattr(AcceptanceRates, "rates", lambda self: [0.0] * 16)  # a step is one token
    # windows 1, 5, 9 were seen at 10, 14, 26 ms; beyond them tokens cost ever less
    for length, expected_ms in ((0, 10), (1, 11), (3, 13), (4, 14), (6, 20), (8, 26), (12, 35.93)):
        assert 1e3 / governor.expected_tokens_per_s(length) == pytest.approx(expected_ms, rel=1e-3)


def read_margins(
    governor: Governor, steps: int, verify: Cost, *, informed: bool, gated: bool = True, seed: int = 0
) -> tuple[float, list[int]]:
    """Tokens a second, and how many were drafted in each step, on a text of which one token in ten is unsure.
    Those are accepted at 0.55, the others at 0.995; or all alike, whatever the draft says of them."""
    chance, tokens, seconds, lengths = random.Random(seed), 0, 0.0, []
    for step in range(steps):
        margins, right = [], []

        def draft(margins: list[float] = margins, right: list[bool] = right) -> None:
            margins.append(
                chance.choice([0.05, 0.3]) if chance.random() < 0.1 else chance.choice([1.2, 3.5, 8.0])
            )
            rate = (0.55 if margins[-1] < 1 else 0.995) if informed else 0.9505
            right.append(chance.random() < rate)

        most, gate = governor.choose_gated(64) if gated else (governor.choose(), None)
        while len(margins) < most and (gate is None or gate.goes_on(margins)):
            draft()
        count = most if gate is None else gate.worth_verifying(margins)
        accepted = next((i for i in range(count) if not right[i]), count)
        verify_s = verify(count + 1) * chance.uniform(0.95, 1.05)
        governor.observe(StepRecord(count, accepted, 1.5e-3 * len(margins), verify_s, margins))
        if step >= 150:
            tokens, seconds = tokens + accepted + 1, seconds + verify_s + 1.5e-3 * len(margins)
            lengths.append(count)
    return tokens / seconds, lengths


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("first_s", "further_s"), [(6e-3, 1.2e-3), (30e-3, 3e-3), (9e-3, 4e-3)])
def test_stopping_where_the_draft_is_unsure_beats_every_fixed_length(
    first_s: float, further_s: float
) -> None:
    def verify(window: int) -> float:
        return first_s + further_s * (window - 1)

    def mean_of(make: Callable[[], Governor], gated: bool) -> float:
        runs = (read_margins(make(), 450, verify, informed=True, gated=gated, seed=s)[0] for s in range(4))
        return sum(runs) / 4

    best = max(
        mean_of(lambda length=length: FixedGovernor(length), False) for length in (1, 3, 4, 8, 12, 16, 24)
    )  # type: ignore[misc]
    assert mean_of(lambda: AutoGovernor(64), True) >= 1.06 * best


@pytest.mark.parametrize("verify", [flat, shared_experts, per_token])
def test_margins_that_say_nothing_cost_little(verify: Cost) -> None:
    reached = [read_margins(AutoGovernor(64), 400, verify, informed=False, seed=s)[0] for s in range(6)]
    best = max(true_rate(length, 0.9505, 1.5e-3, verify) for length in CANDIDATES)
    assert sorted(reached)[1] >= 0.85 * best, [rate / best for rate in reached]


def test_where_nothing_is_worth_drafting_it_looks_seldom_whether_that_has_changed() -> None:
    _, lengths = read_margins(AutoGovernor(64), 400, lambda window: 2e-3 * window, informed=True)
    assert lengths.count(0) >= 0.9 * len(lengths) and max(lengths) > 0


@given(
    st.integers(0, 70), st.integers(0, 80),
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 20), st.floats(0, 1), st.floats(0, 9)),
        max_size=120,
    ),
)  # fmt: skip
def test_gated_or_not_it_never_drafts_more_than_there_is_room_for(
    longest: int, room: int, steps: list[tuple[float, float, int, float, float]]
) -> None:
    governor = AutoGovernor(longest)
    for draft_s, verify_s, stopped_at, share, margin in steps:
        most, gate = governor.choose_gated(room)
        assert 0 <= most <= min(longest, room)
        assert governor.choose_gated(room)[0] == most  # asking twice changes nothing
        margins = [margin] * (most if gate is None else min(most, stopped_at))
        count = len(margins) if gate is None else gate.worth_verifying(margins)
        assert count <= len(margins)
        governor.observe(StepRecord(count, int(share * count), draft_s, verify_s, margins))
