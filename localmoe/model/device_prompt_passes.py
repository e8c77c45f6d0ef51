"""The passes of a prompt on the GPU: windows, and longer ones past which all experts are streamed, or that
ask for those that they use. Which of these a pass is, prompt_ways decides by what they took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from localmoe.core.errors import HardwareError
from localmoe.experts.lane_balance import LanePass
from localmoe.model.device_experts import STREAM_ROWS
from localmoe.model.prompt_ways import MOST_ASKED, WINDOW, PromptWays
from localmoe.model.sequence_copy import lacks_memory

if TYPE_CHECKING:
    from localmoe.model.device_runner import DeviceRunner


_BRIEF_WINDOW = 8  # tokens, where no kernel is to wait for all experts of a layer (see DeviceLane)


class PromptPasses:
    """Of one runner.

    Attributes:
        ways: what passes took of each kind that the CPU helps with, and without it (None).
        longest_window: tokens.
    """

    def __init__(self, runner: DeviceRunner) -> None:
        self._runner = runner
        kinds = (None, LanePass.PROMPT, LanePass.UNIT)
        self.ways: dict[LanePass | None, PromptWays] = {kind: self._new_ways(kind) for kind in kinds}

    @property
    def longest_window(self) -> int:
        lane = self._runner.passes.lane
        return _BRIEF_WINDOW if lane is not None and lane.brief else WINDOW

    @property
    def _only_asks(self) -> bool:
        lane = self._runner.passes.lane
        return lane is not None and lane.needed

    def _new_ways(self, kind: LanePass | None) -> PromptWays:
        passes = self._runner.passes
        # an expert of more rows than a tile has comes over the link once more for each of them
        most = STREAM_ROWS * passes.memory.store.num_experts // passes.experts_per_token
        lane = None if kind is None else passes.lane
        if lane is not None:
            most = min(most, lane.rows)
        most = max(WINDOW, min(MOST_ASKED, most))
        # alone a CPU would take long for many tokens
        tries = lane is not None and lane.link
        return PromptWays(tries=tries, copy_s=passes.memory.copy_s, most=most, only_asks=self._only_asks)

    @property
    def _kinds(self) -> tuple[LanePass | None, ...]:
        """That the next pass may be of."""
        lane = self._runner.passes.lane
        return (None,) if lane is None or not (lane.may_be_on or lane.needed) else lane.prompt_kinds

    def _best(self, kinds: Sequence[LanePass | None], tokens: int) -> LanePass | None:
        """Of a pass of so many tokens that asks: one that is not known yet, else the fastest."""
        return min(kinds, key=lambda kind: self.ways[kind].guess(tokens))

    def forget(self) -> None:
        """The budget is another one."""
        for ways in self.ways.values():
            ways.forget()

    def rows(self, left: int) -> int:
        """Tokens of the next pass, of `left` that are to come."""
        ways = self.ways[self._best(self._kinds, min(left, MOST_ASKED))]
        return ways.rows(left, self._runner.issue.prefill_chunk, self._runner.passes.memory.missing)

    def run(self, tokens: Sequence[int], start: int, *, captured: bool = True) -> Tensor:
        """A pass; logits of its last token, or of a window's all. captured: whether it may be a window's."""
        count, missing, kinds = len(tokens), self._runner.passes.memory.missing, self._kinds
        if count <= self.longest_window and not captured:
            return self._ask_or_stream(tokens, start)
        captured_s, began = self._runner.capture_s, time.perf_counter()
        if count > self.longest_window:
            asking = [kind for kind in kinds if self.ways[kind].asks(count, missing)]
            if not asking:
                logits = self._stream(tokens, start)
                took = time.perf_counter() - began
                for each in kinds:
                    self.ways[each].note_streamed(count, missing, took)
                return logits
            kind = self._best(asking, count)
            kinds = (kind,)
            answered = self._answered(tokens, start, kind)
            if answered is None:
                return self._stream(tokens, start)
            logits = answered
        else:
            logits = self._runner.window(tokens, start, "prefill")
        took = time.perf_counter() - began - (self._runner.capture_s - captured_s)
        for each in kinds:
            self.ways[each].note_asked(count, took)
        return logits

    def _ask_or_stream(self, tokens: Sequence[int], start: int) -> Tensor:
        """A pass that is as short as a window's."""
        kind = self._best(self._kinds, len(tokens))
        answered = self._answered(tokens, start, kind)
        return self._stream(tokens, start) if answered is None else answered

    def _answered(self, tokens: Sequence[int], start: int, kind: LanePass | None) -> Tensor | None:
        """Of a pass that asks; None: it cannot, and experts come another way too."""
        answered = self._ask(tokens, start, kind or LanePass.PROMPT)
        while answered is None and self._only_asks:
            answered = self._ask(tokens, start, kind or LanePass.PROMPT)
        return answered

    def _stream(self, tokens: Sequence[int], start: int) -> Tensor:
        logits, experts = self._runner.issue.stream(tokens, start)
        self._runner.take_over_stream(experts)
        return logits

    def _ask(self, tokens: Sequence[int], start: int, kind: LanePass) -> Tensor | None:
        """None: the CPU lane failed, or there is no room for what would mend that; the text is as it was.
        Raises HardwareError where that may not be and experts come no other way."""
        runner, lane = self._runner, self._runner.passes.lane
        before, mends = None, True
        if lane is not None and start:
            lane.settle(runner.passes.memory)
            try:
                before = runner.sequence.copy_states() if lane.on else None
            except (MemoryError, RuntimeError) as error:
                if not lacks_memory(error):
                    raise
                if not lane.needed:
                    return None  # no pass is open yet
                mends = False
        runner.open_pass(kind=kind)
        logits, report = runner.issue.ask(tokens, start)
        if runner.failed(report):
            if not mends:
                raise HardwareError("The disk was too slow for a prompt's pass: ask again.")
            if before is not None:
                runner.sequence.bring_states_back(before)
            return None
        runner.take_over(report, "prefill")
        return logits
