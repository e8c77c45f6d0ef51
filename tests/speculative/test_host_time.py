"""What the host takes for a step counts where the draft length is chosen: passes on a GPU are timed by its
own clock, and may be over long before the next step is begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from table_model import Table, TableRunner

from localmoe.core.config import SamplingConfig
from localmoe.speculative import loop as loop_module
from localmoe.speculative.drafters import SelfDrafter
from localmoe.speculative.governor import AutoGovernor, FixedGovernor, Governor
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.step_record import StepRecord
from localmoe.speculative.steppers import PassStepper, StepOutcome

DRAFT_S, VERIFY_S = 0.00022, 0.0002  # of a token, and of any window: by themselves drafts do not pay


class GpuStepper(PassStepper):
    """Its passes take what a GPU's clock says; meanwhile the host works, for as long as `host_s`."""

    hears_margins = False
    now = 0.0
    host_s = 0.0

    def finish(self) -> StepOutcome:
        done = super().finish()
        done = replace(done, draft_s=DRAFT_S * len(done.drafted), verify_s=VERIFY_S, margins=())
        self.now += max(self.host_s, done.draft_s + done.verify_s)
        return done


class Notes(FixedGovernor):
    """What is said of each step."""

    def __init__(self, draft_length: int) -> None:
        super().__init__(draft_length)
        self.host_s: list[float] = []

    def observe(self, step: StepRecord) -> None:
        assert step.verify_s == VERIFY_S
        self.host_s.append(step.host_s)


def run(
    monkeypatch: pytest.MonkeyPatch,
    governor: Governor,
    host_s: float,
    tokens: int,
    taken_s: Sequence[float] = (),
) -> list[int]:
    """Tokens of each step. taken_s: what whoever takes the tokens does with the first steps' meanwhile."""
    made, sampler = TableRunner(Table(agreement=1.0, seed=6)), TokenSampler(SamplingConfig())
    stepper = GpuStepper(made.runner, SelfDrafter(made.runner, frozenset()), sampler, None)
    stepper.host_s = host_s
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: stepper.now))
    loop = SpeculativeLoop(made.runner, stepper, governor, sampler, frozenset(), None)
    found, waits = [], list(taken_s)
    for step in loop.run([1, 2, 0], tokens):
        found.append(len(step.tokens))
        stepper.now += waits.pop(0) if waits else 0.0
    return found


def test_a_host_slower_than_the_passes_makes_long_drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = run(monkeypatch, AutoGovernor(24), 0.0, 600)
    slow = run(monkeypatch, AutoGovernor(24), 0.001, 600)
    assert sum(quick[-100:]) / 100 < 1.5
    assert sum(slow[-10:]) / 10 > 4


def test_only_what_passes_do_not_account_for_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(4)
    run(monkeypatch, notes, 0.001, 31)
    assert notes.host_s == [pytest.approx(0.0)] * 6  # the passes take longer
    notes = Notes(2)
    run(monkeypatch, notes, 0.001, 31)
    assert notes.host_s == [pytest.approx(0.001 - VERIFY_S - 2 * DRAFT_S)] * 10


def test_somebody_who_does_not_take_the_tokens_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(0)
    run(monkeypatch, notes, 0.0, 6, [0.0, 30.0])
    assert sorted(notes.host_s) == pytest.approx([0.0] * 4 + [loop_module._MOST_HOST_S])
