"""Speculative sampling leaves the target's distribution unchanged: a chi-square test over many draws.

The same test is run on rules that look right and are not, so that a reader sees that it can fail.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from scipy import stats
from table_model import Table, TableRunner
from torch import Tensor

from localmoe.core.config import SamplingConfig
from localmoe.core.gates import Gate
from localmoe.speculative.acceptance import Verdict, accept_sampled, residual
from localmoe.speculative.drafters import Proposal, SelfDrafter
from localmoe.speculative.governor import FixedGovernor, Governor
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import PassStepper

TABLE = Table(agreement=0.4, seed=11)
PROMPT = (0, 3)
LENGTH = 3  # tokens whose joint distribution is compared: 64 cells
TARGET = TABLE.joint(PROMPT, LENGTH)
Rule = Callable[
    [Callable[[int], Tensor], Sequence[Tensor], Sequence[int], Callable[[], float], Callable[[Tensor], int]],
    Verdict,
]


def accept_if_the_target_likes_it_better(target, draft, drafted, uniform, draw) -> Verdict:  # type: ignore[no-untyped-def]
    for i, token in enumerate(drafted):
        if target(i)[token] < draft[i][token]:
            return Verdict(i, draw(residual(target(i), draft[i])))
    return Verdict(len(drafted), draw(target(len(drafted))))


def accept_always(target, draft, drafted, uniform, draw) -> Verdict:  # type: ignore[no-untyped-def]
    return Verdict(len(drafted), draw(target(len(drafted))))


def draw_from_the_target_on_rejection(target, draft, drafted, uniform, draw) -> Verdict:  # type: ignore[no-untyped-def]
    for i, token in enumerate(drafted):
        if uniform() * float(draft[i][token]) >= float(target(i)[token]):
            return Verdict(i, draw(target(i)))
    return Verdict(len(drafted), draw(target(len(drafted))))


def accept_if_drawn_from_the_target(target, draft, drafted, uniform, draw) -> Verdict:  # type: ignore[no-untyped-def]
    """Keeps a token with probability p(x), whatever q was: correct tokens, thrown away too often."""
    for i, token in enumerate(drafted):
        if uniform() >= float(target(i)[token]):
            return Verdict(i, draw(residual(target(i), draft[i])))
    return Verdict(len(drafted), draw(target(len(drafted))))


def speculative_counts(rule: Rule, draft_length: int, runs: int, seed: int) -> Counter[tuple[int, ...]]:
    """Draft, verify by the rule, and repeat until LENGTH tokens are there."""
    sampler = TokenSampler(SamplingConfig(temperature=1.0, seed=seed))
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(runs):
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + LENGTH:
            drafted: list[int] = []
            q: list[Tensor] = []
            for _ in range(draft_length):
                q.append(TABLE.draft([*tokens, *drafted]))
                drafted.append(sampler.draw(q[-1]))
            p = [TABLE.target([*tokens, *drafted[:i]]) for i in range(draft_length + 1)]
            verdict = rule(p.__getitem__, q, drafted, sampler.uniform, sampler.draw)
            tokens += [*drafted[: verdict.accepted], verdict.token]
        counts[tuple(tokens[len(PROMPT) : len(PROMPT) + LENGTH])] += 1
    return counts


def chi_square_p(counts: Counter[tuple[int, ...]]) -> float:
    """Probability of counts at least this far from the target's, if they came from the target."""
    runs = counts.total()
    expected = {cell: probability * runs for cell, probability in TARGET.items()}
    large = [cell for cell in expected if expected[cell] >= 5]
    observed_bins = [counts[cell] for cell in large]
    expected_bins = [expected[cell] for cell in large]
    rest = runs - sum(expected_bins)  # rare continuations share a bin
    if rest > 0:
        observed_bins.append(runs - sum(observed_bins))
        expected_bins.append(rest)
    return float(stats.chisquare(observed_bins, expected_bins).pvalue)


def test_the_draft_differs_from_the_target_enough_to_matter() -> None:
    gaps = [float((TABLE.target(c) - TABLE.draft(c)).abs().sum()) / 2 for c in TABLE.rows["target"]]
    assert sum(gaps) / len(gaps) > 0.2
    assert abs(sum(TARGET.values()) - 1) < 1e-5


@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_the_speculative_output_has_the_targets_distribution(draft_length: int) -> None:
    assert chi_square_p(speculative_counts(accept_sampled, draft_length, 12_000, seed=draft_length)) > 1e-3


