"""Where the draft is worth its memory: decided by rates that were measured, bounded before, tried then."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.stats import GenerationCounters
from localmoe.speculative.draft_worth import DraftWorth, WatchedGovernor
from localmoe.speculative.governor import FixedGovernor
from localmoe.speculative.step_record import StepRecord

LENGTH = 4


class Decoding:
    """A machine: what a step takes with a draft of LENGTH, without, and without once experts have its memory;
    `misses` of a plain step and what each costs."""

    def __init__(self, drafted_s: float, plain_s: float, aside_s: float, misses: int, miss_s: float) -> None:
        self.drafted_s, self.plain_s, self.aside_s, self.misses = drafted_s, plain_s, aside_s, misses
        self.miss_s = miss_s
        self.lengths: list[int] = []

    def answer(self, worth: DraftWorth, steps: int, accepted: int = LENGTH) -> None:
        """One answer of so many steps."""
        counters = GenerationCounters()
        inner = FixedGovernor(0 if worth.aside else LENGTH)
        governor = WatchedGovernor(inner, worth, counters, lambda: self.miss_s)
        for _ in range(steps):
            length = governor.choose()
            self.lengths.append(length)
            counters.misses += self.misses if length == 0 else 3 * self.misses
            plain_s = self.aside_s if worth.aside else self.plain_s
            took_s = self.drafted_s if length else plain_s
            governor.observe(StepRecord(length, min(accepted, length), 0.0, took_s))


def test_a_draft_that_pays_stays_and_costs_nine_plain_steps_in_five_hundred() -> None:
    worth = DraftWorth(0.3)
    machine = Decoding(drafted_s=0.02, plain_s=0.012, aside_s=0.01, misses=40, miss_s=1e-4)
    for _ in range(3):
        machine.answer(worth, 500)
        assert not worth.wants_aside and not worth.wants_back
    assert worth.drafted_per_s == pytest.approx(5 / 0.02)
    # of 12 ms the misses cost 4, of which 30 % are spared
    assert worth.bound_per_s == pytest.approx(1 / 0.0108)
    assert machine.lengths.count(0) == 27  # of 1,500 steps


def test_memory_that_is_worth_more_to_experts_is_tried_and_kept() -> None:
    worth = DraftWorth(0.4)
    machine = Decoding(drafted_s=0.05, plain_s=0.012, aside_s=0.008, misses=60, miss_s=1e-4)
    machine.answer(worth, 100)
    assert worth.wants_aside  # 100 tok/s drafted, at least 1 / (12 - 2.4 ms) without
    assert worth.bound_per_s == pytest.approx(1 / 0.0096)
    worth.moved(aside=True)
    machine.answer(worth, 60)  # empty slots are not judged by
    assert worth.plain_per_s is None and not worth.wants_back
    machine.answer(worth, 60)
    assert worth.plain_per_s == pytest.approx(1 / 0.008) and not worth.wants_back


def test_a_trial_that_failed_is_taken_back_and_not_repeated() -> None:
    worth = DraftWorth(0.4)
    machine = Decoding(drafted_s=0.05, plain_s=0.012, aside_s=0.0115, misses=60, miss_s=1e-4)
    machine.answer(worth, 100)
    assert worth.wants_aside
    worth.moved(aside=True)
    machine.answer(worth, 120)
    assert worth.wants_back
    worth.moved(aside=False)
    for _ in range(20):
        machine.answer(worth, 100)
        assert not worth.wants_aside
    assert machine.lengths.count(0) == 9 + 120  # a probe, and the trial
    machine.answer(worth, 200, accepted=2)  # harder text: 60 tok/s drafted beside 87 that were measured
    assert worth.wants_aside


def test_where_the_drafts_memory_holds_no_further_expert_nothing_is_probed() -> None:
    worth = DraftWorth(0.0)
    machine = Decoding(drafted_s=0.05, plain_s=0.001, aside_s=0.001, misses=0, miss_s=1e-4)
    machine.answer(worth, 300)
    assert 0 not in machine.lengths and not worth.wants_aside


def test_a_probe_that_an_answers_end_interrupts_begins_anew() -> None:
    worth = DraftWorth(0.5)
    machine = Decoding(drafted_s=0.05, plain_s=0.01, aside_s=0.01, misses=20, miss_s=1e-4)
    machine.answer(worth, 72 + 5)
    assert worth.wants_probe and worth.bound_per_s is None
    machine.answer(worth, 9)
    assert worth.bound_per_s == pytest.approx(1 / 0.009)


@given(st.floats(0, 1), st.floats(1e-4, 1), st.floats(1e-4, 1), st.integers(0, 1000), st.floats(0, 1e-2))
def test_the_bound_lies_between_the_probes_rate_and_that_without_what_is_spared(
    spared: float, drafted_s: float, plain_s: float, misses: int, miss_s: float
) -> None:
    worth = DraftWorth(spared)
    Decoding(drafted_s, plain_s, plain_s, misses, miss_s).answer(worth, 90)
    if spared == 0:
        assert worth.bound_per_s is None
        return
    assert worth.bound_per_s is not None
    assert worth.bound_per_s >= 0.999 / plain_s
    if spared < 1:
        assert worth.bound_per_s <= 1.001 / (plain_s * (1 - spared))


@pytest.mark.parametrize("routing", ["uniform", "popular", "sticky"])
@pytest.mark.parametrize("slots", [60, 200, 345])
def test_further_slots_spare_at_least_the_share_of_misses_that_the_bound_counts_on(
    routing: str, slots: int
) -> None:
    """Least recently used slots, 24 layers of 60 experts, 4 a token. Misses fall faster than along the
    straight line to none at all, and along it where what is no repetition is uniform (but for some 3 %: a
    layer is asked for when it was used longest ago)."""
    generator = np.random.default_rng(0)
    layers, experts, top_k, tokens = 24, 60, 4, 500
    weight = -1.1 * np.log(np.arange(1, experts + 1)) if routing == "popular" else np.zeros(experts)
    rows = np.argsort(-(weight + generator.gumbel(size=(tokens, layers, experts))), axis=2)[..., :top_k]
    if routing == "sticky":
        for at in range(1, tokens):
            kept = generator.random(layers) < 0.6
            rows[at][kept] = rows[at - 1][kept]
    few = misses_of(rows, slots)
    for more in (slots + 100, slots + 387):
        spared = (more - slots) / (layers * experts - slots)
        assert misses_of(rows, more) <= few * (1 - spared) * (1.0 if routing == "popular" else 1.04)


def misses_of(rows: np.ndarray, slots: int) -> int:
    """Of an LRU cache, from the token on at which it is full."""
    held: dict[tuple[int, int], None] = {}
    misses = 0
    for at, token in enumerate(rows):
        for layer, chosen in enumerate(token):
            for expert in chosen:
                key = layer, int(expert)
                if held.pop(key, 0) == 0:
                    misses += at >= 100
                    if len(held) == slots:
                        del held[next(iter(held))]
                held[key] = None
    return misses
