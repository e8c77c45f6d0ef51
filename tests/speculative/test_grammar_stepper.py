"""Tokens that a grammar has to allow, where the host decides: asked before each, or looked at afterwards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speculative.table_model import Rule, Table, TableRunner

from localmoe.core.config import SamplingConfig
from localmoe.core.errors import ConfigError
from localmoe.speculative.drafters import SelfDrafter
from localmoe.speculative.governor import FixedGovernor
from localmoe.speculative.grammar_stepper import GrammarStepper
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import PassStepper, Stepper

PROMPT, NO_END = [1, 2, 0], frozenset[int]()


def answer(
    runner: TableRunner, rule: Rule, length: int, afterwards: bool, count: int, sampling: SamplingConfig
) -> Iterator[list[int]]:
    """The tokens of its steps."""
    sampler, drafter = TokenSampler(sampling, rule), SelfDrafter(runner.runner, NO_END)  # type: ignore[arg-type]
    stepper: Stepper = PassStepper(runner.runner, drafter, sampler, None)
    if afterwards:
        seed = None if sampling.seed is None else sampling.seed + 10_000
        free = TokenSampler(SamplingConfig(temperature=sampling.temperature, seed=seed))
        stepper = GrammarStepper(
            lambda: PassStepper(runner.runner, drafter, free, None), runner.runner, sampler, rule  # type: ignore[arg-type]
        )  # fmt: skip
    loop = SpeculativeLoop(runner.runner, stepper, FixedGovernor(length), sampler, NO_END, None)
    return (step.tokens for step in loop.run(PROMPT, count))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 9999), length=st.sampled_from([0, 1, 3, 7]), afterwards=st.booleans(),
    count=st.integers(1, 40), forces=st.sampled_from([0.0, 0.7]),
)  # fmt: skip
def test_greedy_text_is_that_of_plain_decoding(
    seed: int, length: int, afterwards: bool, count: int, forces: float
) -> None:
    table = Table(agreement=0.7, seed=seed)
    rule, runner = Rule(table, seed, forces), TableRunner(table)
    said: list[int] = []
    for tokens in answer(runner, rule, length, afterwards, count, SamplingConfig()):
        said += tokens
        assert runner.state.tokens == [*PROMPT, *said][:-1]
    assert said == rule.greedy(table, PROMPT, count, NO_END)


def test_a_token_that_is_not_allowed_is_chosen_anew_with_all_that_is_forced_there() -> None:
    """The target would write 0 and has to write 2, 3, 4, 2, ...: a step says ten of them."""
    table = Table(vocab=5, seed=1)
    table.target = lambda text: torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])  # type: ignore[method-assign]
    rule, runner = Rule(table, 1), TableRunner(table)
    rule.may = {(last, odd): frozenset({2 + (last - 1) % 3}) for last in range(5) for odd in (0, 1)}
    steps = list(answer(runner, rule, 0, True, 41, SamplingConfig()))
    said = [token for tokens in steps for token in tokens]
    assert said == rule.greedy(table, PROMPT, 41, NO_END)
    assert [len(tokens) for tokens in steps] == [1, 10, 10, 10, 10], "9 are forced at once, and the next one"
    assert runner.passes.counters.new_tokens == 41 and runner.passes.counters.drafted == 0


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("afterwards", [False, True])
@pytest.mark.parametrize("length", [0, 2])
def test_sampled_text_has_the_distribution_of_what_is_allowed(length: int, afterwards: bool) -> None:
    table = Table(agreement=0.6, seed=11)
    rule, count, draws = Rule(table, 4), 3, 3000
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        config = SamplingConfig(temperature=1.0, seed=seed)
        steps = answer(TableRunner(table), rule, length, afterwards, count, config)
        found[tuple(token for tokens in steps for token in tokens)] += 1
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        expected = {
            (*text, token): chance * float(p)
            for text, chance in expected.items()
            for token, p in enumerate(rule.scaled(table, [*PROMPT, *text]))
            if p > 0
        }
    assert set(found) <= set(expected) and len(expected) > 4
    distance = sum(abs(found[text] / draws - p) for text, p in expected.items()) / 2
    chance = sum(math.sqrt(2 * p * (1 - p) / (math.pi * draws)) for p in expected.values()) / 2  # its mean
    assert distance < 1.6 * chance


def test_a_state_that_cannot_go_back_so_far_is_written_again() -> None:
    """As that of recurrent layers, which keep some places alone."""
    table = Table(agreement=0.7, seed=2)
    rule, runner = Rule(table, 2), TableRunner(table)
    again: list[int] = []

    def keepable(length: int) -> int:
        again.append(length)
        return 2

    runner.state.keepable = keepable  # type: ignore[method-assign]
    said = [token for tokens in answer(runner, rule, 3, True, 25, SamplingConfig()) for token in tokens]
    assert said == rule.greedy(table, PROMPT, 25, NO_END) and again
    assert ("prefill", again[-1] - 2) in runner.passes_run


@pytest.mark.parametrize("length", [0, 3])
def test_a_step_that_breaks_off_leaves_the_state_as_it_was(length: int) -> None:
    """Wherever: in the pass that chooses anew, when tokens of the step were accepted already, too."""
    table = Table(agreement=0.7, seed=2)
    broken, place = 0, 1
    while True:
        runner = TableRunner(table)
        runner.break_at = place
        said: list[int] = []
        try:
            for tokens in answer(runner, Rule(table, 2), length, True, 24, SamplingConfig()):
                said += tokens
        except RuntimeError:
            broken += 1
        else:
            break
        assert runner.state.tokens == ([*PROMPT, *said][:-1] if said else [])
        place += 1
    assert broken > 15


def test_a_grammar_that_gives_up_leaves_the_state_as_it_was() -> None:
    table = Table(agreement=0.7, seed=2)
    rule, runner, asked = Rule(table, 2), TableRunner(table), []
    valid = rule.valid

    def gives_up(text: Sequence[int], tokens: Sequence[int]) -> int:
        asked.append(len(text))
        if len(asked) == 3:
            raise ConfigError("it takes more than it may")
        return valid(text, tokens)

    rule.valid = gives_up  # type: ignore[method-assign]
    said: list[int] = []
    with pytest.raises(ConfigError):
        for tokens in answer(runner, rule, 3, True, 30, SamplingConfig()):
            said += tokens
    assert runner.state.tokens == [*PROMPT, *said][:-1]
