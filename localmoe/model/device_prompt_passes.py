"""The passes of a prompt on the GPU: windows, and longer ones past which all experts are streamed, or that
ask for those that they use. Which of these a pass is, prompt_ways decides by what they took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from localmoe.model.device_experts import STREAM_ROWS
from localmoe.model.prompt_ways import MOST_ASKED, WINDOW, PromptWays

if TYPE_CHECKING:
    from localmoe.model.device_runner import DeviceRunner


class PromptPasses:
    """Of one runner.

    Attributes:
        ways: what passes took with the CPU's help (True), and without.
    """

    def __init__(self, runner: DeviceRunner) -> None:
        self._runner = runner
        self.ways = {helped: self._new_ways(helped=helped) for helped in (False, True)}

    def _new_ways(self, *, helped: bool) -> PromptWays:
        passes = self._runner.passes
        # an expert of more rows than a tile has comes over the link once more for each of them
        most = STREAM_ROWS * passes.memory.store.num_experts // passes.experts_per_token
        if helped and passes.lane is not None:
            most = min(most, passes.lane.rows)
        most = max(WINDOW, min(MOST_ASKED, most))
        # alone a CPU would take long for many tokens
        tries = helped and passes.lane is not None and passes.lane.link
        return PromptWays(tries=tries, copy_s=passes.memory.copy_s, most=most)

    @property
    def _now(self) -> PromptWays:
        lane = self._runner.passes.lane
        return self.ways[lane is not None and lane.may_be_on]

    def forget(self) -> None:
        """The budget is another one."""
        for ways in self.ways.values():
            ways.forget()

    def rows(self, left: int) -> int:
        """Tokens of the next pass, of `left` that are to come."""
        return self._now.rows(left, self._runner.issue.prefill_chunk, self._runner.passes.memory.missing)

    def run(self, tokens: Sequence[int], start: int) -> Tensor:
        """A pass; logits of its last token, or of a window's all."""
        ways, count, missing = self._now, len(tokens), self._runner.passes.memory.missing
        captured_s, began = self._runner.capture_s, time.perf_counter()
        if count > WINDOW and not ways.asks(count, missing):
            logits = self._stream(tokens, start)
            ways.note_streamed(count, missing, time.perf_counter() - began)
            return logits
        if count > WINDOW:
            answered = self._ask(tokens, start)
            if answered is None:
                return self._stream(tokens, start)
            logits = answered
        else:
            logits = self._runner.window(tokens, start, "prefill")
        ways.note_asked(count, time.perf_counter() - began - (self._runner.capture_s - captured_s))
        return logits

    def _stream(self, tokens: Sequence[int], start: int) -> Tensor:
        logits, experts = self._runner.issue.stream(tokens, start)
        self._runner.take_over_stream(experts)
        return logits

    def _ask(self, tokens: Sequence[int], start: int) -> Tensor | None:
        """None: the CPU lane failed, and the text is as it was."""
        runner = self._runner
        runner.open_pass(prompt=True)
        lane = runner.passes.lane
        before = runner.sequence.copy_states() if lane is not None and lane.on and start else None
        logits, report = runner.issue.ask(tokens, start)
        if runner.failed(report):
            if before is not None:
                runner.sequence.bring_states_back(before)
            return None
        runner.take_over(report, "prefill")
        return logits
