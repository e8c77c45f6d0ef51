"""One expert's products for a few tokens, of a record in MXFP4 (experts.records), block by block; as products
has them of 16-bit weights, rounded at the same places. Blocks are whole strips of tiles.

Dimension letters: H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

from localmoe.kernels.cpu.atoms import compiled
from localmoe.kernels.cpu.mxfp4_dots import mxfp4_dots_1, mxfp4_dots_2, mxfp4_dots_4
from localmoe.kernels.cpu.mxfp4_vectors import place
from localmoe.kernels.cpu.products import add_bias, finish
from localmoe.kernels.mxfp4_tiles import TILE_COLUMNS, TILE_ROWS

_SCALES_ROW = 4  # bytes that a word of scales has for a row


@compiled
def codes_of(row: int, columns: int) -> int:
    """Bytes from a matrix's codes to those of a strip's first row."""
    return row * columns // 2


@compiled
def scales_of(row: int, columns: int) -> int:
    """The same of its scales."""
    return row * _SCALES_ROW * ((columns + 127) // 128)


@compiled
def _dots(
    codes: int, scales: int, row: int, following: int, columns: int, x: Any, rows: Any, tiles: int, out: Any
) -> None:
    """out[r, i] = sum over the first `tiles` tiles of row `row` + r of a matrix * x[rows[i]], for r < 16 and
    all i. following: the row that is read next."""
    at, scales_at = codes + codes_of(row, columns), scales + scales_of(row, columns)
    next_at, next_scales = codes + codes_of(following, columns), scales + scales_of(following, columns)
    base, pitch, these, into = x.ctypes.data, x.strides[0], rows.ctypes.data, out.ctypes.data
    count, i, step = rows.shape[0], 0, out.strides[0]
    while i + 4 <= count:
        mxfp4_dots_4(
            x, at, scales_at, next_at, next_scales, base, pitch, these + 4 * i, tiles, into + 4 * i, step
        )  # fmt: skip
        i += 4
    while i + 2 <= count:
        mxfp4_dots_2(
            x, at, scales_at, next_at, next_scales, base, pitch, these + 4 * i, tiles, into + 4 * i, step
        )  # fmt: skip
        i += 2
    if i < count:
        mxfp4_dots_1(
            x, at, scales_at, next_at, next_scales, base, pitch, these + 4 * i, tiles, into + 4 * i, step
        )  # fmt: skip


@compiled
def gate_up_codes(
    record: int, bias: Any, hidden: int, inner: int, interleaved: bool, kind: int, alpha: Any, limit: Any,
    first: int, last: int, after: int, x: Any, rows: Any, pairs: Any, out: Any, scratch: Any, like: Any,
) -> None:  # fmt: skip
    """As products.gate_up_rows, of the record at an address; x and `out` lie as mxfp4_dots wants them.

    Args:
        first, last: multiples of 16. after: the inner column that is likely to be read next.
        scratch: float32 (32, at least n).
    """
    scales = record + 3 * inner * hidden // 2
    tiles, columns = hidden // TILE_COLUMNS, TILE_ROWS // 2 if interleaved else TILE_ROWS
    for i in range(first, last, columns):
        following = i + columns if i + columns < last else after
        if interleaved:
            _dots(record, scales, 2 * i, 2 * following, hidden, x, rows, tiles, scratch)
        else:
            _dots(record, scales, i, inner + i, hidden, x, rows, tiles, scratch)
            _dots(record, scales, inner + i, following, hidden, x, rows, tiles, scratch[TILE_ROWS:])
        for n in range(rows.shape[0]):
            for r in range(columns):
                gate_at, up_at = (2 * r, 2 * r + 1) if interleaved else (r, TILE_ROWS + r)
                finish(
                    scratch[gate_at, n], scratch[up_at, n], i + r, inner, bias, interleaved, kind, alpha,
                    limit, out, pairs[n], place(i + r, out), like,
                )  # fmt: skip


@compiled
def down_codes(
    record: int, bias: Any, hidden: int, inner: int, share: int, first: int, last: int, after: int, x: Any,
    pairs: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    """As products.down_rows, likewise. share: whole tiles. after: see gate_up_codes."""
    codes = record + inner * hidden
    scales = record + 3 * inner * hidden // 2 + scales_of(2 * inner, hidden)
    for h in range(first, last, TILE_ROWS):
        following = h + TILE_ROWS if h + TILE_ROWS < last else after
        _dots(codes, scales, h, following, inner, x, pairs, share // TILE_COLUMNS, scratch)
        for n in range(pairs.shape[0]):
            for r in range(TILE_ROWS):
                out[pairs[n], h + r] = scratch[r, n]
    add_bias(bias, first, last, pairs, out)
