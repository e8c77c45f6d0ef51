"""One expert's products for many tokens, of a record in BF12, by the processor's matrix unit: what
bf12_products has for few. Which tokens are together changes no sum, but these sums are in another order than
those of few.

Dimension letters: H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from localmoe.kernels.bf12_tiles import TILE_COLUMNS, TILE_ROWS
from localmoe.kernels.cpu.atoms import compiled, words_at
from localmoe.kernels.cpu.bf12_matrix import MOST_GROUPS, products_1, products_2, products_3, products_4
from localmoe.kernels.cpu.bf12_products import codes_of, side_bytes, side_of
from localmoe.kernels.cpu.bf12_vectors import place
from localmoe.kernels.cpu.gathered_rows import (
    SUMS_ROWS,
    SUMS_TOKENS,
    gathered,
    groups_of,
    most_groups,
    sums_at,
)
from localmoe.kernels.cpu.matrix_unit import ROW_BYTES, SIDE
from localmoe.kernels.cpu.products import KINDS, activated, add_bias
from localmoe.kernels.cpu.strip_sums import PITCH, add_column, put_pair, put_rows, silu_rows

MANY = 3  # tokens from which on this is taken: vectors are slower with four than this is with five
_SILU = KINDS.index("silu")
_TOGETHER = SIDE * MOST_GROUPS  # tokens that weights are decoded for at once


@compiled
def _products(
    codes: int, side: int, height: int, columns: int, row: int, following: int, like: Any, numbers: Any,
    inputs: int, step: int, groups: int, tiles: int, sums: int,
) -> None:  # fmt: skip
    """sums[r, t] = sum over the first `tiles` tiles of row `row` + r of a matrix * x[t], for r < 16 and 16
    tokens of each group.

    Args:
        codes, side: addresses of the matrix's, of `height` rows. following: of the codes that are read next.
        like, numbers: any 16-bit word and float32 in arrays.
        inputs, step: address of the first group's x, and bytes to the next group's.
    """
    scales, places_at, values_at, room = side_of(side, height, columns, row)
    at = codes + codes_of(row, columns)
    if groups == 1:
        products_1(at, scales, following, inputs, step, tiles, sums)
    elif groups == 2:
        products_2(at, scales, following, inputs, step, tiles, sums)
    elif groups == 3:
        products_3(at, scales, following, inputs, step, tiles, sums)
    else:
        products_4(at, scales, following, inputs, step, tiles, sums)
    places = carray(words_at(places_at, np.int32(0)), (room,))
    values = carray(words_at(values_at, numbers), (room,))
    for s in range(room):
        if places[s] < 0:
            break
        r, column = places[s] >> 16, places[s] & 0xFFFF
        if column < TILE_COLUMNS * tiles:
            where = place(column, like)
            word = inputs + where // 2 * ROW_BYTES
            add_column(word, where % 2, step, groups, values[s], sums + r * PITCH)


@compiled
def gate_up_many(
    record: int, bias: Any, hidden: int, inner: int, matrices: int, kind: int, alpha: Any, limit: Any,
    first: int, last: int, after: int, x: Any, rows: Any, numbers: Any, room: Any, job: int, entry: int,
    out: int,
) -> None:  # fmt: skip
    """As bf12_products.gate_up_bf12.

    Args:
        numbers: an array of float32. room: of this thread, see gathered_rows. job, entry: which rows these
            are. out: address of groups of rows of `inner` numbers, see gathered_rows.shared_at.
    """
    up, tiles = record + codes_of(inner, hidden), hidden // TILE_COLUMNS
    side = record + (matrices + 1) * codes_of(inner, hidden)
    side_of_up = side + side_bytes(inner, hidden)
    at = sums_at(room)
    at_up = at + (TILE_ROWS * PITCH if matrices == 2 else 0)
    sums = carray(words_at(at, numbers), (SUMS_ROWS, SUMS_TOKENS))
    words, step, step_out = hidden // 2, 2 * SIDE * hidden, 2 * SIDE * inner
    most = SIDE * most_groups(room, words)
    for begin in range(0, rows.shape[0], most):
        some = rows[begin : begin + most]
        inputs = gathered(room, job, (entry << 32) | begin, x, some, words)
        for i in range(first, last, TILE_ROWS):
            next_at = record + codes_of(i + TILE_ROWS if i + TILE_ROWS < last else after, hidden)
            following = up + codes_of(i, hidden) if matrices == 2 else next_at
            for n in range(0, some.shape[0], _TOGETHER):
                groups = groups_of(min(some.shape[0] - n, _TOGETHER))
                here = inputs + n // SIDE * step
                _products(
                    record, side, inner, hidden, i, following, x, numbers, here, step, groups, tiles, at
                )  # fmt: skip
                if matrices == 2:
                    _products(
                        up, side_of_up, inner, hidden, i, next_at, x, numbers, here, step, groups, tiles,
                        at_up,
                    )  # fmt: skip
                if kind == _SILU and bias.shape[0] == 0:
                    silu_rows(at, at_up, groups, limit)
                else:
                    of_up = TILE_ROWS if matrices == 2 else 0
                    for r in range(TILE_ROWS):
                        for t in range(SIDE * groups):
                            sums[r, t] = activated(
                                sums[r, t], sums[of_up + r, t], i + r, (matrices - 1) * inner, bias, False,
                                kind, alpha, limit,
                            )  # fmt: skip
                into = out + (begin + n) // SIDE * step_out
                for r in range(0, TILE_ROWS, 2):
                    put_pair(at + r * PITCH, groups, into + place(i + r, x) // 2 * ROW_BYTES, step_out)


@compiled
def down_many(
    record: int, bias: Any, hidden: int, inner: int, matrices: int, share: int, first: int, last: int,
    after: int, inputs: int, like: Any, pairs: Any, out: Any, room: Any,
) -> None:  # fmt: skip
    """As bf12_products.down_bf12. inputs: address of what gate_up_many put out. like: an array of 16-bit
    words. room: see gate_up_many."""
    codes, tiles = record + matrices * codes_of(inner, hidden), share // TILE_COLUMNS
    side = record + (matrices + 1) * codes_of(inner, hidden) + matrices * side_bytes(inner, hidden)
    at, step = sums_at(room), 2 * SIDE * inner
    for h in range(first, last, TILE_ROWS):
        next_at = codes + codes_of(h + TILE_ROWS if h + TILE_ROWS < last else after, inner)
        for n in range(0, pairs.shape[0], _TOGETHER):
            these = pairs[n : n + _TOGETHER]
            groups, here = groups_of(these.shape[0]), inputs + n // SIDE * step
            _products(codes, side, hidden, inner, h, next_at, like, out, here, step, groups, tiles, at)
            place_at = out.ctypes.data + 4 * h
            put_rows(at, these.ctypes.data, these.shape[0], place_at, out.strides[0])
    add_bias(bias, first, last, pairs, out)
