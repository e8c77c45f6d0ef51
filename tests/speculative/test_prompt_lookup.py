"""The prompt-lookup drafter: against a plain search of the text, and through real steps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import Table, TableRunner

from localmoe.core.config import SamplingConfig
from localmoe.core.stats import GenerationCounters
from localmoe.speculative.governor import FixedGovernor
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.prompt_lookup import MARGIN_A_TOKEN, RUNS, PromptLookupDrafter
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import PassStepper

GREEDY = TokenSampler(SamplingConfig())
NO_END: frozenset[int] = frozenset()


def by_search(text: list[int], count: int, ends: frozenset[int]) -> list[int]:
    """The longest run of last tokens that stands in the text before, at its last place; what follows."""
    for length in RUNS:
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
def test_proposals_are_what_followed_the_last_tokens_before_while_the_text_grows(
    pieces: list[list[int]], count: int, ends: frozenset[int]
) -> None:
    drafter, text = PromptLookupDrafter(ends), list[int]()
    for piece in pieces:
        text += piece
        proposal = drafter.propose(text, count, GREEDY, None)
        assert proposal.tokens == by_search(text, count, ends) and proposal.distributions == []


def test_a_worked_example() -> None:
    drafter = PromptLookupDrafter(frozenset({9}))
    propose = drafter.propose
    assert propose([1, 2, 3, 4, 1, 2], 3, GREEDY, None).tokens == [3, 4, 1]
    assert propose([1, 2, 3, 4, 1, 2, 3], 9, GREEDY, None).tokens == [4, 1, 2, 3, 4, 1, 2, 3, 4]
    assert propose([1, 2, 3, 4, 1, 2, 3, 9, 2, 3], 5, GREEDY, None).tokens == [9], "an end token is the last"
    assert propose([1, 2, 3, 4, 1, 2, 3, 9, 2, 3, 8], 5, GREEDY, None).tokens == []


@given(st.integers(0, 50), st.integers(0, 6))
@settings(max_examples=30)
def test_greedy_answers_are_those_of_plain_decoding(seed: int, length: int) -> None:
    """Tables over two tokens run into cycles, which the drafter finds."""
    table = Table(seed=seed)
    made = TableRunner(table)
    drafter = PromptLookupDrafter(NO_END)
    stepper = PassStepper(made.runner, drafter, GREEDY, None)
    loop = SpeculativeLoop(made.runner, stepper, FixedGovernor(length), GREEDY, NO_END, None)
    tokens = [token for result in loop.run([1, 2, 0], 30) for token in result.tokens]
    assert tokens == table.greedy([1, 2, 0], 30)
    counters = made.passes.counters
    assert counters.steps <= 29 and (length == 0 or counters.accepted > 0)


@given(st.integers(0, 50), st.integers(1, 6))
@settings(max_examples=30)
def test_with_a_seed_sampled_answers_too_are_those_of_plain_decoding(seed: int, length: int) -> None:
    """Each emitted token takes one number of the random stream, whatever was proposed."""
    sampling = SamplingConfig(temperature=0.4, seed=seed)

    def answer(drafted: int) -> tuple[list[int], GenerationCounters]:
        made, sampler = TableRunner(Table(seed=seed)), TokenSampler(sampling)
        stepper = PassStepper(made.runner, PromptLookupDrafter(NO_END), sampler, None)
        loop = SpeculativeLoop(made.runner, stepper, FixedGovernor(drafted), sampler, NO_END, None)
        return [token for result in loop.run([1, 2, 0], 40) for token in result.tokens], made.passes.counters

    tokens, counters = answer(length)
    assert tokens == answer(0)[0] and counters.drafted > 0


def test_margins_say_how_many_tokens_agree() -> None:
    def agreeing(text: list[int], count: int = 3) -> list[float]:
        return [
            m / MARGIN_A_TOKEN for m in PromptLookupDrafter(NO_END).propose(text, count, GREEDY, None).margins
        ]

    assert agreeing([1, 2, 3, 4, 1, 2]) == [2, 3, 4]
    assert agreeing([1, 2, 3, 4, 1, 2, 3]) == [3, 4, 5]
    assert agreeing([5, 1, 2, 3, 4, 9, 1, 2, 3]) == [3, 4, 5], "9 is not 5"
    assert agreeing([1, 2, 3]) == []
    long = list(range(100))
    assert agreeing([*long, *long[:99]], 1) == [64], "no more are counted"


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_the_place_is_the_last_of_those_where_a_long_run_agrees(text: list[int]) -> None:
    proposal = PromptLookupDrafter(NO_END).propose(text, 1, GREEDY, None)
    ends = [end for end in range(1, len(text)) if agreement(text, end) >= RUNS[-1]]
    assert bool(proposal.tokens) == bool(ends)
    if ends:
        longest = max(agreement(text, end) for end in ends)
        found = round(proposal.margins[0] / MARGIN_A_TOKEN)
        assert found >= next(run for run in RUNS if run <= longest)
        assert any(agreement(text, end) == found and text[end] == proposal.tokens[0] for end in ends)


def agreement(text: list[int], end: int) -> int:
    """How many tokens before `end` are those that end the text."""
    return next((n for n in range(end) if text[end - 1 - n] != text[-1 - n]), end)
