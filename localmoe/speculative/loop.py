"""The speculative loop on one page: prefill, then draft, verify, accept, roll back, until something ends
the answer.

Every emitted token is the target's choice: greedily its argmax, with sampling a draw from its distribution.
The draft only proposes. Whatever closes the generator, the sequence state ends up holding exactly the
emitted tokens but the last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from localmoe.core.events import PrefillStarted
from localmoe.core.stream import FinishReason
from localmoe.model.runner import PassRunner
from localmoe.speculative.governor import Governor
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.step_record import StepRecord
from localmoe.speculative.steppers import StepOutcome, Stepper


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens that a step emitted, how many of them were drafted, and why the answer ends here (None: it
    goes on)."""

    tokens: list[int]
    from_draft: int
    finish_reason: FinishReason | None


_CANCELLED = StepResult([], 0, "cancelled")
_MOST_HOST_S = 0.02  # what takes longer is somebody who does not take the tokens


class SpeculativeLoop:
    """Everything that one answer needs."""

    def __init__(
        self,
        runner: PassRunner,
        stepper: Stepper,
        governor: Governor,
        sampler: TokenSampler,
        end_tokens: frozenset[int],
        stop: threading.Event | None,
    ) -> None:
        self._runner = runner
        self._stepper = stepper
        self._governor = governor
        self._sampler = sampler
        self._end_tokens = end_tokens
        self._stop = stop
        self._counters = runner.passes.counters
        self._gated = False  # the step under way
        self._ended_s = self._captured_s = 0.0  # when the last step ended, and what captures had taken then
        self._longest_draft = (
            runner.passes.rows.max_rows - 1
        )  # a longer window might change a token's last bits

    def run(self, prompt: Sequence[int], max_new_tokens: int) -> Iterator[StepResult]:
        """Generate at most `max_new_tokens` after `prompt`, of which the sequence state holds a prefix
        already."""
        history = list(prompt)
        try:
            self._begin_span("prompt")
            logits = self._prefill(history)
            if logits is None:
                yield _CANCELLED
                return
            first = self._emit(history, [self._sampler.next_token(logits[0], history)], 0, max_new_tokens)
            yield first  # before anything else, so that it is never late
            if first.finish_reason is None:
                yield from self._steps(history, len(prompt) + max_new_tokens)
        finally:
            if self._runner.passes.timeline is not None:
                self._runner.passes.timeline.end_step()

    def _steps(self, history: list[int], limit: int) -> Iterator[StepResult]:
        """Steps until `history` has `limit` tokens or something else ends the answer."""
        result: StepResult | None = None
        self._ended_s, self._captured_s = time.perf_counter(), self._runner.capture_s
        try:
            while (result is None or result.finish_reason is None) and not self._stopped():
                room = limit - len(history)
                try:
                    self._begin(history, room)
                except BaseException:
                    if result is not None:
                        yield result  # its tokens are in the sequence already
                    raise
                if result is not None:
                    yield result  # the GPU drafts meanwhile
                result = _CANCELLED if self._stopped() else self._finish(history, room)
        finally:
            self._stepper.close()
            if self._runner.passes.timeline is not None:
                self._runner.passes.timeline.end_step()
        if result is not None:
            yield result
        if result is None or result.finish_reason is None:
            yield _CANCELLED

    def _stopped(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def _begin(self, history: list[int], room: int) -> None:
        """Start to draft after `history`."""
        self._begin_span(f"step {self._counters.steps + 1}")
        assert self._runner.sequence.length == len(history) - 1, "the state holds all tokens but the last"
        most, gate = min(room - 1, self._longest_draft), None
        if self._stepper.hears_margins:
            length, gate = self._governor.choose_gated(most)
        else:
            length = min(self._governor.choose(), most)
        self._gated = gate is not None
        self._stepper.begin(history, length, room=room, gate=gate)

    def _finish(self, history: list[int], room: int) -> StepResult:
        """Verify, keep what the target agrees with plus its next token."""
        counters, done = self._counters, self._stepper.finish()
        drafted = len(done.drafted)
        self._governor.observe(
            StepRecord(
                drafted, done.accepted, done.draft_s, done.verify_s, done.margins, self._host_s(done),
                found=done.found,
            )
        )  # fmt: skip
        counters.steps += 1
        if done.verified:
            counters.drafted += drafted
            if self._gated and not done.found:  # of what was looked up nothing was drafted
                counters.left_out += len(done.margins) - drafted
            counters.accepted += done.accepted
            counters.looked_up += drafted if done.found else 0
        counters.draft_s += done.draft_s
        counters.verify_s += done.verify_s
        return self._emit(history, done.tokens, done.accepted, room)

    def _host_s(self, done: StepOutcome) -> float:
        """Seconds since the step before that this one's passes do not account for: the host hands on tokens,
        counts, and starts passes, once a step, however many tokens it has. So they pay the more where passes
        take less than that."""
        ended_s, captured_s = time.perf_counter(), self._runner.capture_s
        passed_s = ended_s - self._ended_s - (captured_s - self._captured_s)
        self._ended_s, self._captured_s = ended_s, captured_s
        return min(max(0.0, passed_s - done.draft_s - done.verify_s), _MOST_HOST_S)

    def _prefill(self, prompt: list[int]) -> Tensor | None:
        """Run what the sequence state does not hold yet; logits (1, V) of the last token, or None when
        stopped."""
        runner = self._runner
        logits, start = None, runner.sequence.length
        while start < len(prompt):
            if self._stopped():
                return None
            chunk = prompt[start : start + runner.prefill_rows(len(prompt) - start)]
            start += len(chunk)
            runner.passes.scheduler.notify(PrefillStarted(len(chunk)))
            started = time.perf_counter()
            logits = runner.run(chunk, "prefill", last_only=True)
            self._counters.read_tokens += len(chunk)
            if runner.passes.timeline is not None:
                runner.passes.timeline.add("verify", f"{len(chunk)} tokens of the prompt", started)
        assert logits is not None, "at least the last prompt token has to run"
        return logits

    def _begin_span(self, name: str) -> None:
        if self._runner.passes.timeline is not None:
            self._runner.passes.timeline.begin_step(name)

    def _emit(self, history: list[int], tokens: list[int], accepted: int, room: int) -> StepResult:
        """Append tokens up to the first end token or the limit, and say why the answer ends, if it does."""
        kept: list[int] = []
        reason: FinishReason | None = None
        for token in tokens[:room]:
            kept.append(token)
            if token in self._end_tokens:
                reason = "stop"
                break
        if reason is None and len(kept) == room:
            reason = "length"
        history.extend(kept)
        if len(kept) < len(tokens):  # the state must not run ahead of the text
            self._runner.sequence.truncate(len(history) - 1)
        self._counters.new_tokens += len(kept)
        return StepResult(kept, min(accepted, len(kept)), reason)
