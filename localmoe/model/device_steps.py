"""Steps that run whole on the GPU: drafts, then the verify pass, then one wait of the host. What the
host has to do after a step, it does while the GPU works on the next one: on its drafts, or, where nothing is
drafted and no copy wanted, on a pass that was issued behind the last one. Where a gate may end the drafts,
they are issued one by one, the next one while the last one runs if the gate expects to want it. After a step
that drafted, the next one's first draft is issued before anybody asks for it. Keeps no cache (device_runner).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from localmoe.core.config import SamplingConfig
from localmoe.core.events import DraftFinished, StepFinished, StepStarted
from localmoe.core.gates import Gate
from localmoe.model.device_choice import check_chosen
from localmoe.model.device_clock import Clock, Landing
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.device_step import FinishedStep, Speculation, Step
from localmoe.model.synthetic import SyntheticModel
from localmoe.model.window_report import WindowReport

RUN_BEHIND_AFTER = 3  # steps without drafts and copies, from which on no others are expected


class DeviceSteps:
    """The steps of one answer."""

    def __init__(
        self,
        runner: DeviceRunner,
        sampling: SamplingConfig,
        seed: int,
        end_tokens: frozenset[int] = frozenset(),
        *,
        whole_window: bool = False,
    ) -> None:
        """sampling, seed: how tokens are chosen, the draft's and the target's. end_tokens: behind which no
        step is wanted. whole_window: see core.switches."""
        self._runner = runner
        self._sampling: tuple[SamplingConfig, int] | None = (sampling, seed)  # None: the device knows
        self._end_tokens = end_tokens
        self._whole_window = whole_window
        self._issue = runner.issue
        self._passes = runner.passes
        self._step: Step | None = None
        self._behind: Step | None = None  # issued before anything is known of `_step`
        self._early: Step | None = None  # the next one, of which one token is drafted in case it is wanted
        self._room = 1  # tokens that the answer may still get, those of the step under way among them
        self._plain_steps = 0  # in a row, for which neither drafts nor copies were wanted
        self._finished: FinishedStep | None = None

    @property
    def may_stop(self) -> bool:
        """Whether a gate can end the drafts: the host decides something before the verify pass anyway."""
        return self._passes.memory.may_copy and not self._whole_window

    @torch.inference_mode()
    def begin(self, text: Sequence[int], count: int, *, room: int, gate: Gate | None = None) -> None:
        """Issue the drafts of at most `count` tokens after `text`; a step that runs already has none. While
        the GPU works on them, take over what the step before did. Where the host has nothing to decide before
        it, the verify pass is issued too. room: tokens that the answer may still get. gate: if `may_stop`."""
        start, token = self._runner.sequence.length, text[-1]
        try:
            if self._sampling is not None:
                self._issue.choice.begin(*self._sampling, text)
                self._sampling = None
            gate, self._room = gate if self.may_stop and count else None, room
            step = self._took_behind(token, start) or self._took_early(start, count, gate)
            step = self._step = step or self._draft(token, start, count, self._routed(count), gate)
            self._close_books()
            self._passes.lookahead.clear()
            self._passes.scheduler.notify(StepStarted(self._passes.counters.steps, step.count))
            plain = not count and not self._passes.memory.waiting
            self._plain_steps = self._plain_steps + 1 if plain else 0
            decides = step.gate is not None or (step.count and self._passes.memory.may_copy)
            if step.window is None and not decides:
                step.still = plain and self._runner.may_refill
                self._issue_verify(step)
            if self._plain_steps >= RUN_BEHIND_AFTER and room > 1 and step.still == self._runner.may_refill:
                self._issue_behind(step)
        except BaseException:
            self._rewind(start)
            raise

    @torch.inference_mode()
    def finish(self) -> Speculation:
        """Verify what was drafted, and roll back to what the target agrees with."""
        step, self._step = self._step, None
        assert step is not None, "begin comes first"
        try:
            decides = step.window is None
            ready = self._hear_drafts(step)
            if decides:
                self._passes.scheduler.notify(DraftFinished(step.count))
            decided = step.window is None
            if decided:
                self._issue_verify(step)
            assert step.window is not None
            _, done = self._runner.land_window(step.window, lambda: self._issue_anew(step))
            ended = time.perf_counter()
            accepted = self._accept(step.start, done)
            check_chosen(done.choices[: accepted + 1])
            if step.drafts and self._goes_on(done.choices[: accepted + 1]):
                self._draft_early(done.choices[accepted], step.start + 1 + accepted)
        except BaseException:
            self._rewind(step.start)
            raise
        self._runner.sequence.advance(step.start + 1 + accepted)
        seconds = step.clock.seconds()
        draft_s, verify_s = sum(seconds[: step.draft_marks]), sum(seconds[step.draft_marks :])
        in_drafts_s, in_verify_s = step.captures_s
        draft_token_s = draft_s / len(step.drafts) if step.drafts and not in_drafts_s else None
        self._finished = FinishedStep(done, accepted, draft_token_s)
        step.tell(seconds, ended, accepted + 1, self._passes.memory.times)
        if decided:  # the GPU may have waited for the host between the two: what was decided then counts
            verify_s = ended - ready
        return Speculation(
            done.tokens, accepted, done.choices[accepted], max(0.0, draft_s - in_drafts_s),
            max(0.0, verify_s - in_verify_s), step.margins,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for steps that were begun and are not wanted; take over what the last ones did."""
        step, self._step = self._step, None
        self._issue.choice.end()
        self._drop_early()
        if step is None:
            self._close_books()
            return self._drop_behind()
        for draft in step.drafts:
            draft.wait()  # the window's staging is in use until then
        if step.window is not None:
            _, found = self._runner.land_window(step.window, lambda: self._issue_anew(step))
            self._runner.take_over(found, "verify", wanted=False)
        self._drop_behind()

    def _draft(self, token: int, start: int, count: int, routed: int, gate: Gate | None = None) -> Step:
        self._passes.window.set(start, count + 1, [token])
        self._issue.force("draft", start, routed)
        return self._new_step(token, start, count, routed, gate)

    def _routed(self, count: int) -> int:
        """Draft passes for so many tokens."""
        return count + (self._whole_window and count > 0)

    def _goes_on(self, emitted: Sequence[int]) -> bool:
        """Whether another step has room for a draft, and the target's own token, behind these."""
        return self._room > len(emitted) + 1 and self._end_tokens.isdisjoint(emitted)

    def _draft_early(self, token: int, start: int) -> None:
        if self._passes.timeline is not None:
            self._passes.timeline.next_begins()
        self._early = self._draft(token, start, 1, 1)

    def _took_early(self, start: int, count: int, gate: Gate | None) -> Step | None:
        """The step whose first draft runs already, if that is wanted."""
        if not count:
            self._drop_early()
        step, self._early = self._early, None
        if step is None:
            return None
        assert step.start == start, f"a draft at {step.start} runs, not at {start}"
        step.count, step.gate = count, gate
        self._passes.window.resize(count + 1)
        self._issue.force("draft", start, self._routed(count))
        if gate is None:
            self._issue_drafts(step, self._routed(count) - 1)
        return step

    def _drop_early(self) -> None:
        """Wait for a draft that nobody wants: the window's staging is in use until then."""
        step, self._early = self._early, None
        if step is not None:
            step.drafts[0].wait()
            self._passes.counters.left_out += 1
            if step.timeline is not None:
                ended, took = time.perf_counter(), sum(step.clock.seconds())
                step.timeline.add("draft", "token 1, not wanted", ended - took, ended)

    def _new_step(self, token: int | None, start: int, count: int, drafts: int, gate: Gate | None) -> Step:
        clock, timeline = Clock(self._issue.on_gpu), self._passes.timeline
        step = Step(token, start, count, clock, [], gate, timeline=timeline)
        self._issue_drafts(step, drafts if gate is None else 1)
        if not drafts:
            step.mark_drafts()
        return step

    def _issue_behind(self, step: Step) -> None:
        """Issue the next step before this one has ended; what it is about stays on the device."""
        assert step.window is not None and not step.count
        self._issue.advance(step.window.output)
        self._behind = self._new_step(None, step.start + 1, 0, 0, None)
        self._behind.still = step.still
        self._issue_verify(self._behind, behind=True)

    def _took_behind(self, token: int, start: int) -> Step | None:
        """The step that runs already, now that its token is known."""
        step, self._behind = self._behind, None
        if step is not None:
            assert step.start == start, f"a step at {step.start} runs, not at {start}"
            step.token = token
        return step

    def _drop_behind(self) -> None:
        """Wait for the step that was issued behind the last one, whose books are closed."""
        step, self._behind = self._behind, None
        if step is not None and step.window is not None:
            self._runner.drop_window(step.window)

    def _issue_anew(self, step: Step) -> None:
        """Before a step's verify pass runs once more."""
        if self._behind is not None:
            self._drop_behind()
            assert step.token is not None
            self._passes.window.set(step.start, 1, [step.token])
            self._issue.force("verify", step.start, 1)

    def _issue_drafts(self, step: Step, count: int) -> None:
        """`count` further passes; the clock marks every one's end, or the last one's."""
        assert step.window is None, "a draft behind the verify pass would write over what that leaves"
        captured_s = self._issue.capture_s
        for left in reversed(range(count)):
            step.drafts.append(Landing(self._issue.draft(step.start + step.count + 1).report))
            if step.in_parts or not left:
                step.mark_drafts()
        step.captures_s[0] += self._issue.capture_s - captured_s

    def _hear_drafts(self, step: Step) -> float:
        """Tell the policy token by token, while later ones are drafted, as long as the gate goes on; when the
        last one was heard of. Where the policy asks for nothing after that one and there is no gate, the
        verify pass is issued behind it."""
        ready, heard, gate = time.perf_counter(), step.margins, step.gate
        while len(heard) < len(step.drafts):
            running = len(step.drafts) - len(heard)
            if gate is not None and len(step.drafts) < step.count and gate.goes_on(heard, running):
                self._issue_drafts(step, 1)
            asks_later = gate is not None or self._passes.scheduler.asks_after_drafts
            if running == 1 and step.window is None and not asks_later:
                self._issue_verify(step)
            report = step.drafts[len(heard)].wait()
            ready = time.perf_counter()
            said, at = self._issue.read_draft(report), step.start + 1 + len(heard)
            heard.append(said.margin if self._simulated is None else self._simulated.margins(at, 1)[0])
            if gate is not None and len(heard) == len(step.drafts) < step.count and gate.goes_on(heard):
                self._issue_drafts(step, 1)
            self._runner.tell_draft(len(heard) - 1, said, last=len(heard) == len(step.drafts))
            if step.window is None:
                self._passes.memory.pump()
        count = step.count if gate is None else gate.worth_verifying(heard)
        if count < step.count:
            step.count = count
            self._passes.window.resize(count + 1)
        return ready

    def _issue_verify(self, step: Step, *, behind: bool = False) -> None:
        assert len(step.drafts) >= step.count, f"{len(step.drafts)} of {step.count} tokens drafted"
        self._issue.force("verify", step.start, step.count + 1)
        if step.timeline is not None:
            step.clock.tick()
        captured_s = self._issue.capture_s
        step.window = self._runner.issue_window(step.count + 1, step.start, behind=behind, still=step.still)
        step.clock.tick()
        step.captures_s[1] = self._issue.capture_s - captured_s

    def _close_books(self) -> None:
        """Count what the last step did."""
        finished, self._finished = self._finished, None
        if finished is not None:
            self._runner.take_over(finished.report, "verify")
            drafted = len(finished.report.tokens)
            self._passes.scheduler.notify(StepFinished(drafted, finished.accepted, finished.draft_token_s))

    def _rewind(self, length: int) -> None:
        self._step = self._behind = self._early = self._finished = None
        self._runner.rewind(length)

    @property
    def _simulated(self) -> SyntheticModel | None:
        """What says which drafted tokens are accepted, if the target does not."""
        synthetic = self._passes.synthetic
        return synthetic if synthetic is not None and synthetic.simulates_acceptance else None

    def _accept(self, start: int, done: WindowReport) -> int:
        """Drafted tokens that are the target's own choices, or that a simulation accepts."""
        simulated = self._simulated
        for i, token in enumerate(done.tokens):
            kept = token == done.choices[i] if simulated is None else simulated.accepts(start + 1 + i)
            if not kept:
                return i
        return len(done.tokens)
