"""Decoding of MXFP4 straight into its place, in one thread and outside Python's lock, so that readers of
weights share the work. Importing this compiles it, which takes a second the first time.

Letters: N output features, K input features in G groups of 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localmoe.kernels.compiled_loops import compile_loop

_TILE = 64  # rows that are turned at once: 128 bytes side by side


def _rows_loop(blocks: Any, scales: Any, pairs: Any, out: Any) -> None:
    """bfloat16 (N, K) as bits, of blocks (N, G, 16) and scales (N, G). pairs: see mxfp4."""
    for n in range(blocks.shape[0]):
        for g in range(blocks.shape[1]):
            first = np.int64(scales[n, g]) << 8
            for b in range(16):
                pair = pairs[first | blocks[n, g, b]]
                out[n, 32 * g + 2 * b] = np.int16(pair & 0xFFFF)
                out[n, 32 * g + 2 * b + 1] = np.int16(pair >> 16)


def _columns_loop(blocks: Any, scales: Any, pairs: Any, out: Any) -> None:
    """The same into (K, N)."""
    turned = np.empty((32, _TILE), np.int16)
    for start in range(0, blocks.shape[0], _TILE):
        count = min(_TILE, blocks.shape[0] - start)
        for g in range(blocks.shape[1]):
            for n in range(count):
                first = np.int64(scales[start + n, g]) << 8
                for b in range(16):
                    pair = pairs[first | blocks[start + n, g, b]]
                    turned[2 * b, n] = np.int16(pair & 0xFFFF)
                    turned[2 * b + 1, n] = np.int16(pair >> 16)
            for k in range(32):
                for n in range(count):
                    out[32 * g + k, start + n] = turned[k, n]


_SIGNATURE = "void(uint8[:,:,::1], uint8[:,::1], int32[::1], int16[:,:])"
fill_rows = compile_loop(_rows_loop, _SIGNATURE, "reading MXFP4", nogil=True)
fill_columns = compile_loop(_columns_loop, _SIGNATURE, "reading MXFP4", nogil=True)
