"""Passes of one model on the GPU, and what the host does between them: tell the policy, issue the copies
that it wants, upload the residency table, take over what a pass reports. Chooses no tokens; whole
steps are device_steps'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.config import SamplingConfig
from localmoe.core.events import PassRouted, TokenRouted
from localmoe.core.expert_counts import tokens_of
from localmoe.core.types import Phase
from localmoe.experts.lane_balance import LanePass
from localmoe.kernels.gpu.compiled_stamp import CompiledStamp
from localmoe.kernels.rows import RowPadding
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_clock import Landing
from localmoe.model.device_experts import DevicePassState
from localmoe.model.device_passes import DevicePasses
from localmoe.model.device_prompt_passes import PromptPasses
from localmoe.model.image_rows import ImageRows
from localmoe.model.pass_counts import count_window
from localmoe.model.side_stream import join_forked
from localmoe.model.step_graphs import PassOutput
from localmoe.model.window_report import DraftReport, WindowReport


@dataclass(frozen=True, slots=True)
class PendingWindow:
    """A window's pass that was issued: `count` tokens from `start` on."""

    count: int
    start: int
    output: PassOutput
    report: Landing


class DeviceRunner:
    """Runs passes of one model over one cache (model.runner.PassRunner)."""

    def __init__(
        self,
        issue: DevicePasses,
        cache: DeviceKVCache,
        passes: DevicePassState,
        stamp: CompiledStamp | None = None,
    ) -> None:
        """stamp: says of such passes that they are compiled; None: nobody notes that."""
        self.sequence = cache
        self.passes = passes
        self.issue = issue
        self.images: ImageRows | None = None  # of a model that reads pictures
        self._stamp = stamp
        self._prompt = PromptPasses(self)

    def prefill_rows(self, left: int) -> int:
        """Tokens of a prompt in its next pass, of `left` that are to come."""
        rows = self._prompt.rows(left)
        return rows if self.images is None else self.images.cut(self.sequence.length, rows)

    @property
    def capture_s(self) -> float:
        """Seconds that capturing passes took so far."""
        return self.issue.capture_s

    @torch.inference_mode()
    def capture_ahead(self, sampling: SamplingConfig | None) -> bool:
        """While no answer is written: capture one pass that the next ones will likely ask for. False where
        all are there, or where none can be captured so. sampling: theirs; None: as the last one's."""
        passes, synthetic = self.passes, self.passes.synthetic
        # routing that a simulation forces has no place before its first answer; products of PyTorch's library
        # want memory in the thread that issues them
        forced = synthetic is not None and synthetic.settings.routing is not None
        if forced or not self.issue.on_gpu or not self.issue.all_in_kernels:
            return False
        if sampling is not None:
            self.issue.choice.expect(sampling)
        self._look_ahead()
        if passes.lane is not None:
            passes.lane.settle(passes.memory)
        return self.issue.capture_ahead(self.sequence.length)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compile and allocate what the first passes need. Going through all passes only to compile costs
        seconds even where Triton finds every kernel on disk."""
        stamp = self._stamp
        if stamp is not None and stamp.is_there():
            self.issue.compiled = True
        self.issue.prepare()
        self.sequence.rings.make_room()
        if stamp is not None:
            stamp.leave()

    @property
    def row_padding(self) -> RowPadding | None:
        """How wide a window may be for a token's bits not to depend on it; None where they may."""
        return self.passes.rows if self.issue.all_in_kernels else None

    def forget_graphs(self) -> None:
        """Before slots and table are replaced."""
        self.issue.forget_graphs()
        self._prompt.forget()

    def release(self) -> None:
        """Give back what passes keep; none can be issued any more."""
        self.issue.release()

    def begin_draft_token(self, position: int) -> None:
        """Draft passes come in order; there is nothing to note."""

    # -- one pass, for whoever wants logits

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], phase: Phase, *, last_only: bool) -> Tensor:
        """Append tokens to the sequence and return their logits.

        Args:
            tokens: n token ids that follow what the cache holds.
            phase: "draft" uses the low-bit experts (n is 1), anything else the target's.
            last_only: return the last token's logits alone.

        Returns:
            float32 (n, V), or (1, V) with last_only.
        """
        start = self.sequence.length
        if phase == "prefill" and self.images is not None and self.images.has_some(start, len(tokens)):
            window = self.passes.window
            with self.images.of_pass(tokens, start, window.at.device) as numbers:
                window.until = self.images.until
                try:
                    logits = self._run(numbers, phase, start, captured=False)
                finally:
                    window.until = None
        else:
            logits = self._run(tokens, phase, start)
        # what passes write, the next one writes again
        return (logits[-1:] if last_only else logits).to(torch.float32, copy=True)

    def _run(self, tokens: Sequence[int], phase: Phase, start: int, *, captured: bool = True) -> Tensor:
        """Logits of a pass; captured: whether one of a prompt may be a window's."""
        try:
            if phase == "draft":
                logits = self._draft(tokens, start)
            elif phase == "prefill":
                logits = self._prompt.run(tokens, start, captured=captured)
            else:
                logits = self.window(tokens, start, phase)
        except BaseException:
            self.rewind(start)
            raise
        self.sequence.advance(start + len(tokens))
        if self.passes.mtp is not None and phase != "draft":
            is_window = phase != "prefill" or (captured and len(tokens) <= self._prompt.longest_window)
            self.passes.mtp.note_pass(start, tokens, is_window=is_window)
        return logits

    def _draft(self, tokens: Sequence[int], start: int) -> Tensor:
        (token,) = tokens
        self.passes.window.set(start, 1, [token])
        self.issue.force("draft", start, 1)
        output = self.issue.draft(start + 1)
        report = Landing(output.report).wait()
        self.tell_draft(self.passes.lookahead.num_tokens, self.issue.read_draft(report), last=False)
        self.passes.memory.pump()
        return output.logits

    def window(self, tokens: Sequence[int], start: int, phase: Phase) -> Tensor:
        """A window's pass, waited for and taken over; logits (n, V)."""
        count = len(tokens)
        self.passes.window.set(start, count, tokens)
        self.issue.force(phase, start, count)
        if phase == "prefill":
            self.sequence.keep_at(start, start)
        output, report = self.land_window(self.issue_window(count, start))
        self.take_over(report, phase)
        return output.logits[:count]

    def prepare_window(self) -> None:
        """While what comes before it runs: upload what `issue_window` would, for the window that comes next,
        if one comes before anything else does."""
        self.passes.memory.prepare_pass()
        if self.passes.lane is not None:
            self.passes.lane.prepare_pass(self.passes.memory)

    def open_pass(
        self, *, behind: bool = False, kind: LanePass = LanePass.WINDOW, single: bool = False
    ) -> None:
        """Before a pass that brings what it asks for. behind: see issue_window; kind, single: DeviceLane."""
        memory, lane = self.passes.memory, self.passes.lane
        if behind:
            memory.open_behind()
        else:
            memory.open_pass()
        if lane is not None:
            lane.open_pass(memory, kind, single=single)

    def issue_window(self, count: int, start: int, *, behind: bool = False) -> PendingWindow:
        """Issue a window's pass, whose tokens are on the device already. behind: another one, of one token,
        still runs, and nothing is to be copied."""
        self.open_pass(behind=behind, single=count == 1)
        self._look_ahead()
        output = self.issue.window(count, start)
        return PendingWindow(count, start, output, Landing(output.report))

    def _look_ahead(self) -> None:
        memory = self.passes.memory
        self.passes.ahead = memory.may_copy and memory.copies_beside

    def land_window(
        self, pending: PendingWindow, before_again: Callable[[WindowReport], None] = lambda failed: None
    ) -> tuple[PassOutput, WindowReport]:
        """Wait for a window's pass. One that the CPU lane failed is run again without it, after
        `before_again`, which has to undo what was issued behind it, and is given its report."""
        report = self._heard(pending)
        if not self.failed(report):
            return pending.output, report
        before_again(report)
        return self.land_window(self.issue_window(pending.count, pending.start))

    def failed(self, report: WindowReport) -> bool:
        """Whether the CPU lane did not answer a pass, which is closed then: it has to be run again."""
        lane = self.passes.lane
        if report.lane is None or lane is None or lane.close_pass(report.lane):
            return False
        self.passes.memory.close_pass(report.log)  # what it put into slots is right, what it computed is not
        return True

    def drop_window(self, pending: PendingWindow) -> None:
        """Wait for a window's pass that nobody wants, of which no policy is told."""
        report = self._heard(pending)
        if report.lane is not None and self.passes.lane is not None:
            self.passes.lane.close_pass(report.lane)
        self.passes.memory.close_pass(report.log)

    def _heard(self, pending: PendingWindow) -> WindowReport:
        report = self.issue.read_window(pending.report.wait(), pending.count, len(pending.output.logits))
        place = report.start, report.live
        assert place == (pending.start, pending.count), f"a pass ran at {place}, not at {pending.start}"
        return report

    # -- what the host is told

    def tell_draft(self, token: int, said: DraftReport, *, last: bool) -> None:
        """Tell the policy of the routing of the window's token `token`. last: the draft goes no further."""
        if self.passes.mtp is not None:
            return  # which foretells none
        self.passes.lookahead.record_token(said.experts, said.confidences)
        self.passes.scheduler.notify(TokenRouted(token, said.experts, said.confidences, last))

    def take_over(self, report: WindowReport, phase: Phase, *, wanted: bool = True) -> None:
        """Bring table, policy and counters up to a window that has run. wanted: its tokens may be emitted."""
        found = self.passes.memory.close_pass(report.log)
        self.passes.memory.count_waiting(report.waited_s)
        counts = None
        if phase == "prefill":
            counts = self._counts(report.experts)
            self.passes.memory.note_prompt(report.experts)
        self.passes.scheduler.notify(PassRouted(found.demanded, counts))
        if wanted and phase == "verify":
            count_window(self.passes.counters, self.passes.lookahead, found, report.experts)
        if wanted:
            self._record(report.experts)

    def take_over_stream(self, experts: NDArray[np.int32]) -> None:
        """The same of a pass past which experts were streamed. experts: int (L, T, K), what routers chose."""
        counts = self._counts(experts)
        self.passes.memory.note_use(counts > 0)
        self.passes.scheduler.notify(PassRouted(counts > 0, counts))
        self._record(experts)

    def _counts(self, experts: NDArray[np.int32]) -> NDArray[np.int64]:
        """(L, E): how many tokens chose each expert. experts: (L, T, K)."""
        return tokens_of(experts.swapaxes(0, 1), self.passes.memory.store.num_experts)

    def _record(self, experts: NDArray[np.int32]) -> None:
        recorder = self.passes.recorder
        if recorder is not None:
            for layer, chosen in enumerate(experts):
                recorder.record(layer, torch.from_numpy(chosen.copy()))

    def rewind(self, length: int) -> None:
        """After interrupted passes: go back to `length` tokens, or to none where some layers' state may have
        gone on; slots that they may have filled are emptied."""
        join_forked()  # copies beside may still write to slots
        self.passes.memory.abandon_pass()
        if self.passes.lane is not None:
            self.passes.lane.abandon_pass()
        self.sequence.truncate(min(length, self.sequence.length) if self.sequence.states is None else 0)
