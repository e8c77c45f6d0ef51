"""One expert's products for a few tokens, of a record in BF12 (experts.records), block by block; as products
has them of 16-bit weights, rounded at the same places. Blocks are whole strips of tiles.

Dimension letters: H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from localmoe.kernels import bf12_tiles
from localmoe.kernels.bf12_tiles import TILE_COLUMNS, TILE_ROWS, WORD_BYTES
from localmoe.kernels.cpu.atoms import compiled, fetch, kept, value, words_at
from localmoe.kernels.cpu.bf12_dots import MANY, bf12_dots_1, bf12_dots_2, bf12_dots_4, bf12_dots_many
from localmoe.kernels.cpu.bf12_vectors import RAISED, place
from localmoe.kernels.cpu.products import activated, add_bias

_UP, _DOWN = np.float32(RAISED), np.float32(1 / RAISED)

codes_of = compiled(bf12_tiles.code_bytes)  # (row, columns): from a matrix's codes to those of a strip
_stray_room = compiled(bf12_tiles.stray_room)


@compiled
def raised(number: Any, like: Any, x: Any) -> Any:
    """An activation as the array `x` keeps it. like: see atoms.kept."""
    return kept(number * _UP, like, x)


@compiled
def side_bytes(rows: int, columns: int) -> int:
    """As bf12_tiles.side_words has them."""
    size: int = WORD_BYTES * (rows + 2 * rows // TILE_ROWS * _stray_room(columns))
    return size


@compiled
def side_of(side: int, height: int, columns: int, row: int) -> tuple[int, int, int, int]:
    """Addresses of a strip's scales, and of its strays' places and values; how many there is room for. They
    are fetched: they are wanted last, and the processor does not foresee where they lie."""
    room, scales = _stray_room(columns), side + WORD_BYTES * row
    places_at = side + WORD_BYTES * (height + row // TILE_ROWS * room)
    values_at = places_at + WORD_BYTES * (height // TILE_ROWS * room)
    fetch(scales)
    fetch(places_at)
    fetch(values_at)
    return scales, places_at, values_at, room


@compiled
def _dots(
    codes: int, side: int, height: int, columns: int, row: int, following: int, x: Any, rows: Any,
    tiles: int, out: Any,
) -> None:  # fmt: skip
    """out[r, i] = sum over the first `tiles` tiles of row `row` + r of a matrix * x[rows[i]], for r < 16 and
    all i. codes, side: addresses of the matrix's, of `height` rows. following: of the codes that are
    read next."""
    scales, places_at, values_at, room = side_of(side, height, columns, row)
    at, base, pitch = codes + codes_of(row, columns), x.ctypes.data, x.strides[0]
    these, into, count, i, step = rows.ctypes.data, out.ctypes.data, rows.shape[0], 0, out.strides[0]
    while i + MANY <= count:
        bf12_dots_many(x, at, scales, following, base, pitch, these + 4 * i, tiles, into + 4 * i, step)
        i += MANY
    while i + 4 <= count:
        bf12_dots_4(x, at, scales, following, base, pitch, these + 4 * i, tiles, into + 4 * i, step)
        i += 4
    while i + 2 <= count:
        bf12_dots_2(x, at, scales, following, base, pitch, these + 4 * i, tiles, into + 4 * i, step)
        i += 2
    if i < count:
        bf12_dots_1(x, at, scales, following, base, pitch, these + 4 * i, tiles, into + 4 * i, step)
    places, values = carray(words_at(places_at, rows), (room,)), carray(words_at(values_at, out), (room,))
    _add_strays(places, values, x, rows, TILE_COLUMNS * tiles, out)


@compiled
def _add_strays(places: Any, values: Any, x: Any, rows: Any, columns: int, out: Any) -> None:
    """The same sums of weights that are not in the codes, of the first `columns` columns."""
    for s in range(places.shape[0]):
        if places[s] < 0:
            return
        r, column = places[s] >> 16, places[s] & 0xFFFF
        if column < columns:
            at = place(column, x)
            for i in range(rows.shape[0]):
                out[r, i] += values[s] * (value(x[rows[i], at]) * _DOWN)


@compiled
def gate_up_bf12(
    record: int, bias: Any, hidden: int, inner: int, matrices: int, kind: int, alpha: Any, limit: Any,
    first: int, last: int, after: int, x: Any, rows: Any, pairs: Any, out: Any, scratch: Any, like: Any,
) -> None:  # fmt: skip
    """As products.gate_up_rows, of the record at an address; x and `out` lie as bf12_dots wants them.

    Args:
        first, last: multiples of 16. after: the row that is likely to be read next.
        scratch: float32 (32, at least n).
    """
    up, tiles = record + codes_of(inner, hidden), hidden // TILE_COLUMNS
    side = record + (matrices + 1) * codes_of(inner, hidden)
    side_of_up = side + side_bytes(inner, hidden)
    of_up = scratch[TILE_ROWS if matrices == 2 else 0 :]
    for i in range(first, last, TILE_ROWS):
        next_at = record + codes_of(i + TILE_ROWS if i + TILE_ROWS < last else after, hidden)
        following = up + codes_of(i, hidden) if matrices == 2 else next_at
        _dots(record, side, inner, hidden, i, following, x, rows, tiles, scratch)
        if matrices == 2:
            _dots(up, side_of_up, inner, hidden, i, next_at, x, rows, tiles, of_up)
        for n in range(rows.shape[0]):
            for r in range(TILE_ROWS):
                number = activated(
                    scratch[r, n], of_up[r, n], i + r, (matrices - 1) * inner, bias, False, kind, alpha, limit
                )  # fmt: skip
                out[pairs[n], place(i + r, out)] = raised(number, like, out)


@compiled
def down_bf12(
    record: int, bias: Any, hidden: int, inner: int, matrices: int, share: int, first: int, last: int,
    after: int, x: Any, pairs: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    """As products.down_rows, likewise. share: whole tiles. after: see gate_up_bf12."""
    codes = record + matrices * codes_of(inner, hidden)
    side = record + (matrices + 1) * codes_of(inner, hidden) + matrices * side_bytes(inner, hidden)
    for h in range(first, last, TILE_ROWS):
        next_at = codes + codes_of(h + TILE_ROWS if h + TILE_ROWS < last else after, inner)
        _dots(codes, side, hidden, inner, h, next_at, x, pairs, share // TILE_COLUMNS, scratch)
        for n in range(pairs.shape[0]):
            for r in range(TILE_ROWS):
                out[pairs[n], h + r] = scratch[r, n]
    add_bias(bias, first, last, pairs, out)
