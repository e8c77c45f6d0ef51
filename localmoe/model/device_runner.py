"""Passes of one model on the GPU, and what the host does between them: tell the policy, issue the copies
that it wants, upload the residency table, take over what a pass reports. Chooses no tokens but a greedy
draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.events import DraftFinished, PassRouted, TokenRouted
from localmoe.core.types import Phase
from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK
from localmoe.kernels.rows import RowPadding
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_clock import Clock, Landing
from localmoe.model.device_experts import DevicePassState
from localmoe.model.device_passes import DevicePasses, WindowReport
from localmoe.model.pass_counts import count_window

STREAM_FROM = 65  # tokens of a prompt from which nearly every expert is asked for


@dataclass(frozen=True, slots=True)
class Speculation:
    """A greedy step: what was drafted, how much of it the target chose too, and its own choice after that."""

    drafted: list[int]
    accepted: int
    token: int
    draft_s: float
    verify_s: float


class DeviceRunner:
    """Runs passes of one model over one cache (model.runner.PassRunner), or whole greedy steps."""

    def __init__(self, issue: DevicePasses, cache: DeviceKVCache, passes: DevicePassState) -> None:
        self.sequence = cache
        self.passes = passes
        self._issue = issue

    @property
    def prefill_chunk(self) -> int:
        """Most tokens of a prompt in one pass."""
        return DEVICE_PREFILL_CHUNK

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compile and allocate what the first passes need."""
        self._issue.prepare()

    @property
    def row_padding(self) -> RowPadding | None:
        """How wide a window may be for a token's bits not to depend on it; None where they may."""
        return self.passes.rows if self._issue.all_in_kernels else None

    def forget_graphs(self) -> None:
        """Before slots and table are replaced."""
        self._issue.forget_graphs()

    def release(self) -> None:
        """Give back what passes keep; none can be issued any more."""
        self._issue.release()

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
        try:
            if phase == "draft":
                logits = self._draft(tokens, start)
            elif len(tokens) >= STREAM_FROM and phase == "prefill":
                logits = self._stream(tokens, start)
            else:
                logits = self._window(tokens, start, phase)
        except BaseException:
            self.rewind(start)
            raise
        self.sequence.advance(start + len(tokens))
        return logits[-1:].float() if last_only else logits.float()

    def _draft(self, tokens: Sequence[int], start: int) -> Tensor:
        (token,) = tokens
        self.passes.window.set(start, 1, [token])
        self._issue.force("draft", start, 1)
        output = self._issue.draft(start + 1)
        report = Landing(output.report).wait()
        self._tell_draft(self.passes.lookahead.num_tokens, report)
        self.passes.memory.pump()
        return output.logits

    def _window(self, tokens: Sequence[int], start: int, phase: Phase) -> Tensor:
        count = len(tokens)
        self.passes.window.set(start, count, tokens)
        self._issue.force(phase, start, count)
        self.passes.memory.open_pass()
        output = self._issue.window(count, start)
        self._finish_window(Landing(output.report).wait(), count, phase)
        return output.logits[:count]

    def _stream(self, tokens: Sequence[int], start: int) -> Tensor:
        logits, experts = self._issue.stream(tokens, start)
        memory = self.passes.memory
        demanded = np.zeros((memory.store.num_layers, memory.store.num_experts), dtype=np.bool_)
        for layer, chosen in enumerate(experts):
            demanded[layer, chosen[(chosen >= 0) & (chosen < demanded.shape[1])]] = True
        memory.note_use(demanded)
        self.passes.scheduler.notify(PassRouted(demanded))
        self._record(experts)
        return logits

    # -- a greedy step, with one wait

    @torch.inference_mode()
    def speculate(self, token: int, count: int) -> Speculation:
        """Draft `count` tokens after `token`, verify them, and roll back to what the target agrees with."""
        memory, start = self.passes.memory, self.sequence.length
        try:
            self.passes.window.set(start, count + 1, [token])
            self._issue.force("draft", start, count)
            clock = Clock(self._issue.on_gpu)
            drafts = [Landing(self._issue.draft(start + count + 1).report) for _ in range(count)]
            clock.tick()
            if may_copy := memory.may_copy:  # while the later tokens are drafted
                for i, draft in enumerate(drafts):
                    self._tell_draft(i, draft.wait())
                    memory.pump()
                self.passes.scheduler.notify(DraftFinished(count))
            self._issue.force("verify", start, count + 1)
            memory.open_pass()
            report = Landing(self._issue.window(count + 1, start).report)
            clock.tick()
            if not may_copy:  # no prefetch can come of it, so the policy may as well hear of it now
                for i, draft in enumerate(drafts):
                    self._tell_draft(i, draft.wait())
            done = self._finish_window(report.wait(), count + 1, "verify")
        except BaseException:
            self.rewind(start)
            raise
        accepted = self._accept(start, done)
        self.sequence.advance(start + 1 + accepted)
        draft_s, verify_s = clock.seconds()
        return Speculation(done.tokens, accepted, done.choices[accepted], draft_s, verify_s)

    def _accept(self, start: int, done: WindowReport) -> int:
        """Drafted tokens that are the target's own choices, or that a simulation accepts."""
        synthetic = self.passes.synthetic
        simulated = synthetic is not None and synthetic.settings.acceptance is not None
        for i, token in enumerate(done.tokens):
            kept = synthetic.accepts(start + 1 + i) if simulated and synthetic else token == done.choices[i]
            if not kept:
                return i
        return len(done.tokens)

    # -- what the host is told

    def _tell_draft(self, token: int, report: NDArray[np.int32]) -> None:
        experts, confidences = self._issue.read_draft(report)
        self.passes.lookahead.record_token(experts, confidences)
        self.passes.scheduler.notify(TokenRouted(token, experts, confidences))

    def _finish_window(self, numbers: NDArray[np.int32], count: int, phase: Phase) -> WindowReport:
        report = self._issue.read_window(numbers, count)
        found = self.passes.memory.close_pass(report.log)
        self.passes.scheduler.notify(PassRouted(found.demanded))
        if phase == "verify":
            count_window(self.passes.counters, self.passes.lookahead, found, report.experts)
        self._record(report.experts)
        return report

    def _record(self, experts: NDArray[np.int32]) -> None:
        recorder = self.passes.recorder
        if recorder is not None:
            for layer, chosen in enumerate(experts):
                recorder.record(layer, torch.from_numpy(chosen.copy()))

    def rewind(self, length: int) -> None:
        """After an interrupted pass: go back to `length` tokens; slots that it may have filled are
        emptied."""
        self.passes.memory.abandon_pass()
        self.sequence.truncate(min(length, self.sequence.length))
