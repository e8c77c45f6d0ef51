"""Tokens that a grammar leaves no choice about: what is proposed, and that answers stay what they are."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import Rule, Table, TableRunner

from localmoe.core.config import SamplingConfig
from localmoe.speculative.forced_tokens import ForcedOrFound
from localmoe.speculative.governor import FixedGovernor
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.prompt_lookup import MARGIN_A_TOKEN, SUREST, PromptLookupDrafter
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import PassStepper

NO_END: frozenset[int] = frozenset()


class Forcing(Rule):
    """Forces what it is told, whatever the text."""

    tokens: Sequence[int] = ()

    def forced(self, text: Sequence[int]) -> list[int]:
        return list(self.tokens)


def test_what_is_forced_is_proposed_and_then_what_followed_it_in_the_text() -> None:
    rule = Forcing(Table(), 0)
    drafter = ForcedOrFound(frozenset({9}), rule)
    text = [1, 2, 3, 4, 5, 7, 1]
    rule.tokens = [2, 3]
    found = drafter.look_up(text, 4)
    assert found.tokens == [2, 3, 4, 5] and found.distributions == []
    assert found.margins == [SUREST, SUREST, 3 * MARGIN_A_TOKEN, 4 * MARGIN_A_TOKEN]
    assert drafter.look_up(text, 1).tokens == [2]
    rule.tokens = [8, 8]
    assert drafter.look_up(text, 4).tokens == [8, 8], "nothing like it stood there"
    rule.tokens = [2, 9, 3]
    assert drafter.look_up(text, 8).tokens == [2, 9], "an end token is the last"
    rule.tokens = []
    assert drafter.look_up([*text, 2], 3).tokens == [3, 4, 5]


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6),
    forced=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=6, max_size=6),
)
def test_what_was_proposed_is_no_part_of_the_text(pieces: list[list[int]], forced: list[list[int]]) -> None:
    rule, text = Forcing(Table(), 0), list[int]()
    drafter = ForcedOrFound(NO_END, rule)
    for piece, rule.tokens in zip(pieces, forced, strict=False):
        text += piece
        found, behind = drafter.look_up(text, 6), [*text, *rule.tokens]
        rest = PromptLookupDrafter(NO_END).look_up(behind, 6 - len(rule.tokens))
        assert found.tokens == [*rule.tokens, *rest.tokens]
        assert found.margins == [SUREST] * len(rule.tokens) + rest.margins


@given(seed=st.integers(0, 200), length=st.integers(1, 6), temperature=st.sampled_from([0.0, 0.7]))
@settings(max_examples=40)
def test_answers_are_those_of_asking_before_each_token_in_no_more_steps(
    seed: int, length: int, temperature: float
) -> None:
    table = Table(seed=seed)
    rule = Rule(table, seed, forces=0.8)

    def answer(drafter: PromptLookupDrafter | None) -> tuple[list[int], int]:
        sampler = TokenSampler(SamplingConfig(temperature=temperature, seed=seed), grammar=rule)
        made = TableRunner(table)
        stepper = PassStepper(made.runner, drafter, sampler, None)
        loop = SpeculativeLoop(
            made.runner, stepper, FixedGovernor(length if drafter else 0), sampler, NO_END, None
        )
        return [
            token for step in loop.run([1, 2, 0], 40) for token in step.tokens
        ], made.passes.counters.steps

    plain, plain_steps = answer(None)
    tokens, steps = answer(ForcedOrFound(NO_END, rule))
    assert tokens == plain and rule.valid([1, 2, 0], tokens) == 40
    free = sum(len(rule.may[last, i % 2]) > 1 for i, last in enumerate([0, *tokens[:-1]], start=3))
    assert steps <= plain_steps
    assert length < 6 or steps <= free + 40 // 7 + 2, "a step takes all that is forced with it"
