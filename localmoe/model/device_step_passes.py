"""Issues the passes that a step on the GPU is made of: its drafts, or tokens that the host proposes in their
place, and its verify pass. Decides none of them (device_steps).
"""

from __future__ import annotations

from collections.abc import Sequence

from localmoe.core.gates import Gate
from localmoe.model.device_clock import Clock, Landing
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.device_step import Step


class StepPasses:
    """Of the steps of one answer."""

    def __init__(self, runner: DeviceRunner, *, whole_window: bool) -> None:
        """whole_window: see core.switches."""
        self._runner, self._issue, self._passes = runner, runner.issue, runner.passes
        self._whole_window = whole_window

    def draft(self, token: int, start: int, count: int, gate: Gate | None) -> Step:
        """A step that drafts `count` tokens behind `token`, which stands at `start`."""
        routed = self.routed(count)
        self._passes.window.set(start, count + 1, [token])
        self._begin(start)
        self._issue.force("draft", start, routed)
        return self.new(token, start, count, routed, gate)

    def put(self, token: int, start: int, proposed: Sequence[int]) -> Step:
        """A step whose tokens behind `token` are these."""
        self._passes.window.set(start, len(proposed) + 1, [token, *proposed])
        self._begin(start)
        return self.new(token, start, len(proposed), 0, None)

    def _begin(self, start: int) -> None:
        if self._passes.mtp is not None:
            self._passes.mtp.begin_step(start)

    def routed(self, count: int) -> int:
        """Draft passes for so many tokens."""
        return count + (self._whole_window and count > 0)

    def new(self, token: int | None, start: int, count: int, drafts: int, gate: Gate | None) -> Step:
        """A step whose first token the window holds; `drafts` of its passes are issued, or the first one if
        there is a gate."""
        clock, timeline = Clock(self._issue.on_gpu), self._passes.timeline
        step = Step(token, start, count, clock, [], gate, timeline=timeline)
        self.go_on(step, drafts if gate is None else 1)
        if not drafts:
            step.mark_drafts()
        return step

    def go_on(self, step: Step, count: int) -> None:
        """`count` further drafts; the clock marks every one's end, or the last one's."""
        assert step.window is None, "a draft behind the verify pass would write over what that leaves"
        captured_s = self._issue.capture_s
        for left in reversed(range(count)):
            step.drafts.append(Landing(self._issue.draft(step.start + step.count + 1).report))
            if step.in_parts or not left:
                step.mark_drafts()
        step.captures_s[0] += self._issue.capture_s - captured_s

    def prepare(self, step: Step) -> None:
        """While its last draft runs: what the verify pass needs on the device, if all tokens drafted so far
        turn out to be put to it."""
        drafted = min(len(step.drafts), step.count)  # see `routed`
        self._issue.force("verify", step.start, drafted + 1)
        self._passes.window.resize(drafted + 1)
        self._runner.prepare_window()
        step.prepared = drafted

    def verify(self, step: Step, *, behind: bool) -> None:
        """The target's pass over all tokens of the step. behind: see DeviceRunner.issue_window."""
        drafted = len(step.drafts)
        assert not drafted or drafted >= step.count, f"{drafted} of {step.count} tokens drafted"
        if step.prepared is None or step.prepared < step.count:
            self._issue.force("verify", step.start, step.count + 1)
        if step.timeline is not None:
            step.clock.tick()
        captured_s = self._issue.capture_s
        step.behind = behind
        step.window = self._runner.issue_window(step.count + 1, step.start, behind=behind)
        step.clock.tick()
        step.captures_s[1] = self._issue.capture_s - captured_s
