"""A trial of passes without the CPU against machines of which it is known what is faster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.experts.lane_trial import _APART, _FAR, _GLANCE, _LEAST_APART, _MEASURED, _SETTLING, LaneTrial


class Machine:
    """A pass takes so long with the CPU and without; after a change slots take some passes to settle."""

    def __init__(self, both: float, link: float, *, noise: float = 0.0, seed: int = 0) -> None:
        self.both, self.link, self.noise = both, link, noise
        self.chance = np.random.default_rng(seed)
        self.trial = LaneTrial()
        self.since = 0
        self.out: list[bool] = []

    def run(self, passes: int) -> None:
        for _ in range(passes):
            was = self.trial.out
            settled = min(1.0, self.since / 20)
            own, other = (self.link, self.both) if was else (self.both, self.link)
            mean = own * settled + max(own, other) * (1 - settled)
            self.trial.note(mean * float(self.chance.lognormal(0.0, self.noise)))
            self.out.append(was)
            self.since = self.since + 1 if was == self.trial.out else 0


@pytest.mark.parametrize(("both", "link", "out"), [(1.0, 0.85, True), (0.8, 1.0, False)])
@given(st.integers(0, 1000))
def test_the_faster_way_is_found_and_kept(both: float, link: float, out: bool, seed: int) -> None:
    machine = Machine(both, link, noise=0.1, seed=seed)
    machine.run(2 * (_SETTLING + _MEASURED))
    assert not machine.trial.trying and machine.trial.out == out
    machine.out.clear()
    machine.run(20_000)
    assert np.mean(np.array(machine.out) == out) > 0.97


def test_what_is_far_slower_is_not_tried_to_its_end() -> None:
    machine = Machine(1.0, _FAR + 0.1)
    machine.run(1000)
    assert sum(machine.out) == _GLANCE


def test_what_changes_unseen_is_tried_again_after_a_while_and_what_changes_seen_at_once() -> None:
    machine = Machine(1.0, 0.8)
    machine.run(500)
    assert machine.trial.out
    machine.both = 0.5  # which passes without the CPU do not show
    machine.run(2 * _APART)
    assert not machine.trial.out
    machine.both = 1.5
    machine.run(3 * (_SETTLING + _MEASURED))
    assert machine.trial.out


def test_passes_of_two_texts_are_not_compared() -> None:
    """Of a long one and of a short one, which is faster with the CPU and without."""
    machine = Machine(1.0, 1.2)
    machine.run(_SETTLING + _MEASURED)  # after which the CPU is left out
    assert machine.trial.trying
    machine.both, machine.link = machine.both / 2, machine.link / 2
    machine.trial.begin_text()
    assert not machine.trial.out and not machine.trial.trying
    machine.run(_LEAST_APART + _MEASURED)
    assert machine.trial.trying, "another one, of the text at hand"
    machine.run(_SETTLING + _MEASURED)
    assert not machine.trial.out and not machine.trial.trying


def test_texts_of_other_lengths_do_not_have_trials_follow_each_other() -> None:
    machine = Machine(1.0, 1.2)
    for i in range(40):
        machine.both, machine.link = (1.0, 1.2) if i % 2 else (2.0, 2.4)
        machine.trial.begin_text()
        machine.run(200)
    assert sum(machine.out) < 0.25 * len(machine.out)


def test_hiccups_do_not_count() -> None:
    machine = Machine(1.0, 0.9)
    for _ in range(2 * (_SETTLING + _MEASURED) // 20):
        machine.run(19)
        machine.trial.note(30.0)
    machine.run(20)
    assert machine.trial.out


def test_one_hiccup_does_not_end_a_trial() -> None:
    machine = Machine(1.0, 0.85)
    machine.run(_SETTLING + _MEASURED + _GLANCE // 2)
    machine.trial.note(6.0)
    machine.run(_SETTLING + _MEASURED)
    assert machine.trial.out and not machine.trial.trying


def test_answers_too_short_for_a_trials_end_do_not_each_begin_one() -> None:
    machine = Machine(1.0, 1.35)
    for _ in range(200):
        machine.trial.begin_text()
        machine.run(_SETTLING + _MEASURED + 36)
    assert np.mean(machine.out) < 0.05
