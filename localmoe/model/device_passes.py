"""Issue whole passes to the GPU: a draft pass and a window of the target as one CUDA graph each, a long
prompt as it is. Reads nothing back and tells nobody; see device_runner.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.types import Phase
from localmoe.kernels.gpu.state_places import DRAFT, WINDOW
from localmoe.model.cached_pass import cached_pass
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_choice import DeviceChoice
from localmoe.model.device_experts import DevicePassState
from localmoe.model.device_linear import KernelMode
from localmoe.model.device_prompts import DevicePrompts
from localmoe.model.forced_routing import ForcedRouting
from localmoe.model.pass_kinds import WINDOW_BUCKETS, PassKind, likely, serving, visible_for
from localmoe.model.step_graphs import PassOutput, StepGraphs
from localmoe.model.uninstall import uninstall
from localmoe.model.window_report import DraftReport, WindowReport, read_draft, read_window

# tokens from which a prompt's products use their tallest tiles; Triton compiles multiples of 16 apart
_DRY_PROMPTS = (130, 144)
_LONG_TEXT_ROWS = (1, 8)  # windows whose attention is cut in other ways over a long text


class DevicePasses:
    """The passes of one model over one cache. choice: how they choose tokens. compiled: their kernels are."""

    def __init__(
        self,
        model: Any,
        cache: DeviceKVCache,
        state: DevicePassState,
        mode: KernelMode,
        context: int,
    ) -> None:
        """context: positions that live rows may have; the rotary table ends there."""
        self._model = model
        self._cache = cache
        self._state = state
        self._mode = mode
        self._last_position = context - 1
        self._device = state.window.at.device
        self.on_gpu = self._device.type == "cuda"
        self.compiled = not self.on_gpu  # or kept in Triton's cache
        self.choice = DeviceChoice(self._device)
        self._graphs = StepGraphs(self.on_gpu)
        self._num_layers, self._num_experts = state.memory.store.num_layers, state.memory.store.num_experts
        self._top_k = 0  # known after the first pass
        self._rows = torch.arange(WINDOW_BUCKETS[-1], device=self._device)
        self._forced = ForcedRouting(WINDOW_BUCKETS[-1], self._device)
        self._prompts = DevicePrompts(state, cache, partial(self._forward, keep=1))
        self._logits: Tensor | None = None  # (rows, V) of the last window of several rows

    def compile(self, stop: threading.Event | None = None) -> None:
        """Compile what passes launch, many kernels at a time, and run none of it; `stop` ends it early."""
        from localmoe.kernels.gpu.launch import compiling

        self._state.window.set(0, 0, [0])
        with compiling(stop):  # what takes longest first
            self.choice.prepare(self._run_dry_prompts())
            self._state.window.set(0, 0, [0])
            self._run_draft()
            self.go_on(self._run_windows(), 0)

    def prepare(self) -> None:
        """Run each kind of pass once, for no token: afterwards all that passes keep between them is there,
        the kernels are compiled, and graphs can be captured."""
        if not self.compiled:
            self.compile()
            self.compiled = True
            torch.cuda.empty_cache()  # so that what was kept for it does not add to what comes
        self._state.window.set(0, 0, [0])
        self._state.memory.open_pass()
        output = self._run_windows()
        self.go_on(output, 0)
        rows = len(output.logits)
        self._state.memory.close_pass(self.read_window(output.report.cpu().numpy(), rows, rows).log)
        self.choice.prepare(output.logits[:1])
        self._run_draft()
        if self.on_gpu:
            self._run_dry_prompts()
            torch.cuda.synchronize()

    def _run_windows(self) -> PassOutput:
        """Each size of window, without and with looking ahead and the CPU lane; what the last one left."""
        state, lane = self._state, self._state.lane
        state.phase = "verify"
        kinds = ((False, False), (True, False), (True, True))
        for state.ahead, lane_is_on in kinds if lane is not None else kinds[:2]:
            if lane is not None:
                lane.on = lane_is_on
            if not state.ahead:
                self._run_long_texts()
            state.window.visible = visible_for(WINDOW_BUCKETS[-1], self._cache.capacity)
            for rows in WINDOW_BUCKETS:
                if rows == 1 or lane_is_on == state.ahead:  # no others look ahead
                    output = self._window_body(rows)
        return output

    def _run_draft(self) -> None:
        if self._state.drafts:
            self._run(PassKind(0, self._state.window.visible, self.choice.kind))

    def _run_long_texts(self) -> None:
        """Compile what only windows over long texts use, and give the room for it back to the graphs."""
        self._state.window.visible = self._cache.capacity
        for rows in _LONG_TEXT_ROWS:
            self._window_body(rows)
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _run_dry_prompts(self) -> Tensor:
        """Compile what only long prompts use, without their copies. Results are garbage, and are wiped;
        logits (1, V)."""
        lane = self._state.lane
        for count in _DRY_PROMPTS:
            count = min(count, self._last_position + 1)
            logits = self._prompts.run_dry(count)
        for lane_is_on in (False, True) if lane is not None else (False,):
            if lane is not None:
                lane.on = lane_is_on
            self._prompts.run_dry(count, asks=True)
        self._cache.wipe()
        return logits

    @property
    def all_in_kernels(self) -> bool:
        """Whether every norm and matrix product so far went through the row-invariant kernels."""
        return not self._mode.others

    @property
    def capture_s(self) -> float:
        """Seconds that capturing passes took so far, in which the answer at hand waited."""
        return self._graphs.capture_s

    def capture_ahead(self, length: int) -> bool:
        """See DeviceRunner. With lane, ahead and choice as they are, behind a text of so many tokens."""
        kinds = likely(self._state, self.choice.kind, length, self._cache.capacity)
        return self._graphs.capture_ahead(kinds, self._run)

    def forget_graphs(self) -> None:
        """Captured passes hold the addresses of the table; the next passes are captured anew."""
        self._graphs.clear()

    def release(self) -> None:
        """Give back what passes keep; none can be issued any more."""
        self._graphs.clear()
        self._logits = None
        self._forced.clear()
        self._state.routed.clear()
        state = self._state
        state.forced = state.foretold = state.draft = state.foresight = state.rests = state.mtp = None
        uninstall(self._model)
        self._mode = KernelMode()

    def force(self, phase: Phase, start: int, count: int) -> None:
        """Put what a simulation routes the positions from `start` on to where the passes read it."""
        self._forced.upload(self._state.synthetic, phase, start, count)

    def _issue(self, rows: int, start: int) -> PassOutput:
        kinds = serving(self._state, self.choice.kind, rows, start, self._cache.capacity)
        kind = self._graphs.cheapest(kinds)
        return self._graphs.run(kind, lambda: self._run(kind))

    def _run(self, kind: PassKind) -> PassOutput:
        """The pass of a kind that says of lane, ahead and choice what holds now."""
        self._state.window.visible = kind.visible
        if kind.rows:
            self._state.phase = "verify"
            return self._window_body(kind.rows)
        self._state.phase, self._mode.one_row, mtp = "draft", True, self._state.mtp
        try:
            return self._draft_body() if mtp is None else mtp.draft(self.choice)
        finally:
            self._mode.one_row = False

    # -- a draft pass

    def draft(self, length: int) -> PassOutput:
        """One token through the low-bit experts: the one that the window's cursor is at. It leaves what is
        chosen from its logits (1, V) as the next token. length: of the sequence, at the end of the step."""
        return self._issue(0, length)

    def _draft_body(self) -> PassOutput:
        window = self._state.window
        torch.add(window.start, window.cursor, out=window.at)
        self._cache.begin_pass(DRAFT)
        self._state.forced = self._forced.of_draft(window.cursor)
        token = self.choice.readable(window.tokens.index_select(0, window.cursor))
        self.choice.note(window.at, token)
        logits = self._forward(token, window.at, keep=1)
        window.cursor.add_(1)
        token, margin = self.choice.choose_surely(logits, window.at)
        window.tokens.index_copy_(0, window.cursor, token)
        routed = self._routed()
        weights = torch.stack([weights for _, weights in routed]).float().flatten().view(torch.int32)
        numbers = self._experts(routed), weights, margin.view(torch.int32)
        return PassOutput(logits, torch.cat(numbers))

    def read_draft(self, report: NDArray[np.int32]) -> DraftReport:
        """The report of a draft pass."""
        return read_draft(report, (0 if self._state.mtp is not None else self._num_layers, self._top_k))

    # -- a window of the target

    def window(self, count: int, start: int) -> PassOutput:
        """The window's `count` tokens, at positions from `start` on, through the target; logits (rows, V)
        with rows at least `count`."""
        self._cache.expect_window(start, count)
        return self._issue(count, start)

    def advance(self, output: PassOutput) -> None:
        """Move the window, of one token, on to the one that its pass chose."""
        self._state.window.advance(self._choices(output)[:1])

    def go_on(self, output: PassOutput, following: int, accepted: int | None = None) -> None:
        """Move the window on behind its pass, see DeviceWindow.go_on."""
        self._state.window.go_on(self._choices(output), following, accepted)

    def _choices(self, output: PassOutput) -> Tensor:
        """int32 (rows,) of a window's report."""
        rows = len(output.logits)
        first = self._num_layers * (self._num_experts + 1 + rows * self._top_k)
        return output.report[first : first + rows]

    def _window_body(self, rows: int) -> PassOutput:
        window = self._state.window
        window.at.copy_(window.start)
        self._cache.begin_pass(WINDOW)
        self._state.forced, self._state.foretold = self._forced.of_target(), self._forced.of_foretold()
        # padding rows may stand past the context, where the rotary table has no entry
        positions = (window.at + self._rows[:rows]).clamp_(max=self._last_position)
        tokens = self.choice.readable(window.tokens[:rows])
        self.choice.note(window.start, tokens, window.live)
        logits = self._forward(tokens, positions, keep=0)
        block = self._state.memory.block
        chosen = self.choice.choose(logits, positions)
        numbers = [block.log.flatten(), block.waited_ns(), self._experts(self._routed())]
        numbers += [chosen.int(), window.numbers(rows)]
        if self._state.lane is not None and self._state.lane.on:
            numbers.append(self._state.lane.block.numbers())
        if self._state.rests is not None:
            self._state.rests.join()
        if self._state.mtp is not None:
            self._state.mtp.end_window(chosen, self.choice)
        return PassOutput(self._kept(logits), torch.cat(numbers))

    def _kept(self, logits: Tensor) -> Tensor:
        """The logits of a window where those of all windows of several rows lie: graphs would keep (R, V)
        each."""
        rows, vocab = logits.shape
        if rows == 1:
            return logits
        if self._logits is None:  # while nothing is captured
            self._logits = logits.new_empty(WINDOW_BUCKETS[-1], vocab)
        return self._logits[:rows].copy_(logits)

    def read_window(self, report: NDArray[np.int32], count: int, rows: int) -> WindowReport:
        """The report of a window of `count` tokens whose logits had `rows` rows."""
        return read_window(report, (self._num_layers, self._num_experts, self._top_k), count, rows)

    # -- a long prompt

    @property
    def prefill_chunk(self) -> int:
        """Most tokens of a prompt in its next pass."""
        return self._prompts.chunk

    def stream(self, tokens: Sequence[int], start: int) -> tuple[Tensor, NDArray[np.int32]]:
        """See DevicePrompts."""
        return self._prompts.stream(tokens, start)

    def ask(self, tokens: Sequence[int], start: int) -> tuple[Tensor, WindowReport]:
        """See DevicePrompts."""
        return self._prompts.ask(tokens, start)

    def _forward(self, ids: Tensor, positions: Tensor, keep: int) -> Tensor:
        with self._mode:
            return cached_pass(self._model, ids[None], positions[None], self._cache, keep=keep)[0]

    def _routed(self) -> list[tuple[Tensor, Tensor]]:
        """(index, weights) of each layer's router in the pass that was just issued."""
        routed = [self._state.routed[layer] for layer in range(self._num_layers)]
        self._top_k = routed[0][0].shape[1]
        return routed

    def _experts(self, routed: list[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([index for index, _ in routed]).int().flatten()
