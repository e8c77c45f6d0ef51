"""The loop over a toy model: greedy output is the target's own, whatever drafts, ends or breaks it."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import Table, TableRunner
from torch import Tensor

from localmoe.core.config import SamplingConfig
from localmoe.core.events import DraftFinished, PrefillStarted, StepFinished, StepStarted
from localmoe.core.gates import Gate
from localmoe.hardware.needs import PREFILL_CHUNK
from localmoe.model.runner import ModelRunner
from localmoe.speculative.drafters import Drafter, Proposal, SelfDrafter
from localmoe.speculative.governor import AutoGovernor, FixedGovernor, Governor
from localmoe.speculative.loop import SpeculativeLoop, StepResult
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import PassStepper

PROMPT = [1, 2, 0]


class Guess:
    """A drafter that proposes given tokens, whatever the model says."""

    tells_margins = False

    def __init__(self, guesses: Sequence[Sequence[int]]) -> None:
        self.guesses = list(guesses)

    def propose(
        self, history: Sequence[int], count: int, sampler: TokenSampler, stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:  # fmt: skip
        return Proposal(list(self.guesses.pop(0) if self.guesses else ())[:count], [])


def loop_of(
    made: TableRunner,
    governor: Governor | int,
    *,
    end: frozenset[int] = frozenset(),
    stop: threading.Event | None = None,
    sampler: TokenSampler | None = None,
    drafter: Drafter | None = None,
) -> SpeculativeLoop:
    fixed = FixedGovernor(governor) if isinstance(governor, int) else governor
    sampler = sampler or TokenSampler(SamplingConfig())
    if governor != 0 and drafter is None:
        drafter = SelfDrafter(made.runner, end)
    stepper = PassStepper(made.runner, drafter, sampler, stop)
    return SpeculativeLoop(made.runner, stepper, fixed, sampler, end, stop)


class Whim(FixedGovernor):
    """Stops drafts, and cuts off what was drafted, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.chance = random.Random(seed)

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return self.chance.randint(0, most), self.chance.choice([None, self])

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        return self.chance.random() < 0.7

    def worth_verifying(self, margins: Sequence[float]) -> int:
        assert all(margin >= 0 for margin in margins)
        return self.chance.randint(0, len(margins))


