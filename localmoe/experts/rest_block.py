"""Which parts of a record belong to its first inner columns, and the device's words by which passes complete
experts of which the CPU computed those (kernels.gpu.copy_rest). Copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localmoe.experts.records import RecordLayout
from localmoe.kernels import bf12_tiles, fp8_tiles
from localmoe.kernels.mxfp4_tiles import TILE_COLUMNS, TILE_ROWS, WORD_COLUMNS, code_bytes, scale_bytes
from localmoe.kernels.rests import JOB_WORDS, LOAD_WORDS, REST_WORDS, WORD_BYTES, RestPiece, RestView

_FINEST = 2 * LOAD_WORDS  # columns of 16 bits in a load
_CODES = 8  # in a word


class RestBlock:
    """Device tensors of the rests of all layers."""

    def __init__(
        self,
        layouts: Sequence[RecordLayout],
        interleaved: Sequence[bool],
        quanta: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Each of the first three has one entry a MoE layer.

        Args:
            interleaved: whether gate's and up's rows alternate.
            quanta: inner columns that an expert is split by; 0: not at all.
            dtype: of weights that are not in MXFP4.
        """
        words = torch.zeros(REST_WORDS, dtype=torch.int64, device=device)
        anchor = torch.zeros(LOAD_WORDS, dtype=torch.int32, device=device)
        self._views: list[RestView | None] = []
        for layout, alternate, quantum in zip(layouts, interleaved, quanta, strict=True):
            pieces = rest_pieces(layout, alternate, quantum, dtype)
            view = None
            if pieces:
                view = RestView(
                    torch.tensor([piece.numbers for piece in pieces], dtype=torch.int64, device=device),
                    sum(piece.num_words(quantum) for piece in pieces if piece.counted),
                    layout.num_bytes(dtype) // WORD_BYTES,
                    words,
                    torch.zeros(JOB_WORDS, dtype=torch.int64, device=device),
                    anchor,
                )
            self._views.append(view)

    def view(self, layer: int) -> RestView | None:
        """What the layer's kernels see; None where its experts are not split, or not in such pieces."""
        return self._views[layer]


def rest_pieces(layout: RecordLayout, interleaved: bool, quantum: int, dtype: torch.dtype) -> list[RestPiece]:
    """The pieces of a record for inner columns from 0 on, in multiples of `quantum`; none where loads of 16
    bytes do not fit them."""
    if not quantum or (not layout.mxfp4 and dtype.itemsize != 2):
        return []
    if layout.bf12:
        pieces = _bf12(layout)
    elif layout.packed:
        pieces = _coded(layout, quantum)
    elif layout.mxfp4:
        pieces = _mxfp4(layout, interleaved, quantum)
    else:
        pieces = _plain(layout, interleaved)
    fits = all(piece.fits and quantum % _FINEST == 0 for piece in pieces)
    return pieces if fits and layout.hidden % 2 == 0 and layout.inner % 2 == 0 else []


