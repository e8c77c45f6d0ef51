"""One step at a time: what it returns, what it leaves in the sequence, and what an exception leaves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import Table, TableRunner

from localmoe.core.config import SamplingConfig
from localmoe.core.events import DraftFinished, StepFinished, StepStarted
from localmoe.core.gates import Gate
from localmoe.speculative.drafters import Proposal, SelfDrafter
from localmoe.speculative.governor import FixedGovernor
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import DeviceStepper, PassStepper, StepOutcome, Stepper

HISTORY = [1, 2, 0]
NO_END: frozenset[int] = frozenset()


class Guess:
    """Proposes given tokens, or breaks."""

    tells_margins = False

    def __init__(self, tokens: Sequence[int], error: BaseException | None = None) -> None:
        self.tokens, self.error = tokens, error

    def propose(
        self, history: Sequence[int], count: int, sampler: TokenSampler, stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:  # fmt: skip
        if self.error is not None:
            raise self.error
        return Proposal(list(self.tokens)[:count], [])


def made_with(table: Table) -> TableRunner:
    """A runner whose state holds all of HISTORY but the last token."""
    made = TableRunner(table)
    made.state.tokens = HISTORY[:-1]
    return made


def step(stepper: Stepper, length: int) -> StepOutcome:
    """Both halves of a step."""
    stepper.begin(HISTORY, length, room=99)
    done = stepper.finish()
    stepper.close()
    return done


def stepper_of(made: TableRunner, drafter: Guess | SelfDrafter | None) -> PassStepper:
    return PassStepper(made.runner, drafter, TokenSampler(SamplingConfig()), None)


@given(st.integers(0, 99), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 5))
@settings(max_examples=60)
def test_what_the_target_agrees_with_is_accepted_and_its_own_token_follows(
    seed: int, guessed: list[int], length: int
) -> None:
    table = Table(seed=seed)
    made = made_with(table)
    greedy = table.greedy(HISTORY, 6)
    done = step(stepper_of(made, Guess(guessed)), length)
    drafted = guessed[:length]
    accepted = next((i for i, token in enumerate(drafted) if token != greedy[i]), len(drafted))
    assert (done.drafted, done.accepted, done.token) == (drafted, accepted, greedy[accepted])
    assert made.state.tokens == [*HISTORY, *drafted[:accepted]]
    assert made.passes_run == [("verify", 1 + len(drafted))]
    heard = [DraftFinished(len(drafted))] if length else []
    assert made.events == [StepStarted(0, length), *heard, StepFinished(len(drafted), accepted)]
    assert done.draft_s >= 0 and done.verify_s > 0


def test_without_a_drafter_nothing_is_drafted_whatever_the_length() -> None:
    table = Table(seed=4)
    made = made_with(table)
    done = step(stepper_of(made, None), 7)
    assert (done.drafted, done.accepted, [done.token]) == ([], 0, table.greedy(HISTORY, 1))
    assert made.events == [StepStarted(0, 7), StepFinished(0, 0)] and done.draft_s == 0.0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken"), GeneratorExit()])
def test_a_drafter_that_breaks_leaves_the_sequence_as_it_was(error: BaseException) -> None:
    made = made_with(Table(seed=4))
    with pytest.raises(type(error)):
        step(stepper_of(made, Guess([], error)), 2)
    assert made.state.tokens == HISTORY[:-1]


@pytest.mark.parametrize("broken_pass", [1, 2, 3])
def test_a_pass_that_breaks_leaves_the_sequence_as_it_was(broken_pass: int) -> None:
    made = made_with(Table(agreement=1.0, seed=4))
    made.break_at = broken_pass  # two of the draft, and the one that verifies
    with pytest.raises(RuntimeError, match="the pass broke"):
        step(stepper_of(made, SelfDrafter(made.runner, NO_END)), 2)
    assert made.state.tokens == HISTORY[:-1]


def test_a_verdict_that_breaks_leaves_the_sequence_as_it_was() -> None:
    made = made_with(Table(seed=4))

    class Broken(TokenSampler):
        def greedy_choices(self, *_: object) -> list[int]:
            raise KeyboardInterrupt

    stepper = PassStepper(made.runner, Guess([1, 2]), Broken(SamplingConfig()), None)
    with pytest.raises(KeyboardInterrupt):
        step(stepper, 2)
    assert made.passes_run == [("verify", 3)]
    assert made.state.tokens == HISTORY[:-1]


@dataclass
class Done:
    """What a device runner says of a step."""

    drafted: list[int]
    accepted: int
    token: int
    draft_s: float
    verify_s: float
    margins: Sequence[float] = ()


class FakeSteps:
    """Drafts and verifies as a device would: all tokens, end tokens or not."""

    may_stop = True

    def __init__(self, made: TableRunner) -> None:
        self.made = made
        self.asked: list[tuple[int, int]] = []
        self.closed = 0
        self.was_last = False

    def begin(self, text: Sequence[int], count: int, *, room: int, gate: Gate | None) -> None:
        assert not self.closed and not self.was_last
        self.was_last = room == 1
        self.asked.append((text[-1], count))

    def close(self) -> None:
        self.closed += 1

    def finish(self) -> Done:
        token, count = self.asked[-1]
        state, table = self.made.state, self.made.table
        state.tokens.append(token)
        held, drafted = list(state.tokens), []
        for _ in range(count):
            drafted.append(int(table.draft([*held, *drafted]).argmax()))
        choices = [int(table.target([*held, *drafted[:i]]).argmax()) for i in range(count + 1)]
        accepted = next((i for i in range(count) if drafted[i] != choices[i]), count)
        state.tokens += drafted[:accepted]
        return Done(drafted, accepted, choices[accepted], 0.25, 0.5)


def device_stepper(made: TableRunner, end: frozenset[int]) -> tuple[DeviceStepper, FakeSteps]:
    fake = FakeSteps(made)
    return DeviceStepper(fake, end), fake  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafted", "accepted", "end", "expected", "margins"),
    [
        ([5, 6, 7], 2, NO_END, ([5, 6, 7], 2), 4),
        ([5, 6, 7], 3, frozenset({6}), ([5, 6], 2), 2),  # accepted beyond the end: only up to it
        ([5, 6, 7], 1, frozenset({6}), ([5, 6], 1), 2),
        ([5, 6, 7], 0, frozenset({7}), ([5, 6, 7], 0), 4),
        ([6, 6, 6], 3, frozenset({6}), ([6], 1), 1),
        ([], 0, frozenset({6}), ([], 0), 4),
    ],
)
def test_what_is_drafted_after_an_end_token_does_not_count(
    drafted: list[int], accepted: int, end: frozenset[int], expected: tuple[list[int], int], margins: int
) -> None:
    heard = [0.5, 1.0, 1.5, 2.0]  # one that was not verified too

    class Fixed:
        may_stop = False

        def begin(self, text: Sequence[int], count: int, *, room: int, gate: Gate | None) -> None:
            assert room == 99 and gate is None and (text, count) == (HISTORY, 3)

        def finish(self) -> Done:
            return Done(drafted, accepted, 9, 0.25, 0.5, heard)

        def close(self) -> None:
            pass

    done = step(DeviceStepper(Fixed(), end), 3)  # type: ignore[arg-type]
    assert done == StepOutcome(*expected, 9, 0.25, 0.5, margins=heard[:margins])


@given(
    st.integers(0, 999), st.integers(0, 6), st.integers(1, 15), st.floats(0, 1),
    st.sets(st.integers(0, 3), max_size=1),
)  # fmt: skip
@settings(max_examples=100)
def test_the_loop_says_the_same_with_steps_on_the_device(
    seed: int, length: int, limit: int, agreement: float, end: set[int]
) -> None:
    table = Table(agreement=agreement, seed=seed)
    made = TableRunner(table)
    stepper, fake = device_stepper(made, frozenset(end))
    sampler = TokenSampler(SamplingConfig())
    loop = SpeculativeLoop(made.runner, stepper, FixedGovernor(length), sampler, frozenset(end), None)
    steps = list(loop.run(HISTORY, limit))
    expected = table.greedy(HISTORY, limit, frozenset(end))
    assert [token for step in steps for token in step.tokens] == expected
    assert made.state.tokens == [*HISTORY, *expected][:-1]
    assert steps[-1].finish_reason == ("stop" if expected[-1] in end else "length")
    counters = made.passes.counters
    assert fake.closed == (1 if counters.steps else fake.closed)
    assert counters.new_tokens == len(expected) and counters.steps == len(fake.asked)
    assert counters.accepted <= counters.drafted <= sum(count for _, count in fake.asked)
    assert counters.draft_s == 0.25 * counters.steps and counters.verify_s == 0.5 * counters.steps
