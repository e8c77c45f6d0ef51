"""Packing bfloat16 weights into BF12 (kernels.bf12_tiles) and unpacking them, in one thread and outside
Python's lock, so that readers of weights share the work. Importing this compiles it, which takes seconds the
first time.

Letters: N rows, R rows of the whole matrix, C columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localmoe.kernels.compiled_loops import compile_loop

_LEAST_TOP = 15  # so that numbers without an exponent of their own, whose bits say 0, are strays
_FEW = 256  # weights a stray: rows with more of them look for another power of two
_INFINITE = np.uint16(0x7F80)
_LANES = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _top_of(row: Any) -> Any:
    """The largest exponent of a row's numbers: infinities and NaNs have none."""
    largest = np.uint16(0)
    for c in range(row.shape[0]):  # so simple that it becomes vectors of 16-bit words, as the next two do
        largest = max(largest, np.uint16(row[c] & np.uint16(0x7FFF)))
    if largest >= _INFINITE:
        largest = np.uint16(0)
        for c in range(row.shape[0]):
            word = np.uint16(row[c] & np.uint16(0x7FFF))
            if word < _INFINITE:
                largest = max(largest, word)
    return max(_LEAST_TOP, np.int64(largest) >> 7)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _code(row: Any, top: int, small: Any) -> Any:
    """A row's weights with exponents of four bits, 15 of which end at `top`, and 0 for strays. How many those
    are."""
    base, strays = np.uint16((top - 15) << 7), np.uint16(0)
    for c in range(row.shape[0]):
        word = row[c]
        size = np.uint16(word & np.uint16(0x7FFF))
        code = np.uint16(size - base)
        inside = np.uint16(code - np.uint16(128)) < np.uint16(15 * 128)
        sign = np.uint16(word & np.uint16(0x8000))
        stray = (not inside) and size != np.uint16(0)
        small[c] = np.uint16(0) if stray else np.uint16(sign | (code if inside else np.uint16(0)))
        strays = np.uint16(strays + np.uint16(stray))
    return np.int64(strays)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _best_top(row: Any) -> Any:
    """The `top` that leaves out the fewest."""
    found = np.zeros(256, np.int64)
    for c in range(row.shape[0]):
        found[row[c] >> np.uint16(7) & np.uint16(255)] += 1
    best, most = _LEAST_TOP, -1
    inside = found[1:_LEAST_TOP].sum()
    for top in range(_LEAST_TOP, 255):
        inside += found[top] - (found[top - 15] if top > 15 else 0)
        if inside > most:
            best, most = top, inside
    return best


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _joined(lanes: Any) -> Any:
    """The lower bytes of four 16-bit words, side by side."""
    lanes = (lanes | lanes >> np.uint64(8)) & _LANES[1]
    return np.uint32(lanes | lanes >> np.uint64(16))


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _tile_row(small: Any, codes: Any, strip: int, row: int) -> None:
    """A row's words of all tiles, from its codes, four a word."""
    uppers = np.uint64(0x0087008700870087), np.uint64(0x0040004000400040), np.uint64(0x0038003800380038)
    for t in range(codes.shape[1]):
        for w in range(8):
            a, z = small[16 * t + 2 * w], small[16 * t + 2 * w + 1]
            upper = a >> np.uint64(8) & uppers[0]
            upper |= (z >> np.uint64(9) & uppers[1]) | (z >> np.uint64(5) & uppers[2])
            codes[strip, t, 0, row, w] = _joined(a & _LANES[0])
            codes[strip, t, 1, row, w] = _joined(z & _LANES[0])
            codes[strip, t, 2, row, w] = _joined(upper)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _note_strays(row: Any, small: Any, tile_row: int, places: Any, values: Any, used: int) -> int:
    """Add a row's strays to its strip's; how many there are now."""
    for first in range(0, row.shape[0], 64):
        some = np.uint16(0)
        for c in range(first, first + 64):
            some += np.uint16((small[c] == np.uint16(0)) and (row[c] & np.uint16(0x7FFF) != np.uint16(0)))
        for c in range(first, first + 64 if some > 0 else first):
            if small[c] == np.uint16(0) and row[c] & np.uint16(0x7FFF) != np.uint16(0):
                places[used] = tile_row << 16 | c
                values[used] = np.int32(np.int16(row[c])) << np.int32(16)
                used += 1
    return used


def _pack_loop(first_row: int, words: Any, codes: Any, scales: Any, places: Any, values: Any) -> bool:
    """words (N, C) into rows from `first_row` on of the matrix, strays' values as bits; whether there was
    room for those."""
    columns, used = words.shape[1], 0
    small = np.zeros(columns, np.uint16)
    for n in range(words.shape[0]):
        row, r = words[n], first_row + n
        strip, tile_row = r // 16, r % 16
        if tile_row == 0:
            used = 0
        top = _top_of(row)
        strays = _code(row, top, small)
        if strays * _FEW > columns:
            top = _best_top(row)
            strays = _code(row, top, small)
        if used + strays > places.shape[1]:
            return False
        scales[r] = 2.0 ** (top - 127)
        if strays > 0:
            used = _note_strays(row, small, tile_row, places[strip], values[strip], used)
        _tile_row(small.view(np.uint64), codes, strip, tile_row)
        if tile_row == 15:
            for s in range(used, places.shape[1]):
                places[strip, s], values[strip, s] = -1, 0  # nowhere
    return True


def _unpack_loop(codes: Any, scales: Any, places: Any, values: Any, words: Any) -> None:
    """All of a matrix, its scales and strays as bits, into words (R, C)."""
    for r in range(words.shape[0]):
        strip, tile_row = r // 16, r % 16
        base = (scales[r] >> np.int32(23) & np.int32(255)) - np.int32(15)
        for t in range(words.shape[1] // 64):
            for w in range(8):
                for b in range(4):
                    upper = np.int32(codes[strip, t, 2, tile_row, 4 * w + b])
                    a = np.int32(codes[strip, t, 0, tile_row, 4 * w + b]) | (upper & 0x87) << 8
                    z = np.int32(codes[strip, t, 1, tile_row, 4 * w + b])
                    z |= (upper & 0x40) << 9 | (upper & 0x38) << 5
                    # 0 has no exponent to be raised
                    at = 64 * t + 8 * w + b
                    words[r, at] = a + (base << 7 if a & 0x780 else 0)
                    words[r, at + 4] = z + (base << 7 if z & 0x780 else 0)
    for strip in range(places.shape[0]):
        for s in range(places.shape[1]):
            place = places[strip, s]
            if place < 0:
                break
            words[16 * strip + (place >> 16), place & 0xFFFF] = values[strip, s] >> 16


pack_rows = compile_loop(
    _pack_loop,
    "boolean(int64, uint16[:,::1], uint32[:,:,:,:,::1], float32[::1], int32[:,::1], int32[:,::1])",
    "packing weights",
    nogil=True,
)

unpack_rows = compile_loop(
    _unpack_loop,
    "void(uint8[:,:,:,:,::1], int32[::1], int32[:,::1], int32[:,::1], int16[:,::1])",
    "unpacking weights",
    nogil=True,
)