def _plain(layout: RecordLayout, interleaved: bool) -> list[RestPiece]:
    """Of 16-bit weights, two a word."""
    row, column, down = layout.hidden // 2, layout.inner // 2, layout.gate_up_elements // 2
    two = layout.gated and not interleaved  # pieces
    if layout.transposed:
        pitch = (1 + layout.gated) * column
        pieces = [RestPiece(0, pitch, layout.hidden, _FINEST, (1 + interleaved) * LOAD_WORDS)]
        if two:
            pieces.append(RestPiece(column, pitch, layout.hidden, _FINEST, LOAD_WORDS))
        return [*pieces, RestPiece(down, row, 0, 1, row)]
    pieces = [RestPiece(0, 2 * row, 0, 1, 2 * row)] if interleaved else [
        RestPiece(first, row, 0, 1, row) for first in ((0, down // 2) if two else (0,))
    ]  # fmt: skip
    return [*pieces, RestPiece(down, column, layout.hidden, _FINEST, LOAD_WORDS)]


def _bf12(layout: RecordLayout) -> list[RestPiece]:
    """Of gate's, if there is one, and up's codes, scales and strays, and of down's codes, in strips of
    16 rows: what lies beside down is the same for any columns, and the pass has read it."""
    hidden, inner, height = layout.hidden, layout.inner, bf12_tiles.TILE_ROWS
    matrix, tile = bf12_tiles.code_bytes(inner, hidden) // WORD_BYTES, bf12_tiles.TILE_WORDS
    strip, room = hidden // bf12_tiles.TILE_COLUMNS * tile, bf12_tiles.stray_room(hidden)
    beside = bf12_tiles.side_words(inner, hidden)
    pieces = []
    matrices = len(layout.matrices)
    for part in range(matrices - 1):
        scales = matrices * matrix + part * beside
        places = scales + inner
        values = places + inner // height * room
        for first, width in ((part * matrix, strip), (scales, height), (places, room), (values, room)):
            pieces.append(RestPiece(first, width, 0, height, width))
    pitch = inner // bf12_tiles.TILE_COLUMNS * tile
    return [
        *pieces,
        RestPiece((matrices - 1) * matrix, pitch, hidden // height, bf12_tiles.TILE_COLUMNS, tile),
    ]


def _coded(layout: RecordLayout, quantum: int) -> list[RestPiece]:
    """Of gate's, if there is one, and up's codes and scales, and of down's, in strips of 16 rows, of FP8,
    NVFP4 and INT4. Down's factors, of NVFP4, are the same for any columns, and the pass has read them."""
    hidden, inner, height = layout.hidden, layout.inner, fp8_tiles.TILE_ROWS
    matrices, strips, columns = len(layout.matrices), hidden // height, fp8_tiles.TILE_COLUMNS
    codes, sides = ([size // WORD_BYTES for size in sizes] for sizes in layout.coded_parts())
    pieces = []
    for first, size in ((0, codes[0]), (matrices * codes[0], sides[0])):
        width = size // inner * height
        pieces += [RestPiece(first + part * size, width, 0, height, width) for part in range(matrices - 1)]
    group, pitch = layout.span or (columns if layout.nvfp4 else fp8_tiles.SCALE_COLUMNS), sides[-1] // strips
    down, side, strip = (matrices - 1) * codes[0], sum(codes) + (matrices - 1) * sides[0], codes[-1] // strips
    return [
        *pieces,
        RestPiece(down, strip, strips, columns, strip // (inner // columns)),
        RestPiece(side, pitch, strips, group, height, quantum % group == 0),
    ]


def _mxfp4(layout: RecordLayout, interleaved: bool, quantum: int) -> list[RestPiece]:
    """Of codes, then scales, of gate_up, then down, in strips of 16 rows."""
    gate_up, down = layout.rows
    codes = [0, code_bytes(*gate_up) // WORD_BYTES]
    scales = [codes[1] + code_bytes(*down) // WORD_BYTES]
    scales.append(scales[0] + scale_bytes(*gate_up) // WORD_BYTES)
    strip, scale_strip = TILE_ROWS * layout.hidden // _CODES, TILE_ROWS * -(-layout.hidden // WORD_COLUMNS)
    pieces = []
    if interleaved:
        group = TILE_ROWS // 2
        for first, width in ((codes[0], strip), (scales[0], scale_strip)):
            pieces.append(RestPiece(first, width, 0, group, width))
    else:
        for first, width in ((codes[0], strip), (scales[0], scale_strip)):
            up = first + width * (layout.inner // TILE_ROWS)
            pieces += [RestPiece(begin, width, 0, TILE_ROWS, width) for begin in (first, up)]
    strips, tile = layout.hidden // TILE_ROWS, TILE_ROWS * TILE_COLUMNS // _CODES
    pieces.append(RestPiece(codes[1], TILE_ROWS * layout.inner // _CODES, strips, TILE_COLUMNS, tile))
    pitch = TILE_ROWS * -(-layout.inner // WORD_COLUMNS)
    whole = quantum % WORD_COLUMNS == 0
    return [*pieces, RestPiece(scales[1], pitch, strips, WORD_COLUMNS, TILE_ROWS, whole)]
