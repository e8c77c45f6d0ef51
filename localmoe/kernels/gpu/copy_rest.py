"""Complete an expert of which the CPU computed a part: while the link has nothing else to do, its first inner
columns follow those that the pass has read into the slot already. Chooses nothing (grouping does), and
computes nothing.

What is copied is counted, so that the next layers know how long the link is still busy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.record_sources import record_at
from localmoe.kernels.rests import LOAD_WORDS, PIECE_NUMBERS, RestView

_PROGRAMS = 32  # enough to fill PCIe 5, few beside attention
_ROWS, _COLUMNS = 16, 256  # words of a tile


def copy_rest(rest: RestView) -> None:
    """Copy what the layer's job says. It starts when all before it in the stream is complete: a launch that
    may overlap what it follows would have to be one of all streams that it waits for."""
    launch(
        _copy_rest, (_PROGRAMS,),
        rest.job, rest.pieces, rest.pieces.shape[0], rest.words, rest.anchor,
        NUMBERS=PIECE_NUMBERS, LOAD=LOAD_WORDS, PROGRAMS=_PROGRAMS, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pieces"])
def _copy_rest(
    job, pieces, num_pieces, words, anchor,
    NUMBERS: tl.constexpr, LOAD: tl.constexpr, PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.load(job + 2)
    if columns > 0:
        source, target = record_at(anchor, tl.load(job)), record_at(anchor, tl.load(job + 1))
        r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        for piece in range(0, num_pieces):
            numbers = pieces + piece * NUMBERS
            # products with a constant: so the compiler sees that whole loads fit
            first, pitch = tl.load(numbers) * LOAD, tl.load(numbers + 1) * LOAD
            rows, groups = tl.load(numbers + 3), tl.load(numbers + 4)
            groups = (columns + groups - 1) // groups
            width = tl.load(numbers + 2) * tl.where(rows == 0, 1, groups) * LOAD
            rows = tl.where(rows == 0, groups, rows)
            across = (width + COLUMNS - 1) // COLUMNS
            tiles = across * ((rows + ROWS - 1) // ROWS)
            for tile in range(tl.program_id(0), tiles, PROGRAMS):
                row, column = tile // across * ROWS, tile % across * COLUMNS
                at = first + (row + r)[:, None] * pitch + (column + c)[None, :]
                inside = ((row + r) < rows)[:, None] & ((column + c) < width)[None, :]
                tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
                if tl.load(numbers + 5) != 0:
                    done = tl.minimum(rows - row, ROWS) * tl.minimum(width - column, COLUMNS)
                    tl.atomic_add(words + 1, done, sem="relaxed", scope="gpu")
