"""The stage's memory on the device: room for a part of one expert, for all layers. Copies nothing
(kernels.gpu.copy_ahead does) and chooses no expert (model.device_foresight does).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localmoe.kernels.stage import PARTS, STAGE_WORDS, TURNS, StageView

STAGE_BYTES = 6 << 20  # what PCIe 5 brings while attention takes 110 us


class StageBlock:
    """Device tensors of the stage."""

    def __init__(
        self, inner: Sequence[int], hidden: int, block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """inner: I of each MoE layer. block: inner columns that are copied at a time."""
        most = STAGE_BYTES // (2 * hidden * dtype.itemsize)
        columns = [min(most, width) // block * block if width % block == 0 else 0 for width in inner]
        self._memory = torch.empty(2 * max(columns) * hidden, dtype=dtype, device=device)
        words = torch.zeros(STAGE_WORDS, dtype=torch.int64, device=device)
        words[0] = -1
        progress = torch.zeros(TURNS * PARTS, dtype=torch.int64, device=device)
        self._views = [
            StageView(
                layer, hidden, width, block, count, self._memory, words, progress,
                torch.full((2,), -1, dtype=torch.int64, device=device),
            )
            for layer, (width, count) in enumerate(zip(inner, columns, strict=True))
        ]  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return self._memory.nbytes

    def view(self, layer: int) -> StageView | None:
        """What the layer's kernels see; None where its experts cannot be copied in blocks."""
        view = self._views[layer]
        return view if view.columns else None
