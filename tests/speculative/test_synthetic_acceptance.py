"""With simulated acceptance the drafted tokens that it accepts are kept, and the target's own one follows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import Table, TableRunner

from localmoe.core.config import SamplingConfig
from localmoe.core.gates import Gate
from localmoe.core.synthetic import SyntheticSettings
from localmoe.model.synthetic import SyntheticModel
from localmoe.speculative.drafters import SelfDrafter
from localmoe.speculative.governor import FixedGovernor, Governor
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.step_record import StepRecord
from localmoe.speculative.steppers import PassStepper

NO_END: frozenset[int] = frozenset()


def run(
    table: Table,
    synthetic: SyntheticModel,
    prompt: list[int],
    length: int,
    limit: int,
    temperature: float,
    governor: Governor | None = None,
) -> tuple[TableRunner, list[list[int]]]:
    made = TableRunner(table)
    made.passes.synthetic = synthetic
    sampler = TokenSampler(SamplingConfig(temperature=temperature, seed=5))
    stepper = PassStepper(made.runner, SelfDrafter(made.runner, NO_END), sampler, None)
    governor = governor or FixedGovernor(length)
    loop = SpeculativeLoop(made.runner, stepper, governor, sampler, NO_END, None)
    return made, [step.tokens for step in loop.run(prompt, limit)]


@given(
    seed=st.integers(0, 999), acceptance=st.floats(0, 1), length=st.integers(1, 6), limit=st.integers(1, 25)
)
@settings(max_examples=80)
def test_greedy_steps_keep_the_drafts_tokens_while_accepted_then_the_targets(
    seed: int, acceptance: float, length: int, limit: int
) -> None:
    table, prompt = Table(agreement=0.2, seed=seed), [1, 2, 0]
    synthetic = SyntheticModel(SyntheticSettings(acceptance=acceptance, seed=seed), 1, 4, 2)
    made, steps = run(table, synthetic, prompt, length, limit, 0.0)
    held = [*prompt, *steps[0]]
    assert steps[0] == [int(table.target(prompt).argmax())]
    for step in steps[1:]:
        drafting = min(length, limit - (len(held) - len(prompt)) - 1)
        expected: list[int] = []
        while len(expected) < drafting and synthetic.accepts(len(held) + len(expected)):
            expected.append(int(table.draft([*held, *expected]).argmax()))
        expected.append(int(table.target([*held, *expected]).argmax()))
        assert step == expected
        held += step
    assert len(held) == len(prompt) + limit
    assert made.state.tokens == held[:-1]


def test_governor_and_gate_hear_the_margins_that_are_simulated() -> None:
    synthetic = SyntheticModel(SyntheticSettings(acceptance=0.8, seed=4), 1, 4, 2)
    told: list[tuple[int, Sequence[float]]] = []

    class Listening(FixedGovernor):
        def choose_gated(self, most: int) -> tuple[int, Gate | None]:
            return min(5, most), self if len(told) % 2 else None

        def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
            return margins[-1] > 0.5

        def worth_verifying(self, margins: Sequence[float]) -> int:
            return len(margins)

        def observe(self, step: StepRecord) -> None:
            told.append((step.accepted, step.margins))

    _, steps = run(Table(agreement=0.2, seed=4), synthetic, [1, 2, 0], 5, 60, 0.0, Listening(5))
    at = 4  # the prompt, and what its pass wrote
    for (accepted, margins), step in zip(told, steps[1:], strict=True):
        assert len(step) == accepted + 1 and margins == synthetic.margins(at, len(margins))
        assert min([*margins[:-1], 1.0]) > 0.5 or len(margins) == 5
        at += accepted + 1
    assert {len(margins) for _, margins in told} >= {1, 5}


def test_the_simulation_wins_over_what_the_target_thinks() -> None:
    table, prompt = Table(agreement=1.0, seed=3), [0]
    nothing = SyntheticModel(SyntheticSettings(acceptance=0.0), 1, 4, 2)
    made, steps = run(table, nothing, prompt, 4, 20, 0.0)
    assert [len(step) for step in steps] == [1] * 20 and made.passes.counters.accepted == 0
    assert [token for step in steps for token in step] == table.greedy(prompt, 20)
    unsimulated = SyntheticModel(SyntheticSettings(), 1, 4, 2)
    made, steps = run(table, unsimulated, prompt, 4, 20, 0.0)
    assert len(steps) < 8, "the draft is the target, so without a simulation all is accepted"


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_sampled_tokens_come_from_the_target_or_from_the_accepted_draft(acceptance: float) -> None:
    table, prompt = Table(agreement=0.0, seed=11), [2, 1]
    synthetic = SyntheticModel(SyntheticSettings(acceptance=acceptance), 1, 4, 2)
    _, steps = run(table, synthetic, prompt, 1, 4000, 1.0)
    expected, count, held = [0.0] * table.vocab, [0] * table.vocab, [*prompt, *steps[0]]
    for step in steps[1:-1]:  # the first token of each step, in its context
        source = table.draft if acceptance else table.target
        expected = [sum(pair) for pair in zip(expected, source(held).tolist(), strict=True)]
        count[step[0]] += 1
        held += step
        assert len(step) == 1 + acceptance
    for wanted, seen in zip(expected, count, strict=True):
        assert abs(seen - wanted) < 4.5 * wanted**0.5
