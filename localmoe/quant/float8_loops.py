"""Decoding of eight-bit floats straight into their place, in one thread and outside Python's lock, so that
readers of weights share the work. Importing this compiles it, which takes a second the first time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localmoe.kernels.compiled_loops import compile_loop

_UP = np.float32(2.0**120)


def _rows_loop(
    codes: Any, scales: Any, first: int, columns: int, rows: int, block_rows: int, block_columns: int,
    out: Any,
) -> None:  # fmt: skip
    """bfloat16 (n,) as bits; see float8.decode_into. A code's exponent and mantissa, put where those of a
    32-bit float end and begin, are its value times 2^-120."""
    product = np.empty(block_columns, np.float32)
    bits = product.view(np.uint32)
    done = 0
    while done < len(codes):
        line, column = (first + done) // columns, (first + done) % columns
        scale = scales[line // rows, line % rows // block_rows, column // block_columns]
        if np.isnan(scale):
            scale = np.float32(np.nan)  # of the bits of others rounding would make zeros
        end = min((column // block_columns + 1) * block_columns, columns)
        count = min(end - column, len(codes) - done)
        part, to = codes[done : done + count], out[done : done + count]
        for i in range(count):
            code = np.uint32(part[i])
            none = np.uint32(0x7F800000) if code & np.uint32(127) == np.uint32(127) else np.uint32(0)
            bits[i] = (
                (code & np.uint32(128)) << np.uint32(24) | (code & np.uint32(127)) << np.uint32(20) | none
            )
        for i in range(count):
            product[i] = product[i] * _UP * scale
        for i in range(count):
            odd = bits[i] >> np.uint32(16) & np.uint32(1)
            to[i] = np.int16(bits[i] + np.uint32(0x7FFF) + odd >> np.uint32(16))
        done += count


decode_rows = compile_loop(
    _rows_loop,
    "void(uint8[::1], float32[:,:,::1], int64, int64, int64, int64, int64, int16[::1])",
    "reading FP8",
    nogil=True,
)