def tokens_of(steps: Sequence[StepResult]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@given(
    st.integers(0, 999), st.sampled_from([0, 1, 2, 5, "auto", "any"]), st.integers(1, 20), st.floats(0, 1),
    st.sets(st.integers(0, 3), max_size=1), st.lists(st.integers(0, 3), min_size=1, max_size=5),
)  # fmt: skip
@settings(max_examples=150)
def test_greedy_output_is_the_targets_own_for_every_draft_and_length(
    seed: int, length: int | str, limit: int, agreement: float, end: set[int], prompt: list[int]
) -> None:
    table = Table(agreement=agreement, seed=seed)
    made = TableRunner(table)
    governor = {"auto": AutoGovernor(16), "any": Whim(seed)}.get(str(length), length)
    steps = list(loop_of(made, governor, end=frozenset(end)).run(prompt, limit))  # type: ignore[arg-type]
    expected = table.greedy(prompt, limit, frozenset(end))
    assert tokens_of(steps) == expected
    assert made.state.tokens == [*prompt, *expected][:-1]  # all but the last, and nothing that was drafted
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish_reason == ("stop" if expected[-1] in end else "length")
    counters = made.passes.counters
    assert counters.new_tokens == len(expected)
    assert counters.steps == len(steps) - 1
    assert 0 <= counters.accepted <= counters.drafted
    passes = sum(rows for phase, rows in made.passes_run if phase == "draft")
    assert counters.drafted + counters.left_out == passes
    assert not (counters.left_out and isinstance(length, int))
    started, said = (
        [event.draft_length if isinstance(event, StepStarted) else event.drafted for event in made.events
         if isinstance(event, kind)] for kind in (StepStarted, StepFinished)
    )  # fmt: skip
    assert all(drafted <= most for most, drafted in zip(started, said, strict=True))
    assert sum(said) == counters.drafted


@pytest.mark.parametrize("penalty", [1.3, 3.0])
@pytest.mark.parametrize("length", [1, 4])
def test_a_repetition_penalty_does_not_let_the_draft_show(penalty: float, length: int) -> None:
    table = Table(agreement=0.5, vocab=9, seed=3)
    config = SamplingConfig(repetition_penalty=penalty)
    plain = list(loop_of(TableRunner(table), 0, sampler=TokenSampler(config)).run(PROMPT, 12))
    drafted = list(loop_of(TableRunner(table), length, sampler=TokenSampler(config)).run(PROMPT, 12))
    assert tokens_of(drafted) == tokens_of(plain)
    assert tokens_of(plain) != table.greedy(PROMPT, 12)


def test_a_perfect_draft_is_accepted_whole_and_each_step_adds_one_token_of_the_targets() -> None:
    table = Table(agreement=1.0, seed=6)
    made = TableRunner(table)
    steps = list(loop_of(made, 4).run(PROMPT, 11))
    assert [len(step.tokens) for step in steps] == [1, 5, 5]
    assert [step.from_draft for step in steps] == [0, 4, 4]
    assert made.passes_run == [("prefill", 3), *([*[("draft", 1)] * 4, ("verify", 5)] * 2)]


def test_the_draft_is_penalised_as_the_target_is_and_so_agrees_with_it() -> None:
    made = TableRunner(Table(agreement=1.0, vocab=9, seed=3))
    sampler = TokenSampler(SamplingConfig(repetition_penalty=2.0))
    list(loop_of(made, 4, sampler=sampler).run(PROMPT, 16))
    assert made.passes.counters.accepted == made.passes.counters.drafted == 12


def test_a_draft_that_is_always_wrong_costs_nothing_but_time() -> None:
    table = Table(seed=6)
    made = TableRunner(table)
    greedy = table.greedy(PROMPT, 5)
    wrong = [[(greedy[i] + 1) % 4] * 3 for i in range(1, 5)]
    steps = list(loop_of(made, 3, drafter=Guess(wrong)).run(PROMPT, 5))
    assert tokens_of(steps) == greedy
    assert [step.from_draft for step in steps] == [0] * 5
    assert (made.passes.counters.accepted, made.passes.counters.steps) == (0, 4)


def test_no_more_is_drafted_than_the_answer_has_room_for() -> None:
    made = TableRunner(Table(agreement=1.0, seed=6))
    list(loop_of(made, 8).run(PROMPT, 4))
    assert [rows for phase, rows in made.passes_run if phase == "verify"] == [3]  # 2 drafted and 1 of its own


def test_no_window_is_longer_than_the_passes_whose_rows_are_known_to_be_independent() -> None:
    made = TableRunner(Table(agreement=1.0, seed=6), max_rows=4)
    steps = list(loop_of(made, 16).run(PROMPT, 20))
    assert max(rows for phase, rows in made.passes_run if phase == "verify") == 4
    assert tokens_of(steps) == made.table.greedy(PROMPT, 20)


def test_nothing_after_an_end_token_is_emitted_even_if_it_was_accepted() -> None:
    table = Table(seed=8)
    made = TableRunner(table)
    greedy = table.greedy(PROMPT, 8)
    end = frozenset({greedy[3]})
    cut = table.greedy(PROMPT, 8, end)
    steps = list(loop_of(made, 5, end=end, drafter=Guess([greedy[1:6]])).run(PROMPT, 8))
    assert tokens_of(steps) == cut
    assert steps[-1].finish_reason == "stop"
    assert made.state.tokens == [*PROMPT, *cut][:-1]
    assert steps[-1].from_draft <= len(steps[-1].tokens)


def test_an_end_token_as_the_first_token_ends_the_answer_at_once() -> None:
    table = Table(seed=8)
    made = TableRunner(table)
    first = table.greedy(PROMPT, 1)
    steps = list(loop_of(made, 3, end=frozenset(first)).run(PROMPT, 8))
    assert steps == [StepResult(first, 0, "stop")]
    assert made.state.tokens == PROMPT


def test_the_draft_does_not_go_on_behind_an_end_token() -> None:
    table = Table(agreement=1.0, seed=6)
    greedy = table.greedy(PROMPT, 10)
    end = frozenset({greedy[-1]})
    position = next(i for i, token in enumerate(greedy) if token in end)
    assert position > 0
    made = TableRunner(table)
    list(loop_of(made, 9, end=end).run(PROMPT, 20))
    assert sum(1 for phase, _ in made.passes_run if phase == "draft") == position


def test_a_step_tells_its_story_in_order() -> None:
    made = TableRunner(Table(agreement=1.0, seed=6))
    list(loop_of(made, 2).run(PROMPT, 7))
    assert made.events == [
        PrefillStarted(3),
        StepStarted(0, 2), DraftFinished(2), StepFinished(2, 2),
        StepStarted(1, 2), DraftFinished(2), StepFinished(2, 2),
    ]  # fmt: skip


def test_plain_decoding_tells_steps_without_a_draft() -> None:
    made = TableRunner(Table(seed=6))
    list(loop_of(made, 0).run(PROMPT, 3))
    assert made.events == [
        PrefillStarted(3), StepStarted(0, 0), StepFinished(0, 0), StepStarted(1, 0), StepFinished(0, 0),
    ]  # fmt: skip


def test_only_what_the_state_does_not_hold_is_prefilled_in_chunks() -> None:
    made = TableRunner(Table(seed=6))
    prompt = [i % 4 for i in range(2 * PREFILL_CHUNK + 9)]
    made.state.tokens = prompt[:5]
    list(loop_of(made, 0).run(prompt, 1))
    assert made.passes_run == [("prefill", PREFILL_CHUNK), ("prefill", PREFILL_CHUNK), ("prefill", 4)]
    assert made.state.tokens == prompt


def test_a_prompt_is_run_whole_where_passes_may_be_of_another_length_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where slots come or go meanwhile."""
    made = TableRunner(Table(seed=6))
    lengths = iter((7, 3, 20, 4, 100))
    monkeypatch.setattr(ModelRunner, "prefill_rows", lambda self, left: min(left, next(lengths)))
    prompt = [i % 4 for i in range(40)]
    list(loop_of(made, 0).run(prompt, 1))
    assert made.passes_run == [("prefill", count) for count in (7, 3, 20, 4, 6)]
    assert made.state.tokens == prompt


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_closing_the_generator_leaves_exactly_the_emitted_tokens_but_the_last(
    length: int, after: int
) -> None:
    table = Table(agreement=0.7, seed=9)
    made = TableRunner(table)
    steps = loop_of(made, length).run(PROMPT, 30)
    emitted = tokens_of([next(steps) for _ in range(after)])
    steps.close()  # type: ignore[attr-defined]
    assert made.state.tokens == [*PROMPT, *emitted][:-1]
    rest = list(loop_of(made, length).run([*PROMPT, *emitted], 30 - len(emitted)))
    assert [*emitted, *tokens_of(rest)] == table.greedy(PROMPT, 30)


def test_a_stop_before_the_prompt_is_read_cancels_without_a_token() -> None:
    made, stop = TableRunner(Table(seed=9)), threading.Event()
    stop.set()
    assert list(loop_of(made, 3, stop=stop).run(PROMPT, 5)) == [StepResult([], 0, "cancelled")]
    assert (made.state.tokens, made.passes_run) == ([], [])


@pytest.mark.parametrize("length", [0, 3])
def test_a_stop_between_steps_cancels_before_the_next_one(length: int) -> None:
    table = Table(seed=9)
    made, stop = TableRunner(table), threading.Event()
    steps = loop_of(made, length, stop=stop).run(PROMPT, 20)
    emitted = tokens_of([next(steps), next(steps)])
    stop.set()
    assert list(steps) == [StepResult([], 0, "cancelled")]
    assert made.state.tokens == [*PROMPT, *emitted][:-1]


def test_a_stop_while_drafting_still_verifies_what_was_drafted() -> None:
    table = Table(agreement=1.0, seed=6)
    made, stop = TableRunner(table), threading.Event()
    loop = loop_of(made, 8, stop=stop)
    made.runner.begin_draft_token = lambda position: stop.set()  # type: ignore[method-assign]
    steps = list(loop.run(PROMPT, 20))
    assert [step.finish_reason for step in steps] == [None, None, "cancelled"]
    assert tokens_of(steps) == table.greedy(PROMPT, 3)


@pytest.mark.parametrize("broken_pass", range(1, 9))
def test_a_pass_that_breaks_leaves_a_state_from_which_the_answer_can_go_on(broken_pass: int) -> None:
    table = Table(agreement=0.8, seed=12)
    made = TableRunner(table)
    made.break_at = broken_pass
    emitted: list[int] = []
    with pytest.raises(RuntimeError, match="the pass broke"):
        for step in loop_of(made, 3).run(PROMPT, 40):
            emitted += step.tokens
    held = [*PROMPT, *emitted][:-1] if emitted else []
    assert made.state.tokens == held
    made.break_at = None
    rest = list(loop_of(made, 3).run([*PROMPT, *emitted], 10))
    assert [*emitted, *tokens_of(rest)] == table.greedy(PROMPT, len(emitted) + 10)


def test_a_verify_pass_that_is_interrupted_after_its_tokens_entered_the_state_is_undone() -> None:
    made = TableRunner(Table(agreement=1.0, seed=6))

    class Interrupted(TokenSampler):
        def greedy_choices(
            self, logits: Tensor, history: Sequence[int], following: Sequence[int]
        ) -> list[int]:
            if following:
                raise KeyboardInterrupt
            return super().greedy_choices(logits, history, following)

    steps = loop_of(made, 3, sampler=Interrupted(SamplingConfig())).run(PROMPT, 9)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert made.state.tokens == PROMPT


def test_with_sampling_every_distribution_is_made_for_the_tokens_before_it() -> None:
    table = Table(agreement=0.6, seed=7)
    made = TableRunner(table)
    seen: list[bool] = []

    class Checking(TokenSampler):
        def distribution(self, logits: Tensor, history: Sequence[int]) -> Tensor:
            of_target = torch.equal(logits, table.target(history).log())
            assert of_target or torch.equal(logits, table.draft(history).log())
            seen.append(of_target)
            return super().distribution(logits, history)

    sampler = Checking(SamplingConfig(temperature=1.0, repetition_penalty=1.5, seed=3))
    assert len(tokens_of(list(loop_of(made, 4, sampler=sampler).run(PROMPT, 60)))) == 60
    assert set(seen) == {True, False}
    assert 0 < made.passes.counters.accepted < made.passes.counters.drafted
