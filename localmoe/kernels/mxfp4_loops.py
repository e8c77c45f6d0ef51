"""Putting MXFP4 and NVFP4 into tiles (kernels.mxfp4_tiles), in one thread and outside Python's lock, so that
readers of weights share the work. Importing this compiles it, which takes a second the first time.

Letters: N rows, C columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localmoe.kernels.compiled_loops import compile_loop


def _tiles_loop(codes: Any, scales: Any, tiles: Any, words: Any) -> None:
    """codes (N, C / 2), scales (N, G) -> tiles (N / 16, C / 64, 16, 32), words (N / 16, .., 16, 4)."""
    for n in range(codes.shape[0]):
        strip, row = n // 16, n % 16
        for t in range(tiles.shape[1]):
            for w in range(8):
                first = 32 * t + 4 * w
                a, b, c, d = codes[n, first], codes[n, first + 1], codes[n, first + 2], codes[n, first + 3]
                tiles[strip, t, row, 4 * w] = np.uint8(a & 15 | b << 4)
                tiles[strip, t, row, 4 * w + 1] = np.uint8(c & 15 | d << 4)
                tiles[strip, t, row, 4 * w + 2] = np.uint8(a >> 4 | b & 240)
                tiles[strip, t, row, 4 * w + 3] = np.uint8(c >> 4 | d & 240)
        for g in range(scales.shape[1]):
            words[strip, g // 4, row, g % 4] = scales[n, g]


put_tiles = compile_loop(
    _tiles_loop,
    "void(uint8[:,::1], uint8[:,::1], uint8[:,:,:,::1], uint8[:,:,:,:])",
    "reading MXFP4",
    nogil=True,
)
