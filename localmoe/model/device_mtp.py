"""The MTP layer (model.mtp_layer) where steps run whole on a GPU: each window's pass ends with it, so that it
has read what the target kept, and a draft pass goes on from there without the host. It keeps its keys and
values as one more layer of the target's cache, and foretells no experts.

An entry, at a token's position, is made of that token and of what the target computed before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.hardware.needs import PREFILL_CHUNK
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_choice import DeviceChoice
from localmoe.model.device_linear import KernelMode
from localmoe.model.device_window import DeviceWindow
from localmoe.model.final_hidden import FinalHidden
from localmoe.model.mtp_layer import MtpLayer
from localmoe.model.pass_kinds import WINDOW_BUCKETS, visible_for
from localmoe.model.step_graphs import PassOutput


@dataclass(frozen=True, slots=True)
class MtpModules:
    """What computes: the layer, and the target's embedding and output head, each in a mode of its own."""

    layer: MtpLayer
    mode: KernelMode
    target: Any
    target_mode: KernelMode


class DeviceMtp:
    """Of one model over one cache."""

    def __init__(
        self,
        modules: MtpModules,
        window: DeviceWindow,
        cache: DeviceKVCache,
        dtype: torch.dtype,
        context: int,
    ) -> None:
        """cache: has a layer for it. context: positions that live rows may have."""
        self._held: MtpModules | None = modules
        self._window, self._cache = window, cache
        self._last_position = context - 1
        self._final = FinalHidden(modules.target)
        device, rows = window.at.device, WINDOW_BUCKETS[-1]
        self._rows = torch.arange(rows, device=device)
        width = int(modules.layer.text_config.hidden_size)
        # before the output head: the target's of the last window, what the layer made of these, of its last
        # token alone, and of a pass that was no window
        self._hidden, self._made = torch.zeros(2, rows, width, dtype=dtype, device=device)
        self._own = torch.zeros(1, width, dtype=dtype, device=device)
        self._begun = torch.zeros(1, dtype=torch.int64, device=device)  # where that window begins
        self._loose: tuple[int, Tensor] | None = None  # place and rows of a pass without a token behind it

    @property
    def _modules(self) -> MtpModules:
        assert self._held is not None, "the model is closed"
        return self._held

    @property
    def num_bytes(self) -> int:
        """Device bytes of its weights; the cache is the target's."""
        return self._modules.layer.num_bytes

    @property
    def module(self) -> nn.Module:
        """Its layer."""
        layer: nn.Module = self._modules.layer.model
        return layer

    # -- in a captured pass

    def end_window(self, choices: Tensor, choice: DeviceChoice) -> None:
        """At the end of a window's pass: enter each token that it chose, int64 (R,). Those behind the last
        one that is kept are written over by the next window's."""
        rows = len(choices)
        hidden = self._hidden[:rows].copy_(self._final.take())
        self._window.at.copy_(self._window.start).add_(1)
        self._made[:rows].copy_(self._run(choice.readable(choices), hidden))
        self._begun.copy_(self._window.start)

    def draft(self, choice: DeviceChoice) -> PassOutput:
        """What follows the token that the window's cursor is at, and the layer's own entry of that."""
        window, modules = self._window, self._modules
        torch.add(window.start, window.cursor, out=window.at)
        token = choice.readable(window.tokens.index_select(0, window.cursor))
        choice.note(window.at, token)
        row = (window.start - self._begun - 1).clamp_(0, len(self._made) - 1)
        first = self._made.index_select(0, row)
        hidden = torch.where(window.cursor[:, None] == 0, first, self._own)
        with modules.target_mode:
            logits: Tensor = modules.target.get_output_embeddings()(hidden)
        window.cursor.add_(1)
        token, margin = choice.choose_surely(logits, window.at)
        window.tokens.index_copy_(0, window.cursor, token)
        window.at.add_(1)
        modules.mode.one_row = True
        try:
            self._own.copy_(self._run(choice.readable(token), hidden))
        finally:
            modules.mode.one_row = False
        return PassOutput(logits, margin.view(torch.int32))

    # -- between passes

    def note_pass(self, start: int, tokens: Sequence[int], *, is_window: bool) -> None:
        """A pass of these tokens that is no step's has run: enter those whose hidden state before them is
        known. is_window: or a longer one."""
        left = self._hidden[: len(tokens)] if is_window else self._final.take()
        first, hidden, before = start + 1, left, self._row_before(start)
        if before is not None:
            first, hidden = start, torch.cat([before, left])
        self._enter(first, torch.tensor(tokens[first - start :], device=left.device), hidden)
        kept = left if is_window else left[-1:]  # of a window any of the tokens may be the last that counts
        self._loose = start + len(left) - len(kept), kept.clone()

    def begin_step(self, start: int) -> None:
        """The window's first token, which stands at `start`, is followed by a step."""
        before = self._row_before(start)
        self._loose = None
        if before is not None:
            self._enter(start, self._window.tokens[:1], before)
            self._made[:1].copy_(self._own)
            self._begun.fill_(start - 1)

    def _row_before(self, start: int) -> Tensor | None:
        """(1, H) before the token at `start`, where the last pass was no step's."""
        if self._loose is None:
            return None
        place, rows = self._loose
        row = start - 1 - place
        return rows[row : row + 1] if 0 <= row < len(rows) else None

    def _enter(self, first: int, tokens: Tensor, hidden: Tensor) -> None:
        """Tokens (T,) at positions from `first` on; hidden (T or more, H)."""
        visible = self._window.visible
        for at in range(0, len(tokens), PREFILL_CHUNK):
            part = tokens[at : at + PREFILL_CHUNK]
            self._window.at.fill_(first + at)
            self._window.visible = visible_for(first + at + len(part), self._cache.capacity)
            made = self._run(part, hidden[at : at + len(part)])
            self._own.copy_(made[-1:])
        self._window.visible = visible

    def _run(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """(T, H) of entries at positions from the window's `at` on."""
        modules, rows = self._modules, len(tokens)
        steps = self._rows[:rows] if rows <= len(self._rows) else torch.arange(rows, device=tokens.device)
        positions = (self._window.at + steps).clamp_(max=self._last_position)
        embedded: Tensor = modules.target.get_input_embeddings()(tokens[None])[0]
        with modules.mode:
            return modules.layer.run(embedded, hidden, positions, self._cache)

    # -- as another model that drafts

    def forget(self) -> None:
        """What was read is gone."""
        self._loose = None

    def release(self) -> None:
        """Give the memory back."""
        self._loose = None
        self._final.forget()
        if self._held is not None:
            self._held.layer.release()
        self._held = None  # modes keep weights that they joined
        self._hidden = self._made = self._own = self._own.new_empty(0)
