"""Pictures in the pass of a transformers model: what an encoder has made of them in the place of the input
embedding's rows, and behind the first decoder layers. Encodes none and knows no prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from localmoe.model.rotary import place_angles
from localmoe.model.tying import input_embedding


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows of a text from `start` on: (1 + D, N, H) in host RAM. The first part stands in the place of the
    embedding's, the others are added behind the first D decoder layers."""

    start: int
    rows: Tensor

    @property
    def end(self) -> int:
        """The place behind them."""
        return self.start + int(self.rows.shape[1])


class ImageRows:
    """Of one model, whose passes are of one text at a time. A pass without a picture runs as it would
    without this; one with some must not be a captured one."""

    def __init__(
        self, model: Any, depth: int, beside: Sequence[nn.Module] = (), *, whole: bool = False
    ) -> None:
        """The model has its weights and kernels.

        Args:
            depth: D.
            beside: modules that turn the text's tokens too, such as an MTP layer.
            whole: where layers see a window, a picture's tokens see each other, so that no pass may end
                within one.
        """
        embedding = input_embedding(model)
        assert isinstance(embedding, nn.Embedding), "text has an embedding"
        self._turning: tuple[nn.Module, ...] = (model, *beside)
        self._vocab_size = embedding.num_embeddings
        self._placed: tuple[PlacedRows, ...] = ()
        self._rows: Tensor | None = None  # (1 + D, N, H) of the pass
        self._ids: Tensor | None = None  # (T,) of the pass
        self._whole = whole
        self.until: Tensor | None = None  # int32 (T,) of the pass, see DeviceWindow
        self._start = 0  # of the pass
        if whole:
            for module in model.modules():
                if getattr(module, "sliding_window", None) and hasattr(module, "layer_idx"):
                    module.localmoe_images = self
        embedding.forward = partial(self._look_up, embedding.forward)  # type: ignore[method-assign]
        for index, layer in enumerate(model.get_decoder().layers[:depth]):
            layer.register_forward_hook(partial(self._add, index + 1))

    def begin(self, placed: Sequence[PlacedRows], coordinates: NDArray[np.int64] | None) -> None:
        """The next passes are of a text with these pictures, in order.

        Args:
            coordinates: int64 (3, T) by which its first tokens are turned, those behind them counting on;
                None: each by its place alone.
        """
        self._placed = tuple(placed)
        for module in self._turning:
            place_angles(module, coordinates)

    def forget(self) -> None:
        """The text is gone, and the model with it."""
        self._placed, self._turning = (), ()

    def has_some(self, start: int, count: int) -> bool:
        """Whether one of so many tokens from `start` on is a picture's."""
        return any(one.start < start + count and start < one.end for one in self._placed)

    def cut(self, start: int, rows: int) -> int:
        """How many tokens a pass from `start` on has that was to have so many."""
        end = start + rows
        within = (
            next((one for one in self._placed if one.start < end < one.end), None) if self._whole else None
        )
        if within is None:
            return rows
        return (within.start if within.start > start else within.end) - start

    @contextmanager
    def of_pass(self, tokens: Sequence[int], start: int, device: torch.device) -> Iterator[list[int]]:
        """Within, a pass of the text's tokens from `start` on, of which it has_some: as numbers, of which
        those that no vocabulary has name the pictures' rows. Pictures whose last tokens have run are let go
        of."""
        numbers, parts, known = list(tokens), [], self._vocab_size
        for one in self._placed:
            first, end = max(one.start, start), min(one.end, start + len(tokens))
            if first < end:
                numbers[first - start : end - start] = range(known, known + end - first)
                parts.append(one.rows[:, first - one.start : end - one.start])
                known += end - first
        try:
            self._rows, self._start = torch.cat(parts, dim=1).to(device), start
            if self._whole:
                self.until = self._seen_until(len(tokens)).to(device)
            yield numbers
            end = start + len(tokens)
            self._placed = tuple(one for one in self._placed if one.end > end)  # the others have run
        finally:
            self._rows = self._ids = self.until = None

    def _seen_until(self, count: int) -> Tensor:
        rows = torch.arange(count, dtype=torch.int32)
        for one in self._placed:
            first, end = max(one.start - self._start, 0), one.end - self._start
            if first < count and end > 0:
                assert end <= count, "a picture goes through one pass"
                rows[first:end] = end - 1
        return rows

    def widened(self, mask: Tensor, window: int) -> Tensor:
        """A mask (1, T, L), bool, of rows that see a window, in which a picture's see each other too."""
        if self.until is None:
            return mask
        rows, places = self.until, torch.arange(mask.shape[2], device=mask.device)
        own = self._start + torch.arange(len(rows), device=mask.device)
        seen = (places <= self._start + rows[:, None]) & (places > own[:, None] - window)
        wider = mask.clone()
        wider[:, : len(rows)] |= seen  # the others are padding
        return wider

    def _look_up(self, by_table: Any, ids: Tensor) -> Tensor:
        """int64 (..., T) -> (..., T, H)."""
        if self._rows is None:
            found: Tensor = by_table(ids)
            return found
        self._ids = ids.reshape(-1)
        found = by_table(ids.clamp(max=self._vocab_size - 1))
        rows = self._chosen(0).view(*ids.shape, -1).to(found.dtype)
        return torch.where((ids >= self._vocab_size)[..., None], rows, found)

    def _add(self, part: int, layer: nn.Module, args: object, hidden: Tensor) -> Tensor | None:
        """Behind a decoder layer, to hidden (1, T, H); None: nothing."""
        if self._rows is None or self._ids is None or part >= len(self._rows):
            return None
        added = self._chosen(part).view_as(hidden).to(hidden.dtype)
        return torch.where((self._ids >= self._vocab_size).view(1, -1, 1), hidden + added, hidden)

    def _chosen(self, part: int) -> Tensor:
        """(T, H): a part's row of each token; of no picture's one of no meaning."""
        assert self._rows is not None and self._ids is not None, "no pass of a picture runs"
        return self._rows[part].index_select(0, (self._ids - self._vocab_size).clamp(min=0))
