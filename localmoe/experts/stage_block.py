"""The stage's memory on the device: room for a part of one expert, for all layers. Copies nothing
(kernels.gpu.copy_ahead does) and chooses no expert (model.device_foresight does).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localmoe.experts.records import RecordLayout
from localmoe.kernels import bf12_tiles, fp8_tiles
from localmoe.kernels.mxfp4_tiles import code_bytes, scale_bytes
from localmoe.kernels.stage import PARTS, STAGE_WORDS, TURNS, StageView
from localmoe.kernels.weight_forms import WeightForm

STAGE_BYTES = 6 << 20  # what PCIe 5 brings while attention takes 110 us
_WORD_BYTES = 4  # of records of codes


class StageBlock:
    """Device tensors of the stage."""

    def __init__(
        self, layouts: Sequence[RecordLayout], block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """layouts: of each MoE layer, all of one form. block: inner columns that are copied at a time, see
        routed_experts.stage_block. dtype: of weights that are no codes."""
        word = dtype if layouts[0].form is WeightForm.PLAIN else torch.int32
        sizes = [_pieces(layout, block) for layout in layouts]
        blocks = [
            min(STAGE_BYTES // (sum(pair) * word.itemsize), layout.inner // block)
            if layout.inner % block == 0
            else 0
            for layout, pair in zip(layouts, sizes, strict=True)
        ]
        room = max(count * sum(pair) for count, pair in zip(blocks, sizes, strict=True))
        self._memory = torch.empty(room, dtype=word, device=device)
        words = torch.zeros(STAGE_WORDS, dtype=torch.int64, device=device)
        words[0] = -1
        progress = torch.zeros(TURNS * PARTS, dtype=torch.int64, device=device)
        self._views = []
        for layer, (layout, (first, second), count) in enumerate(zip(layouts, sizes, blocks, strict=True)):
            skipped = layout.inner // block - count
            behind = count * first + skipped * (first - second)
            places = skipped * first, _second_at(layout) + skipped * second
            staged = torch.full((2,), -1, dtype=torch.int64, device=device)
            view = StageView(
                layer, block, count * block, (first, second), places, behind, self._memory, words, progress,
                staged,
            )  # fmt: skip
            self._views.append(view)

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return self._memory.nbytes

    def view(self, layer: int) -> StageView | None:
        """What the layer's kernels see; None where its experts cannot be copied in blocks."""
        view = self._views[layer]
        return view if view.columns else None


def _pieces(layout: RecordLayout, block: int) -> tuple[int, int]:
    """Elements of a block's gate and up, in BF12, FP8, NVFP4 and INT4 words of their codes; in MXFP4, where
    these alternate, words of codes and of scales. Without a gate up is the first piece, and the only one."""
    if not layout.mxfp4:
        size = _elements(layout, block)
        return size, size if layout.gated else 0
    shape = 2 * block, layout.hidden
    return code_bytes(*shape) // _WORD_BYTES, scale_bytes(*shape) // _WORD_BYTES


def _second_at(layout: RecordLayout) -> int:
    """Elements before the second piece of column 0 in a record."""
    if not layout.mxfp4:
        return _elements(layout, layout.inner)
    return sum(code_bytes(*shape) for shape in layout.rows) // _WORD_BYTES


def _elements(layout: RecordLayout, rows: int) -> int:
    """Of so many of gate's rows."""
    if layout.bf12:
        return bf12_tiles.code_bytes(rows, layout.hidden) // _WORD_BYTES
    if layout.fp8:
        return fp8_tiles.code_bytes(rows, layout.hidden) // _WORD_BYTES
    if layout.nvfp4 or layout.span:
        return code_bytes(rows, layout.hidden) // _WORD_BYTES
    return rows * layout.hidden
