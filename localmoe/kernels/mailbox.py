"""The memory through which a pass on the GPU hands a layer's experts to the CPU and takes the answers back. A
layout of bytes; neither Triton nor numba, no decisions.

One job at a time: the GPU writes activations and a list of experts, then the job's number to `posted`; the
CPU writes an output row a pair, then the number to `answered`. A negative `answered` says that nobody is
there. Beside that the GPU may say which expert the next job will likely ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LINE = 128  # bytes; what one side writes must not share a cache line with what the other one does
# the word `foretold` is after_job << 32 | layer << 16 | expert, so that it is written in one piece; an expert
# that no model has says that none is likely
LAYER_SHIFT, JOB_SHIFT, NOBODY = 16, 32, (1 << 16) - 1
HEAD_LAYER, HEAD_ENTRIES, HEAD_TOKENS = range(3)
EXPERT, BEGIN, END, SHARE = range(4)


@dataclass(frozen=True, slots=True)
class MailboxLayout:
    """Byte offsets for windows of `tokens` rows of `hidden` numbers of `x_bytes`, `top_k` experts a token and
    at most `entries` experts a job.

    Offsets: posted and answered int64; foretold int64, see LAYER_SHIFT; head int32 (3,); entries int32 (4,
    A): expert, range in `pairs`, inner columns that the CPU takes; pairs int32 (P,), token * K + k; x (T, H);
    out float32 (P, H), by pair.
    """

    tokens: int
    top_k: int
    entries: int
    hidden: int
    x_bytes: int = 2

    @property
    def num_pairs(self) -> int:
        """P, of all rows."""
        return self.tokens * self.top_k

    @property
    def posted(self) -> int:
        return 0

    @property
    def answered(self) -> int:
        return _LINE

    @property
    def head(self) -> int:
        return 2 * _LINE

    @property
    def foretold(self) -> int:
        return 3 * _LINE

    @property
    def entry(self) -> int:
        return 4 * _LINE

    @property
    def pairs(self) -> int:
        return _up(self.entry + 16 * self.entries)

    @property
    def x(self) -> int:
        return _up(self.pairs + 4 * self.num_pairs)

    @property
    def out(self) -> int:
        return _up(self.x + self.x_bytes * self.tokens * self.hidden)

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return _up(self.out + 4 * self.num_pairs * self.hidden)


class Mailbox:
    """The memory itself, pinned where a GPU is to reach it, as arrays for the CPU's side."""

    def __init__(self, layout: MailboxLayout, dtype: torch.dtype, *, pinned: bool) -> None:
        self.layout = layout
        self.memory: Tensor = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.head: NDArray[np.int32] = self._array(layout.head, (3,), np.int32)
        self.entries: NDArray[np.int32] = self._array(layout.entry, (4, layout.entries), np.int32)
        self.pairs: NDArray[np.int32] = self._array(layout.pairs, (layout.num_pairs,), np.int32)
        self.x: NDArray[Any] = self._array(layout.x, (layout.tokens, layout.hidden), word_type(dtype))
        self.out: NDArray[np.float32] = self._array(layout.out, (layout.num_pairs, layout.hidden), np.float32)
        self.posted: NDArray[np.int64] = self._array(layout.posted, (1,), np.int64)
        self.answered: NDArray[np.int64] = self._array(layout.answered, (1,), np.int64)
        self.foretold: NDArray[np.int64] = self._array(layout.foretold, (1,), np.int64)
        self.foretold[0] = NOBODY

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.memory.data_ptr()

    def _array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found: NDArray[Any] = self.memory.numpy()[offset : offset + num_bytes].view(dtype).reshape(shape)
        return found


def word_type(dtype: torch.dtype) -> Any:
    """What numba code sees floats as: 16-bit ones as integers (see kernels.cpu.atoms.value)."""
    return {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}[dtype]


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
