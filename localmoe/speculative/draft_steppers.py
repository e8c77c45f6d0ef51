"""Steps of the draft alone, which nothing verifies: approximate answers, for whoever asks for them. Decides
no draft length."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localmoe.core.gates import Gate
from localmoe.model.runner import PassRunner
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import StepOutcome

if TYPE_CHECKING:  # needs Triton
    from localmoe.model.device_draft_steps import DeviceDraftSteps


class DraftStepper:
    """One token a step, chosen by the host."""

    hears_margins = False

    def __init__(self, runner: PassRunner, sampler: TokenSampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._history: Sequence[int] = ()

    def begin(self, history: Sequence[int], length: int, *, room: int, gate: Gate | None = None) -> None:
        """Nothing runs yet. length: of no use here."""
        self._history = history

    def finish(self) -> StepOutcome:
        """The draft's next token."""
        started = time.perf_counter()
        self._runner.begin_draft_token(0)
        logits = self._runner.run([self._history[-1]], "draft", last_only=True)
        token = self._sampler.next_token(logits[0], self._history)
        ended = time.perf_counter()
        if self._runner.passes.timeline is not None:
            self._runner.passes.timeline.add("draft", "token 1", started, ended)
        return StepOutcome([], 0, token, ended - started, 0.0)

    def close(self) -> None:
        """Nothing runs beside the host."""


class DeviceDraftStepper:
    """Several tokens a step, which the GPU writes without the host."""

    hears_margins = False

    def __init__(self, steps: DeviceDraftSteps) -> None:
        self._steps = steps

    def begin(self, history: Sequence[int], length: int, *, room: int, gate: Gate | None = None) -> None:
        """Issue the passes for `length` + 1 tokens."""
        self._steps.begin(history, length)

    def finish(self) -> StepOutcome:
        """All that was written; the caller cuts it off after an end token."""
        done = self._steps.finish()
        return StepOutcome(done.tokens[:-1], len(done.tokens) - 1, done.tokens[-1], done.draft_s, 0.0, False)

    def close(self) -> None:
        """Wait for what still runs."""
        self._steps.close()
