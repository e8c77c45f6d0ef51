"""Steps that run whole on the GPU: drafts, then the verify pass, then one wait of the host. What the
host has to do after a step, it does while the GPU works on the next one: on its drafts, or, where nothing is
drafted and no copy wanted, on a pass that was issued behind the last one. Keeps no cache (device_runner).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from localmoe.core.config import SamplingConfig
from localmoe.core.events import DraftFinished, StepFinished, StepStarted
from localmoe.core.timeline import Timeline
from localmoe.model.device_choice import check_chosen
from localmoe.model.device_clock import Clock, Landing
from localmoe.model.device_runner import DeviceRunner, PendingWindow
from localmoe.model.window_report import WindowReport

RUN_BEHIND_AFTER = 3  # steps without drafts and copies, from which on no others are expected


@dataclass(frozen=True, slots=True)
class Speculation:
    """A step: what was drafted, how much of it the target chose too, its own choice after that, and
    seconds, less those in which passes were captured: that happens once."""

    drafted: list[int]
    accepted: int
    token: int
    draft_s: float
    verify_s: float


@dataclass(slots=True)
class _Step:
    """A step under way: its first token (None: the step before is still to choose it), its draft
    passes' reports and, once it was issued, its verify pass's."""

    token: int | None
    start: int
    count: int
    clock: Clock
    drafts: list[Landing]
    window: PendingWindow | None = None
    still: bool = False  # its pass fills no slot
    timeline: Timeline | None = None
    captures_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of its drafts, of its verify pass


@dataclass(frozen=True, slots=True)
class _Finished:
    """A step whose books are still open."""

    report: WindowReport
    accepted: int


class DeviceSteps:
    """The steps of one answer."""

    def __init__(
        self,
        runner: DeviceRunner,
        sampling: SamplingConfig,
        seed: int,
        *,
        whole_window: bool = False,
    ) -> None:
        """sampling, seed: how tokens are chosen, the draft's and the target's. whole_window: see
        core.switches."""
        self._runner = runner
        self._sampling: tuple[SamplingConfig, int] | None = (sampling, seed)  # None: the device knows
        self._whole_window = whole_window
        self._issue = runner.issue
        self._passes = runner.passes
        self._step: _Step | None = None
        self._behind: _Step | None = None  # issued before anything is known of `_step`
        self._plain_steps = 0  # in a row, for which neither drafts nor copies were wanted
        self._finished: _Finished | None = None

    @torch.inference_mode()
    def begin(self, text: Sequence[int], count: int, *, last: bool) -> None:
        """Issue the drafts of at most `count` tokens after `text`; a step that runs already has none. While
        the GPU works on them, take over what the step before did. Where the host has nothing to decide before
        it, the verify pass is issued too. last: no further step will be wanted."""
        start, token = self._runner.sequence.length, text[-1]
        try:
            if self._sampling is not None:
                self._issue.choice.begin(*self._sampling, text)
                self._sampling = None
            step = self._step = self._took_behind(token, start) or self._draft(token, start, count)
            self._close_books()
            self._passes.lookahead.clear()
            self._passes.scheduler.notify(StepStarted(self._passes.counters.steps, step.count))
            plain = not count and not self._passes.memory.waiting
            self._plain_steps = self._plain_steps + 1 if plain else 0
            if step.window is None and (not step.count or not self._passes.memory.may_copy):
                step.still = plain and self._runner.may_refill
                self._issue_verify(step)
            if self._plain_steps >= RUN_BEHIND_AFTER and not last and step.still == self._runner.may_refill:
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
        except BaseException:
            self._rewind(step.start)
            raise
        self._finished = _Finished(done, accepted)
        self._runner.sequence.advance(step.start + 1 + accepted)
        seconds = step.clock.seconds()
        first = 1 if step.timeline is None else max(1, len(step.drafts))
        draft_s, verify_s = sum(seconds[:first]), sum(seconds[first:])
        in_drafts_s, in_verify_s = step.captures_s
        if step.timeline is not None:
            self._tell(step, step.timeline, seconds, ended, accepted + 1)
        if decided:  # the GPU may have waited for the host between the two: what was decided then counts
            verify_s = time.perf_counter() - ready
        return Speculation(
            done.tokens, accepted, done.choices[accepted], max(0.0, draft_s - in_drafts_s),
            max(0.0, verify_s - in_verify_s),
        )  # fmt: skip

    def close(self) -> None:
        """Wait for steps that were begun and are not wanted; take over what the last ones did."""
        step, self._step = self._step, None
        self._issue.choice.end()
        if step is None:
            self._close_books()
            return self._drop_behind()
        for draft in step.drafts:
            draft.wait()  # the window's staging is in use until then
        if step.window is not None:
            _, found = self._runner.land_window(step.window, lambda: self._issue_anew(step))
            self._runner.take_over(found, "verify", wanted=False)
        self._drop_behind()

    def _draft(self, token: int, start: int, count: int) -> _Step:
        self._passes.window.set(start, count + 1, [token])
        routed = count + (self._whole_window and count > 0)
        self._issue.force("draft", start, routed)
        return self._new_step(token, start, count, routed)

    def _new_step(self, token: int | None, start: int, count: int, drafts: int) -> _Step:
        clock, timeline, captured_s = Clock(self._issue.on_gpu), self._passes.timeline, self._issue.capture_s
        issued = self._issue_drafts(start + count + 1, drafts, clock, each=timeline is not None)
        step = _Step(token, start, count, clock, issued, timeline=timeline)
        step.captures_s[0] = self._issue.capture_s - captured_s
        return step

    def _issue_behind(self, step: _Step) -> None:
        """Issue the next step before this one has ended; what it is about stays on the device."""
        assert step.window is not None and not step.count
        self._issue.advance(step.window.output)
        self._behind = self._new_step(None, step.start + 1, 0, 0)
        self._behind.still = step.still
        self._issue_verify(self._behind, behind=True)

    def _took_behind(self, token: int, start: int) -> _Step | None:
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

    def _issue_anew(self, step: _Step) -> None:
        """Before a step's verify pass runs once more."""
        if self._behind is not None:
            self._drop_behind()
            assert step.token is not None
            self._passes.window.set(step.start, 1, [step.token])
            self._issue.force("verify", step.start, 1)

    def _issue_drafts(self, length: int, count: int, clock: Clock, *, each: bool) -> list[Landing]:
        """`count` passes over at most `length` tokens. each: mark every pass's end, else the last one's."""
        drafts = []
        for left in reversed(range(count)):
            drafts.append(Landing(self._issue.draft(length).report))
            if each and left:
                clock.tick()
        clock.tick()
        return drafts

    def _tell(self, step: _Step, timeline: Timeline, seconds: list[float], ended: float, kept: int) -> None:
        """Lay what the GPU's clock measured on the host's. seconds: of each draft, of waiting for the host's
        decision, of the verify pass."""
        began = step.clock.began
        began_s = began if isinstance(began, float) else ended - sum(seconds)
        at = began_s
        for token, took in enumerate(seconds[: len(step.drafts)], start=1):
            timeline.add("draft", f"token {token}", at, at + took)
            at += took
        at = began_s + sum(seconds[:-1])
        timeline.add("verify", f"verify {step.count + 1} tokens, keep {kept}", at, at + seconds[-1])
        if self._passes.memory.times is not None:
            self._passes.memory.times.place(timeline, began, began_s)

    def _hear_drafts(self, step: _Step) -> float:
        """Tell the policy token by token, while later ones are drafted; when the last one was heard of. Where
        it asks for nothing after that one, the verify pass is issued behind it."""
        ready, last = time.perf_counter(), len(step.drafts) - 1
        for token, draft in enumerate(step.drafts):
            if token == last and step.window is None and not self._passes.scheduler.asks_after_drafts:
                self._issue_verify(step)
            report = draft.wait()
            ready = time.perf_counter()
            self._runner.tell_draft(token, report)
            if step.window is None:
                self._passes.memory.pump()
        return ready

    def _issue_verify(self, step: _Step, *, behind: bool = False) -> None:
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
            self._passes.scheduler.notify(StepFinished(drafted, finished.accepted))

    def _rewind(self, length: int) -> None:
        self._step = self._behind = self._finished = None
        self._runner.rewind(length)

    def _accept(self, start: int, done: WindowReport) -> int:
        """Drafted tokens that are the target's own choices, or that a simulation accepts."""
        synthetic = self._passes.synthetic
        simulated = synthetic is not None and synthetic.settings.acceptance is not None
        for i, token in enumerate(done.tokens):
            kept = synthetic.accepts(start + 1 + i) if simulated and synthetic else token == done.choices[i]
            if not kept:
                return i
        return len(done.tokens)
