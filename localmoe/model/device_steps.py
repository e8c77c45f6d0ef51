"""Steps that run whole on the GPU: drafts, then the verify pass, then one wait of the host. What the host
has to do after a step, it does while the GPU works on the next one, which was issued behind the verify pass:
its first draft, or, where nothing is drafted and no copy wanted, its own verify pass. What those are about,
the GPU knows first. Where a gate may end the drafts, they are issued one by one, the next one while the last
one runs if the gate expects to want it. Tokens that the host proposes take the place of drafts. Keeps no
cache (device_runner).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from localmoe.core.config import SamplingConfig
from localmoe.core.events import DraftFinished, StepFinished, StepStarted
from localmoe.core.gates import Gate
from localmoe.kernels.choices import check_chosen
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.device_step import FinishedStep, Speculation, Step
from localmoe.model.device_step_passes import StepPasses
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
        *,
        whole_window: bool = False,
        goes_on: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        """sampling, seed: how tokens are chosen, the draft's and the target's. whole_window: see
        core.switches. goes_on: whether a step after a text is one that nobody goes back behind, so that
        another may be verified behind it; None: always."""
        self._runner, self._goes_on = runner, goes_on
        self._sampling: tuple[SamplingConfig, int] | None = (sampling, seed)  # None: the device knows
        self._whole_window = whole_window
        self._parts = StepPasses(runner, whole_window=whole_window)
        self._issue = runner.issue
        self._passes = runner.passes
        self._step: Step | None = None
        self._next: Step | None = None  # issued behind `_step`: its pass, or one draft in case that is wanted
        self._room = 1  # tokens that the answer may still get, those of the step under way among them
        self._plain_steps = 0  # in a row, for which neither drafts nor copies were wanted
        self._finished: FinishedStep | None = None

    @property
    def may_stop(self) -> bool:
        """Whether a gate can end the drafts: the host decides something before the verify pass anyway."""
        return self._passes.memory.may_copy and not self._whole_window

    @torch.inference_mode()
    def begin(
        self,
        text: Sequence[int],
        count: int,
        *,
        room: int,
        gate: Gate | None = None,
        proposed: Sequence[int] | None = None,
    ) -> bool:
        """Issue the drafts of at most `count` tokens after `text`; a step that runs already has none. While
        the GPU works on them, take over what the step before did. Where the host has nothing to decide before
        it, the verify pass is issued too.

        Args:
            room: tokens that the answer may still get.
            gate: if `may_stop`.
            proposed: `count` tokens to verify, by whoever says what follows; nothing is drafted then.

        Returns:
            False where the step ran already, without what is proposed.
        """
        start, token = self._runner.sequence.length, text[-1]
        try:
            if self._sampling is not None:
                self._issue.choice.begin(*self._sampling, text)
                self._sampling = None
            gate = gate if self.may_stop and count and proposed is None else None
            self._room = room
            ran = self._took_next(start, count if proposed is None else 0, gate)
            if ran is None and proposed is not None:
                step = self._parts.put(token, start, proposed)
            else:
                step = ran or self._parts.draft(token, start, count, gate)
            self._step = step
            self._close_books()
            self._passes.lookahead.clear()
            self._passes.scheduler.notify(StepStarted(self._passes.counters.steps, step.count))
            plain = not count and not self._passes.memory.waiting
            self._plain_steps = self._plain_steps + 1 if plain else 0
            decides = step.gate is not None or (step.drafts and self._passes.memory.may_copy)
            if step.window is None and not decides:
                self._issue_verify(step)
            behind = self._plain_steps >= RUN_BEHIND_AFTER and room > 1
            if behind and (self._goes_on is None or self._goes_on(text)):
                self._issue_behind(step)
        except BaseException:
            self._rewind(start)
            raise
        return ran is None

    @torch.inference_mode()
    def finish(self) -> Speculation:
        """Verify what was drafted, and roll back to what the target agrees with."""
        step, self._step = self._step, None
        assert step is not None, "begin comes first"
        try:
            decides = step.window is None
            ready = self._hear_drafts(step)
            if decides:
                self._passes.scheduler.notify(DraftFinished(step.count, looked_up=not step.drafts))
            decided = step.gate is not None or step.window is None
            if step.window is None:
                self._issue_verify(step)
            assert step.window is not None
            _, done = self._runner.land_window(step.window, lambda failed: self._issue_anew(step, failed))
            ended = time.perf_counter()
            simulated = self._simulated
            accepted = simulated.accepted(step.start + 1, step.count) if simulated else done.agreed
            check_chosen(done.choices[: accepted + 1])
            next_capture_s = self._settle_next(done.choices[accepted], step.start + 1 + accepted)
        except BaseException:
            self._rewind(step.start)
            raise
        self._runner.sequence.advance(step.start + 1 + accepted)
        seconds = step.clock.seconds()
        draft_s, verify_s = sum(seconds[: step.draft_marks]), sum(seconds[step.draft_marks :])
        in_drafts_s, in_verify_s = step.captures_s
        draft_token_s = draft_s / len(step.drafts) if step.drafts and not in_drafts_s else None
        self._finished = FinishedStep(done, accepted, draft_token_s)
        if self._passes.lane is not None and step.behind and not in_verify_s:
            self._passes.lane.note_pass(verify_s, done.waited_s, len(done.log))
        step.tell(seconds, ended, accepted + 1, self._passes.memory.times)
        if decided:  # the GPU may have waited for the host between the two: what was decided then counts
            verify_s = ended - ready - next_capture_s
        return Speculation(
            done.tokens, accepted, done.choices[accepted], max(0.0, draft_s - in_drafts_s),
            max(0.0, verify_s - in_verify_s), step.margins,
        )  # fmt: skip

    def close(self) -> None:
        """Wait for steps that were begun and are not wanted; take over what the last ones did."""
        step, self._step = self._step, None
        if step is None:
            self._close_books()
            self._drop_next()
            return
        for draft in step.drafts:
            draft.wait()  # the window's staging is in use until then
        if step.window is not None:
            _, found = self._runner.land_window(step.window, lambda failed: self._issue_anew(step, failed))
            self._runner.take_over(found, "verify", wanted=False)
        self._drop_next()

    def _issue_early(self, step: Step) -> None:
        """The next step's first draft, behind a verify pass: where it begins and with what, is found there.
        Only where it has room for a draft and the target's own token, whatever is kept of this step."""
        synthetic, simulated = self._passes.synthetic, self._simulated
        routes_by_position = synthetic is not None and simulated is None
        if step.window is None or self._room <= step.count + 2 or routes_by_position:
            return
        accepted, start = None, step.start + 1 + step.count  # at most
        if simulated is not None:
            accepted = simulated.accepted(step.start + 1, step.count)
            start = step.start + 1 + accepted
        self._issue.go_on(step.window.output, 2, accepted)
        self._issue.force("draft", start, 1)
        self._next = self._parts.new(None, start, 1, 1, None)

    def _issue_behind(self, step: Step) -> None:
        """The next step's verify pass, behind one of a step that drafted nothing."""
        assert step.window is not None and not step.count
        self._issue.advance(step.window.output)
        self._next = self._parts.new(None, step.start + 1, 0, 0, None)
        self._issue_verify(self._next, behind=True)

    def _settle_next(self, token: int, start: int) -> float:
        """What runs behind the step that has ended turns out to be about this; seconds that capturing its
        draft took beside that step."""
        step = self._next
        if step is None:
            return 0.0
        step.token, step.start = token, start
        if step.drafts and step.timeline is not None:
            began = step.clock.began
            step.timeline.next_begins(began if isinstance(began, float) else None)
        return step.captures_s[0]

    def _took_next(self, start: int, count: int, gate: Gate | None) -> Step | None:
        """The step that runs already, if what runs of it is wanted."""
        step = self._next
        if step is None or (step.drafts and not count):
            self._drop_next()
            return None
        assert step.start == start, f"a step at {step.start} runs, not at {start}"
        self._next = None
        if step.drafts:
            step.count, step.gate = count, gate
            self._passes.window.resize(count + 1)
            self._issue.force("draft", start, self._parts.routed(count))
            if gate is None:
                self._parts.go_on(step, self._parts.routed(count) - 1)
        return step

    def _drop_next(self) -> None:
        """Wait for what was issued behind the last step, whose books are closed: the window's staging is in
        use until then."""
        step, self._next = self._next, None
        if step is None:
            return
        if step.window is not None:
            self._runner.drop_window(step.window)
        else:
            step.drafts[0].wait()
            self._passes.counters.left_out += 1
            if step.timeline is not None:
                ended, took = time.perf_counter(), sum(step.clock.seconds())
                step.timeline.add("draft", "token 1, not wanted", ended - took, ended)

    def _issue_anew(self, step: Step, failed: WindowReport) -> None:
        """Before a step's verify pass runs once more."""
        if self._next is not None:
            self._drop_next()
            assert step.token is not None
            self._passes.window.set(step.start, step.count + 1, [step.token, *failed.tokens])
            self._issue.force("verify", step.start, step.count + 1)

    def _hear_drafts(self, step: Step) -> float:
        """Tell the policy token by token, while later ones are drafted, as long as the gate goes on; when the
        last one was heard of. The verify pass is prepared while that one runs: what the policy asks for later
        is uploaded once more. Where it asks for nothing after the last draft, the pass is issued before it
        hears of that one: behind the draft, or where there is a gate when that has heard of it."""
        ready, heard, gate = time.perf_counter(), step.margins, step.gate
        while len(heard) < len(step.drafts):
            running, at_once = len(step.drafts) - len(heard), not self._passes.scheduler.asks_after_drafts
            if gate is not None and len(step.drafts) < step.count and gate.goes_on(heard, running):
                self._parts.go_on(step, 1)
            elif running == 1 and step.window is None:
                if gate is None and at_once:
                    self._issue_verify(step)
                else:
                    self._parts.prepare(step)
            report = step.drafts[len(heard)].wait()
            ready = time.perf_counter()
            said, at = self._issue.read_draft(report), step.start + 1 + len(heard)
            heard.append(said.margin if self._simulated is None else self._simulated.margins(at, 1)[0])
            if gate is not None and len(heard) == len(step.drafts):
                if len(heard) < step.count and gate.goes_on(heard):
                    self._parts.go_on(step, 1)
                elif at_once:
                    self._cut(step, gate)
                    self._issue_verify(step)
            self._runner.tell_draft(len(heard) - 1, said, last=len(heard) == len(step.drafts))
            if step.window is None:
                self._passes.memory.pump()
        if gate is not None and step.window is None:
            self._cut(step, gate)
        return ready

    def _cut(self, step: Step, gate: Gate) -> None:
        """Only what is worth it is verified."""
        expected = step.count if step.prepared is None else step.prepared
        step.count = gate.worth_verifying(step.margins)
        if step.count != expected:
            self._passes.window.resize(step.count + 1)

    def _issue_verify(self, step: Step, *, behind: bool = False) -> None:
        self._parts.verify(step, behind=behind)
        if step.drafts:
            self._issue_early(step)

    def _close_books(self) -> None:
        """Count what the last step did."""
        finished, self._finished = self._finished, None
        if finished is not None:
            self._runner.take_over(finished.report, "verify")
            drafted = len(finished.report.tokens)
            self._passes.scheduler.notify(StepFinished(drafted, finished.accepted, finished.draft_token_s))

    def _rewind(self, length: int) -> None:
        self._step = self._next = self._finished = None
        self._runner.rewind(length)

    @property
    def _simulated(self) -> SyntheticModel | None:
        """What says which drafted tokens are accepted, if the target does not."""
        synthetic = self._passes.synthetic
        return synthetic if synthetic is not None and synthetic.simulates_acceptance else None
