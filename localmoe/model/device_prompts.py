"""Long prompts on the GPU: passes of many tokens, past which all experts are streamed, or which ask for those
that they use; how many tokens, by what is missing. Reads back what routers chose, and how experts were found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.experts.prefill_stream import DryStream, PrefillStream
from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK
from localmoe.hardware.prefill_chunk import chunk_for
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_experts import ALIGNED, DevicePassState
from localmoe.model.pass_kinds import visible_for
from localmoe.model.window_report import WindowReport, read_prompt


class DevicePrompts:
    """Of one model over one cache."""

    def __init__(
        self,
        state: DevicePassState,
        cache: DeviceKVCache,
        forward: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """forward: (tokens, positions) -> logits (1, V) of the last one."""
        self._state, self._cache, self._forward = state, cache, forward

    @property
    def chunk(self) -> int:
        """Most tokens of the next pass."""
        state, memory = self._state, self._state.memory
        slots, experts = memory.slots.num_slots, memory.store.num_layers * memory.store.num_experts
        return chunk_for(state.prompt_rows, state.row_bytes, memory.slots.slot_bytes, slots, experts - slots)

    def stream(self, tokens: Sequence[int], start: int) -> tuple[Tensor, NDArray[np.int32]]:
        """A prompt through the target, past which all missing experts are streamed; logits (1, V) of its last
        token, and the experts (L, T, K) that the routers chose."""
        is_long = len(tokens) > DEVICE_PREFILL_CHUNK
        lent = len(tokens) * self._state.row_bytes + ALIGNED if is_long else 0
        state = self._state
        if is_long:
            _give_back_unused(state.window.at.device)
        try:
            logits = self._pass(tokens, start, PrefillStream(state.memory, lent))
            experts: NDArray[np.int32] = self._routed().cpu().numpy()
        except BaseException:
            state.memory.transfers.wait_for_compute()  # slots that it may still read are free
            raise
        state.routed.clear()  # of thousands of tokens
        if is_long:
            _give_back_unused(state.window.at.device)
        return logits, experts

    def ask(self, tokens: Sequence[int], start: int) -> tuple[Tensor, WindowReport]:
        """The same in a pass that was opened as a window's, and brings what it asks for as one does."""
        logits = self._pass(tokens, start, None)
        state = self._state
        block, lane = state.memory.block, state.lane
        numbers = [block.log.flatten(), block.waited_ns(), self._routed().flatten()]
        if lane is not None and lane.on:
            numbers.append(lane.block.numbers())
        if state.rests is not None:
            state.rests.join()
        layers, experts = block.log.shape
        shape = layers, experts, state.routed[0][0].shape[1]
        report = read_prompt(torch.cat(numbers).cpu().numpy(), shape, start, len(tokens))
        state.routed.clear()
        return logits, report

    def _routed(self) -> Tensor:
        """int32 (L, T, K)."""
        state = self._state
        return torch.stack([state.routed[layer][0] for layer in range(state.memory.store.num_layers)]).int()

    def run_dry(self, count: int, *, asks: bool = False) -> Tensor:
        """What a prompt of so many tokens launches, without its copies; logits (1, V) of no meaning."""
        if asks:
            return self._pass([0] * count, 0, None, live=0)
        return self._pass([0] * count, 0, DryStream(self._state.memory))

    def _pass(
        self,
        tokens: Sequence[int],
        start: int,
        stream: PrefillStream | DryStream | None,
        live: int | None = None,
    ) -> Tensor:
        """stream: None: it asks. live: so many tokens ask for experts; None: all."""
        state, window, count = self._state, self._state.window, len(tokens)
        device = window.at.device
        state.phase, state.stream, state.ahead = "prefill", stream, False
        try:
            window.set(start, count if live is None else live, [])
            window.at.copy_(window.start)
            self._cache.begin_prompt(start, count)
            window.visible = visible_for(start + count, self._cache.capacity)
            ids = torch.tensor(tokens, pin_memory=device.type == "cuda").to(device, non_blocking=True)
            positions = torch.arange(start, start + count, device=device)
            synthetic = state.synthetic
            forced = None if synthetic is None else synthetic.forced("prefill", start, count)
            state.forced = None if forced is None else torch.from_numpy(forced).to(device)
            return self._forward(ids, positions)
        finally:
            if stream is not None:
                stream.close()
            state.stream = None
            self._cache.end_prompt()


def _give_back_unused(device: torch.device) -> None:
    """What PyTorch's allocator keeps of tensors of other sizes, which a long pass would add its own to: of
    Gemma 4's rings, and passes of three lengths, 360 MB."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
