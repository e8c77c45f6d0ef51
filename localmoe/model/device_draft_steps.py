"""Answers by the draft alone, several tokens a round trip to the host. Approximate: no target pass verifies
them. Keeps no cache (device_runner).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from localmoe.core.config import SamplingConfig
from localmoe.kernels.choices import check_chosen
from localmoe.model.device_clock import Clock, Landing
from localmoe.model.device_runner import DeviceRunner


@dataclass(frozen=True, slots=True)
class DraftedRun:
    """What the draft wrote, and seconds that it took."""

    tokens: list[int]
    draft_s: float


class DeviceDraftSteps:
    """The rounds of one answer."""

    def __init__(self, runner: DeviceRunner, sampling: SamplingConfig, seed: int) -> None:
        """sampling, seed: how tokens are chosen."""
        self._runner = runner
        self._sampling: tuple[SamplingConfig, int] | None = (sampling, seed)  # None: the device knows
        self._issue = runner.issue
        self._window = runner.passes.window
        self._pending: tuple[int, int, Clock, Landing] | None = None

    @torch.inference_mode()
    def begin(self, text: Sequence[int], count: int) -> None:
        """Issue `count` + 1 draft passes after `text`; each one's choice is the next one's token."""
        start = self._runner.sequence.length
        if self._sampling is not None:
            self._issue.choice.begin(*self._sampling, text)
            self._sampling = None
        self._window.set(start, count + 1, text[-1:])
        self._issue.force("draft", start, count + 1)
        clock = Clock(self._issue.on_gpu)
        for _ in range(count + 1):
            self._issue.draft(start + count + 1)
        clock.tick()
        written = self._window.tokens[1 : count + 2].int()
        self._pending = (start, count + 1, clock, Landing(written))

    def finish(self) -> DraftedRun:
        """The tokens; the sequence holds all but the last.

        Raises:
            CheckpointError: the draft's probabilities are no numbers.
        """
        assert self._pending is not None, "begin comes first"
        (start, count, clock, written), self._pending = self._pending, None
        tokens = written.wait().tolist()
        check_chosen(tokens)
        self._runner.sequence.advance(start + count)
        ended = time.perf_counter()
        (draft_s,) = clock.seconds()
        if self._runner.passes.timeline is not None:
            self._runner.passes.timeline.add("draft", f"{count} tokens", ended - draft_s, ended)
        return DraftedRun(tokens, draft_s)

    def close(self) -> None:
        """Wait for a round that was begun and is not wanted: the window is in use until then."""
        if self._pending is not None:
            self._pending[3].wait()
            self._pending = None
