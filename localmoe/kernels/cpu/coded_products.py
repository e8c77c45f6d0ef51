"""One expert's products for a few tokens, of a record in a coding with scales (codings, experts.records),
block by block; as products has them of 16-bit weights, rounded at the same places. Blocks are whole strips.

Dimension letters: H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

from localmoe.kernels.cpu.atoms import compiled
from localmoe.kernels.cpu.coded_dots import coded_dots_1, coded_dots_2, coded_dots_4
from localmoe.kernels.cpu.codings import SCALES_ROW, code_bits, factor_bytes, place, scale_span
from localmoe.kernels.cpu.products import add_bias, finish
from localmoe.kernels.fp8_tiles import TILE_COLUMNS, TILE_ROWS


@compiled
def codes_of(row: int, columns: int, coded: Any) -> int:
    """Bytes from a matrix's codes to those of a strip's first row. coded: see codings."""
    size: int = row * columns * code_bits(coded) // 8
    return size


@compiled
def scales_of(row: int, columns: int, coded: Any) -> int:
    """The same of its scales, and of factors where it has such."""
    span = scale_span(coded)
    size: int = row * (SCALES_ROW * ((columns + span - 1) // span) + factor_bytes(coded))
    return size


@compiled
def _dots(
    codes: int, scales: int, row: int, following: int, columns: int, x: Any, rows: Any, tiles: int, out: Any,
    coded: Any,
) -> None:  # fmt: skip
    """out[r, i] = sum over the first `tiles` tiles of row `row` + r of a matrix * x[rows[i]], for r < 16 and
    all i. following: the row that is read next."""
    at, scales_at = codes + codes_of(row, columns, coded), scales + scales_of(row, columns, coded)
    next_at = codes + codes_of(following, columns, coded)
    next_scales = scales + scales_of(following, columns, coded)
    factors = scales_at + scales_of(TILE_ROWS, columns, coded) - TILE_ROWS * factor_bytes(coded)
    base, pitch, these, into = x.ctypes.data, x.strides[0], rows.ctypes.data, out.ctypes.data
    count, i, step = rows.shape[0], 0, out.strides[0]
    while i + 4 <= count:
        coded_dots_4(
            x, coded, at, scales_at, next_at, next_scales, factors, base, pitch, these + 4 * i, tiles,
            into + 4 * i, step,
        )  # fmt: skip
        i += 4
    while i + 2 <= count:
        coded_dots_2(
            x, coded, at, scales_at, next_at, next_scales, factors, base, pitch, these + 4 * i, tiles,
            into + 4 * i, step,
        )  # fmt: skip
        i += 2
    if i < count:
        coded_dots_1(
            x, coded, at, scales_at, next_at, next_scales, factors, base, pitch, these + 4 * i, tiles,
            into + 4 * i, step,
        )  # fmt: skip


@compiled
def gate_up_codes(
    record: int, bias: Any, hidden: int, inner: int, matrices: int, interleaved: bool, kind: int, alpha: Any,
    limit: Any, first: int, last: int, after: int, x: Any, rows: Any, pairs: Any, out: Any, scratch: Any,
    like: Any, coded: Any,
) -> None:  # fmt: skip
    """As products.gate_up_rows, of the record at an address; x and `out` lie as coded_dots wants them.

    Args:
        first, last: multiples of 16. after: the inner column that is likely to be read next.
        scratch: float32 (32, at least n).
    """
    scales = record + codes_of((matrices + 1) * inner, hidden, coded)
    tiles, columns = hidden // TILE_COLUMNS, TILE_ROWS // 2 if interleaved else TILE_ROWS
    to_up = TILE_ROWS if matrices == 2 else 0
    for i in range(first, last, columns):
        following = i + columns if i + columns < last else after
        if interleaved:
            _dots(record, scales, 2 * i, 2 * following, hidden, x, rows, tiles, scratch, coded)
        elif matrices == 2:
            _dots(record, scales, i, inner + i, hidden, x, rows, tiles, scratch, coded)
            _dots(record, scales, inner + i, following, hidden, x, rows, tiles, scratch[TILE_ROWS:], coded)
        else:
            _dots(record, scales, i, following, hidden, x, rows, tiles, scratch, coded)
        for n in range(rows.shape[0]):
            for r in range(columns):
                gate_at, up_at = (2 * r, 2 * r + 1) if interleaved else (r, to_up + r)
                finish(
                    scratch[gate_at, n], scratch[up_at, n], i + r, (matrices - 1) * inner, bias, interleaved,
                    kind, alpha, limit, out, pairs[n], place(i + r, out, coded), like,
                )  # fmt: skip


@compiled
def down_codes(
    record: int, bias: Any, hidden: int, inner: int, matrices: int, share: int, first: int, last: int,
    after: int, x: Any, pairs: Any, out: Any, scratch: Any, coded: Any,
) -> None:  # fmt: skip
    """As products.down_rows, likewise. share: whole tiles. after: see gate_up_codes."""
    codes = record + codes_of(matrices * inner, hidden, coded)
    scales = (
        record + codes_of((matrices + 1) * inner, hidden, coded) + scales_of(matrices * inner, hidden, coded)
    )
    for h in range(first, last, TILE_ROWS):
        following = h + TILE_ROWS if h + TILE_ROWS < last else after
        _dots(codes, scales, h, following, inner, x, pairs, share // TILE_COLUMNS, scratch, coded)
        for n in range(pairs.shape[0]):
            for r in range(TILE_ROWS):
                out[pairs[n], h + r] = scratch[r, n]
    add_bias(bias, first, last, pairs, out)
