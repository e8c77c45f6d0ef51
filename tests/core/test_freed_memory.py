"""What is freed goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil
import pytest
import torch

from localmoe.core.freed_memory import return_freed_memory

PIECES, PIECE_BYTES = 1000, 100_000  # such as the C library cuts from memory that it keeps


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="this C library is not glibc",
)
def test_pieces_that_were_freed_between_others_are_the_systems_again() -> None:
    pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(PIECES)]
    kept = [piece.clone() for piece in pieces[::100]]  # behind and between the others
    gc.collect()
    held = psutil.Process().memory_info().rss
    del pieces
    return_freed_memory()
    assert held - psutil.Process().memory_info().rss > PIECES * PIECE_BYTES // 2
    assert all(bool((piece == 1).all()) for piece in kept)
