"""The prompt-lookup drafter: against a plain search of the text, and through real steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import VOCAB, Table, TableRunner

from localmoe.core.config import SamplingConfig
from localmoe.speculative.acceptance import accept_sampled
from localmoe.speculative.governor import FixedGovernor
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.prompt_lookup import PromptLookupDrafter
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import PassStepper

GREEDY = TokenSampler(SamplingConfig())
NO_END: frozenset[int] = frozenset()


def by_search(text: list[int], count: int, ends: frozenset[int]) -> list[int]:
    """The longest run of 3 or 2 last tokens that stands in the text before, at its last place; what
    follows."""
    for length in (3, 2):
        last = text[-length:]
        places = [i for i in range(len(text) - length) if text[i : i + length] == last]
        if len(text) > length and places:
            follows = text[places[-1] + length :]
            found: list[int] = []
            while len(found) < count and not (found and found[-1] in ends):
                found.append((follows * count)[len(found)])
            return found
    return []


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(0, 6),
    st.sets(st.integers(0, 3), max_size=1).map(frozenset),
)
@settings(deadline=None)
def test_proposals_are_what_followed_the_last_tokens_before_while_the_text_grows(
    pieces: list[list[int]], count: int, ends: frozenset[int]
) -> None:
    drafter, text = PromptLookupDrafter(ends, VOCAB), list[int]()
    for piece in pieces:
        text += piece
        proposal = drafter.propose(text, count, GREEDY, None)
        assert proposal.tokens == by_search(text, count, ends) and proposal.distributions == []


def test_a_worked_example() -> None:
    drafter = PromptLookupDrafter(frozenset({9}), 10)
    propose = drafter.propose
    assert propose([1, 2, 3, 4, 1, 2], 3, GREEDY, None).tokens == [3, 4, 1]
    assert propose([1, 2, 3, 4, 1, 2, 3], 9, GREEDY, None).tokens == [4, 1, 2, 3, 4, 1, 2, 3, 4]
    assert propose([1, 2, 3, 4, 1, 2, 3, 9, 2, 3], 5, GREEDY, None).tokens == [9], "an end token is the last"
    assert propose([1, 2, 3, 4, 1, 2, 3, 9, 2, 3, 8], 5, GREEDY, None).tokens == []


@given(st.integers(0, 50), st.integers(0, 6))
@settings(deadline=None, max_examples=30)
def test_greedy_answers_are_those_of_plain_decoding(seed: int, length: int) -> None:
    """Tables over two tokens run into cycles, which the drafter finds."""
    table = Table(seed=seed)
    made = TableRunner(table)
    drafter = PromptLookupDrafter(NO_END, VOCAB)
    stepper = PassStepper(made.runner, drafter, GREEDY, None)
    loop = SpeculativeLoop(made.runner, stepper, FixedGovernor(length), GREEDY, NO_END, None)
    tokens = [token for result in loop.run([1, 2, 0], 30) for token in result.tokens]
    assert tokens == table.greedy([1, 2, 0], 30)
    counters = made.passes.counters
    assert counters.steps <= 29 and (length == 0 or counters.accepted > 0)


@given(st.floats(0, 0.999), st.integers(0, 3))
def test_a_certain_proposal_is_accepted_with_the_targets_probability(uniform: float, token: int) -> None:
    """So the emitted token has the target's distribution: x with p(x), else one of the others as p has
    them."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drafter = PromptLookupDrafter(NO_END, 4)
    sampler = TokenSampler(SamplingConfig(temperature=1.0, seed=1))
    proposal = drafter.propose([token, 0, 0, token, 0, 0], 1, sampler, None)
    (q,) = proposal.distributions
    x = proposal.tokens[0]
    assert q.sum() == q[x] == 1.0
    drawn: list[torch.Tensor] = []

    def draw(rest: torch.Tensor) -> int:
        drawn.append(rest)
        return 0

    verdict = accept_sampled(lambda _: p, [q], [x], lambda: uniform, draw)
    assert verdict.accepted == (uniform < float(p[x]))
    others = torch.tensor([0.0 if i == x else float(p[i]) for i in range(4)])
    assert drawn[0].tolist() == pytest.approx((p if verdict.accepted else others).tolist())
