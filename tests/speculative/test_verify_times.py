"""What windows are thought to take, from what some of them took."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.speculative.verify_times import HostTimes, StepTimes, VerifyTimes


def times_of(*measured: tuple[int, float]) -> VerifyTimes:
    times = VerifyTimes()
    for window, seconds in measured:
        times.observe(window, seconds)
    return times


def test_between_two_windows_lies_a_line_and_beyond_the_last_one_tokens_cost_ever_less() -> None:
    curve = times_of((1, 10.0), (5, 14.0), (9, 26.0)).between(36)
    assert curve[[0, 2, 4, 6, 8]] == pytest.approx([10, 12, 14, 20, 26])
    assert curve[17] - curve[8] == pytest.approx(curve[35] - curve[17])  # from 9 to 18 as from 18 to 36
    assert curve[9] - curve[8] == pytest.approx(3, rel=0.1) and curve[35] - curve[34] < 1


def test_one_window_says_the_same_of_all_and_a_missing_first_one_lies_on_the_line() -> None:
    assert times_of((5, 3.0)).between(9) == pytest.approx([3.0] * 9)
    assert times_of((5, 14.0), (9, 18.0)).between(9)[0] == pytest.approx(10.0)


def test_a_time_that_is_longer_than_a_longer_windows_does_not_count() -> None:
    curve = times_of((1, 10.0), (5, 90.0), (17, 30.0)).between(17)
    assert curve[4] == pytest.approx(30.0) and curve[16] == pytest.approx(30.0)


def test_one_disturbed_pass_does_not_count_and_old_ones_are_forgotten() -> None:
    times = times_of((33, 500.0), *[(5, 10.0)] * 2, (5, 900.0), (5, 11.0))
    assert times.between(5)[4] == 10.0 and times.longest == 33
    for _ in range(128):
        times.observe(1, 5.0)
    assert times.longest == 1 and times.between(33) == pytest.approx([5.0] * 33)
    assert VerifyTimes().longest == 0


@pytest.mark.parametrize(
    ("first_s", "growth_s", "power"),
    [(20e-3, 3e-3, 1.0), (0.0, 8e-3, 0.7), (4e-3, 30e-3, 0.25), (9e-3, 0.0, 1.0)],
)
def test_a_fit_finds_what_many_disturbed_passes_have_in_common(
    first_s: float, growth_s: float, power: float
) -> None:
    chance, times = random.Random(1), VerifyTimes()
    for _ in range(120):
        window = chance.choice([1, 1, 2, 3, 3, 5, 6, 8, 11, 14, 20, 30])
        times.observe(window, (first_s + growth_s * window**power) * chance.lognormvariate(0, 0.1))
    truth = first_s + growth_s * np.arange(1.0, 41) ** power
    assert times.fitted(40) == pytest.approx(truth, rel=0.2)
    # and what one more token costs, where tables have steps
    assert np.diff(times.fitted(40))[4:] == pytest.approx(np.diff(truth)[4:], abs=0.05 * float(truth[4]))


def test_a_fit_of_one_window_is_flat_and_one_through_nothing_is_no_less_than_nothing() -> None:
    assert times_of((5, 3.0)).fitted(4) == pytest.approx([3.0] * 4)
    assert times_of((1, 1.0), (9, 27.0)).fitted(9)[0] < 3.1  # through 0


def test_the_hosts_time_is_what_was_measured_for_steps_as_long_and_nothing_before_that() -> None:
    times = HostTimes()
    assert times.of(3).tolist() == [0.0, 0.0, 0.0]
    for seconds in (5e-3, 1e-3, 1.1e-3, 30e-3, 1e-3):  # some were disturbed
        times.observe(1, seconds)
    assert times.of(4) == pytest.approx([1.1e-3] * 4)
    for _ in range(3):
        times.observe(17, 0.1e-3)
    found = times.of(40)
    assert found[0] == pytest.approx(1.1e-3) and found[8] == pytest.approx(0.6e-3)
    assert found[16:] == pytest.approx([0.1e-3] * 24)
    for _ in range(130):
        times.observe(17, 0.1e-3)
    assert times.of(40) == pytest.approx([0.1e-3] * 40)  # one token was too long ago


def steps_of(*measured: tuple[int, float, float]) -> StepTimes:
    """Of steps that drafted so many tokens, and verified all of them."""
    times = StepTimes()
    for drafted, draft_s, verify_s in measured:
        times.observe(drafted, drafted, draft_s, verify_s)
    return times


def test_a_step_takes_what_steps_of_its_length_took_wherever_they_waited() -> None:
    """Each waits until 10: behind one draft of 2, or after the first of several; then verifies in 3."""
    found = steps_of((1, 2.0, 11.0), (2, 12.0, 3.0), (4, 16.0, 3.0), (8, 24.0, 3.0)).of(65)
    assert found[[0, 1, 2, 3, 4, 8]] == pytest.approx([11, 13, 15, 17, 19, 27])
    assert found[[16, 64]] == pytest.approx([43, 139])  # 2 each, as the last ones, and no 3 as on average


def test_steps_of_one_length_say_what_drafts_cost_on_average() -> None:
    assert steps_of((4, 8.0, 5.0)).of(9) == pytest.approx([5, 7, 9, 11, 13, 15, 17, 19, 21])
    assert steps_of((0, 0.0, 5.0)).of(3) == pytest.approx([5.0] * 3)  # nobody knows


def test_beyond_the_longest_step_drafts_cost_the_same_and_verified_tokens_ever_less() -> None:
    found = steps_of((4, 8.0, 14.0), (8, 16.0, 26.0)).of(36) - 2.0 * np.arange(36)
    assert found[17] - found[8] == pytest.approx(found[35] - found[17])  # from 9 to 18 as from 18 to 36
    assert found[9] - found[8] == pytest.approx(3, rel=0.1)


def test_a_draft_costs_no_more_than_on_average_nor_nothing_where_waits_differed() -> None:
    for first_s, further_s in ((1.0, 0.25), (20.0, 2.0)):  # the longer step's took 16: far more, or less
        found = steps_of((4, first_s, 50.0 - first_s), (8, 16.0, 34.0 + 4 * further_s)).of(60)
        assert np.diff(found)[8:] == pytest.approx([further_s] * 51)


def test_tokens_that_were_drafted_and_not_verified_are_no_part_of_a_steps_length() -> None:
    times = StepTimes()
    times.observe(8, 2, 16.0, 5.0)
    assert times.of(9) == pytest.approx([5, 7, 9, 11, 13, 15, 17, 19, 21])


@given(st.lists(st.tuples(st.integers(1, 72), st.floats(1e-4, 1)), min_size=1, max_size=40))
def test_no_window_takes_longer_than_a_longer_one_nor_less_than_nothing(
    measured: list[tuple[int, float]],
) -> None:
    times = times_of(*measured)
    for curve in (times.between(65), times.fitted(65)):
        assert curve.shape == (65,) and (curve >= 0).all() and (np.diff(curve) >= -1e-12).all()
    windows = [window for window, _ in measured]
    assert max(windows[-5:]) <= times.longest <= max(windows)  # of nearly the same length, five are kept


@given(
    st.lists(
        st.tuples(st.integers(0, 72), st.integers(0, 72), st.floats(0, 1), st.floats(1e-4, 1)),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_no_step_takes_longer_than_a_longer_one_nor_less_than_nothing(
    measured: list[tuple[int, int, float, float]],
) -> None:
    times = StepTimes()
    for drafted, verified, draft_s, verify_s in measured:
        times.observe(drafted, min(drafted, verified), draft_s, verify_s)
    curve = times.of(65)
    assert curve.shape == (65,) and (curve >= 0).all() and (np.diff(curve) >= -1e-12).all()