@pytest.mark.parametrize("draft_length", [1, 3])
@pytest.mark.parametrize(
    "rule",
    [
        accept_if_the_target_likes_it_better,
        accept_always,
        draw_from_the_target_on_rejection,
        accept_if_drawn_from_the_target,
    ],
)
def test_the_same_test_refutes_naive_rules(rule: Rule, draft_length: int) -> None:
    # from a fifth of the draws that the right rule has to stand
    assert chi_square_p(speculative_counts(rule, draft_length, 2_400, seed=draft_length)) < 1e-6


class StopsWhereUnsure(FixedGovernor):
    """Drafts while the margins are large, and leaves out what is unsure."""

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return min(self.choose(), most), self

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        return margins[-1] > 0.3

    def worth_verifying(self, margins: Sequence[float]) -> int:
        return next((i for i, margin in enumerate(margins) if margin <= 0.3), len(margins))


class LooksAtDraws(SelfDrafter):
    """Calls a token unsure that is not the likeliest, which looks right and is not."""

    def propose(
        self, history: Sequence[int], count: int, sampler: TokenSampler, stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:  # fmt: skip
        proposal = super().propose(history, count, sampler, stop, gate)
        drawn = zip(proposal.tokens, proposal.distributions, strict=True)
        proposal.margins[:] = [9.0 if token == int(q.argmax()) else 0.0 for token, q in drawn]
        return proposal


class LooksBack(FixedGovernor):
    """Wants to leave out all of a draft whose last token is unsure, which depends on the tokens before it."""

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return min(self.choose(), most), self

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        return True

    def worth_verifying(self, margins: Sequence[float]) -> int:
        return 0 if margins[-1] <= 0.3 else len(margins)


def loop_counts(
    governor: Governor,
    drafter: type[SelfDrafter] | None,
    runs: int,
    more: int,
    ends: frozenset[int] = frozenset(),
) -> tuple[Counter[tuple[int, ...]], int, int, int]:
    """What the loop writes, and how many tokens were drafted, verified, and accepted."""
    counts: Counter[tuple[int, ...]] = Counter()
    sampler = TokenSampler(SamplingConfig(temperature=1.0, seed=5))
    drafted = verified = left_out = accepted = 0
    for _ in range(runs):
        made = TableRunner(TABLE)
        stepper = PassStepper(made.runner, drafter and drafter(made.runner, ends), sampler, None)
        loop = SpeculativeLoop(made.runner, stepper, governor, sampler, frozenset(), None)
        tokens = [token for step in loop.run(PROMPT, LENGTH + more) for token in step.tokens]
        counts[tuple(tokens[:LENGTH])] += 1
        drafted += sum(phase == "draft" for phase, _ in made.passes_run)
        verified += made.passes.counters.drafted
        left_out += made.passes.counters.left_out
        accepted += made.passes.counters.accepted
    assert drafted == verified + left_out
    return counts, drafted, verified, accepted


@pytest.mark.parametrize("draft_length", [0, 2])
def test_the_whole_loop_has_the_targets_distribution(draft_length: int) -> None:
    drafter = SelfDrafter if draft_length else None
    counts, _, verified, accepted = loop_counts(FixedGovernor(draft_length), drafter, 3_000, draft_length)
    assert chi_square_p(counts) > 1e-3
    if draft_length:
        assert 0.3 < accepted / verified < 0.95  # both verdicts were exercised


def test_leaving_out_what_the_draft_is_unsure_of_changes_no_distribution() -> None:
    counts, drafted, verified, _ = loop_counts(StopsWhereUnsure(2), SelfDrafter, 3_000, 2)
    assert chi_square_p(counts) > 1e-3
    assert 0.2 < verified / drafted < 0.8  # of what was drafted, both were exercised


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("ends", [frozenset(), frozenset({1, 2})])
def test_what_a_gate_makes_of_later_margins_changes_no_distribution(ends: frozenset[int]) -> None:
    """ends: tokens at which drafts stop. Whether the last one is left out must not depend on it being one."""
    counts, drafted, verified, _ = loop_counts(LooksBack(2), SelfDrafter, 3_000, 2, ends)
    assert chi_square_p(counts) > 1e-3
    assert 0.2 < verified / drafted <= 1.0


@pytest.mark.slow
def test_leaving_out_tokens_by_what_was_drawn_would() -> None:
    counts, drafted, verified, _ = loop_counts(StopsWhereUnsure(2), LooksAtDraws, 3_000, 2)
    assert chi_square_p(counts) < 1e-6 and 0.2 < verified / drafted < 0.8
