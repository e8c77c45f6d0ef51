"""Who picks the draft length on a machine whose GPU waits for the host within steps: simulated, so that the
best choice is known."""

from __future__ import annotations

import random

import pytest

from localmoe.speculative.acceptance_rates import AcceptanceRates
from localmoe.speculative.governor import CANDIDATES, AutoGovernor
from localmoe.speculative.step_record import StepRecord

DRAFT_S, FIRST_S, FURTHER_S = 0.17e-3, 0.22e-3, 2e-6  # a draft pass; a verify pass, and each of its tokens
HOST_S = 1e-3  # until the host has issued a step's passes but for its first draft, which runs meanwhile


def parts(length: int, before: int, host_s: float) -> tuple[float, float, float]:
    """Seconds of a step's drafts, its verify pass and the host beside them, after a step of length `before`.
    After one of the other kind no draft ran early, or one that is not wanted."""
    verify_s = FIRST_S + FURTHER_S * (length + 1)
    if bool(length) != bool(before):
        return length * DRAFT_S, verify_s, host_s if length else host_s + DRAFT_S
    if length == 0:
        return 0.0, verify_s, host_s
    if length == 1:
        return DRAFT_S, max(0.0, host_s - DRAFT_S) + verify_s, 0.0
    return max(DRAFT_S, host_s) + (length - 1) * DRAFT_S, verify_s, 0.0


def expected_tokens(length: int, rate: float) -> float:
    return sum(rate**i for i in range(length + 1))


def share_of_best(
    longest: int, rate: float, host_s: float, steps: range, *, disturbed: float = 0.0, seed: int = 0
) -> float:
    """What `auto` reaches in these steps of the best fixed length's tokens a second. disturbed: the share of
    passes that seem to take five times as long."""
    governor, chance = AutoGovernor(longest), random.Random(seed)
    before, tokens, seconds = 0, 0.0, 0.0
    for step in range(steps.stop):
        length, accepted = governor.choose(), 0
        while accepted < length and chance.random() < rate:
            accepted += 1
        took = parts(length, before, host_s)
        seen = (s * chance.uniform(0.95, 1.05) * (5 if chance.random() < disturbed else 1) for s in took)
        draft_s, verify_s, rest_s = seen
        governor.observe(StepRecord(length, accepted, draft_s, verify_s, (), rest_s))
        before = length
        if step in steps:
            tokens, seconds = tokens + expected_tokens(length, rate), seconds + sum(took)
    best = max(expected_tokens(g, rate) / sum(parts(g, g, host_s)) for g in CANDIDATES if g <= longest)
    return tokens / seconds / best


@pytest.mark.parametrize("longest", [24, 64])
@pytest.mark.parametrize("rate", [0.4, 0.8, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("host_s", [0.3e-3, HOST_S, 2e-3])
def test_a_wait_that_a_step_has_once_is_not_taken_for_a_price_of_its_tokens(
    host_s: float, rate: float, longest: int
) -> None:
    """By themselves, drafts of short steps seem dear, and verify passes after a single draft."""
    for seed in range(3):
        assert share_of_best(longest, rate, host_s, range(30, 230), seed=seed) >= 0.88


@pytest.mark.parametrize("rate", [0.9, 0.97, 1.0])
def test_disturbed_steps_do_not_hide_that_short_ones_wait(rate: float) -> None:
    for seed in range(3):
        assert share_of_best(64, rate, HOST_S, range(100, 500), disturbed=0.03, seed=seed) >= 0.88


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Draft lengths that were chosen from, each time that they were compared."""
    found, expected = [], AcceptanceRates.expected_tokens

    def noted(rates: AcceptanceRates) -> list[float]:
        tokens = expected(rates)
        found.append(len(tokens))
        return tokens

    monkeypatch.setattr(AcceptanceRates, "expected_tokens", noted)
    return found


def settled(step_s: float) -> AutoGovernor:
    """After steps that each take so long."""
    governor = AutoGovernor(16)
    for _ in range(200):
        length = governor.choose()
        governor.observe(StepRecord(length, length, 0.0, step_s))
    return governor


def observe(governor: AutoGovernor, length: int, step_s: float, steps: int = 1) -> None:
    for _ in range(steps):
        governor.choose()
        governor.observe(StepRecord(length, length, 0.0, step_s))


@pytest.mark.parametrize(("step_s", "most"), [(1e-3, 6), (4e-3, 18), (20e-3, 50)])
def test_lengths_are_compared_the_less_often_the_shorter_steps_are(
    compared: list[int], step_s: float, most: int
) -> None:
    """The GPU waits for it, and where steps take long, that does not matter."""
    governor = settled(step_s)
    compared.clear()
    observe(governor, 16, step_s, steps=50)
    assert most - 2 <= len(compared) <= most


def test_a_step_far_slower_than_expected_has_lengths_compared_at_once(compared: list[int]) -> None:
    governor = settled(0.1e-3)
    observe(governor, 16, 0.1e-3, steps=20)
    for step_s, times in ((0.1e-3, 0), (0.14e-3, 0), (0.2e-3, 1)):
        compared.clear()
        governor.observe(StepRecord(16, 16, 0.0, step_s))
        governor.choose()
        assert len(compared) == times, step_s


def test_a_longer_window_than_any_has_lengths_compared_at_once(compared: list[int]) -> None:
    governor = AutoGovernor(16)
    for length in (4, 0, 8):
        observe(governor, length, 0.1e-3)
    governor.choose()
    compared.clear()
    observe(governor, 8, 0.1e-3)
    assert not compared
    observe(governor, 12, 0.1e-3)
    governor.choose()
    assert len(compared) == 1
