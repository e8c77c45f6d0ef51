"""What the CPU lane's threads are told of an attention: cuts it into jobs, and describes each. Computes
nothing; see kernels.cpu.attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.kernels.attention import KV_BLOCK
from localmoe.kernels.cpu import control

MOST_SHARING = control.ATTEND_ROWS  # heads a KV head
_MOST_NUMBERS = 1 << 24  # of partial results at once, float32

assert KV_BLOCK == control.ATTEND_POSITIONS, "the cache hands out whole blocks"


class LaneAttention:
    """The words that describe the job at hand."""

    def __init__(self) -> None:
        self.words: NDArray[np.int64] = np.zeros(control.ATTEND_WORDS, dtype=np.int64)
        self.factors: NDArray[np.float32] = np.zeros(2, dtype=np.float32)  # of scores, soft cap or 0

    def run(
        self,
        post: Callable[[int, int, int], None],
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Have it computed; arguments and result as kernels.attention.blocked_attention, all float32.

        Args:
            post: has a job done, of so many blocks, tokens and bytes.
        """
        heads, tokens, width = query.shape
        kv_heads, length, value_width = values.shape
        group, blocks = heads // kv_heads, length // KV_BLOCK
        assert 0 < group <= MOST_SHARING, "more are computed elsewhere"
        assert keys.stride()[1:] == (width, 1) and values.stride()[1:] == (value_width, 1), "of the cache"
        if query.stride(2) != 1 or query.stride(0) % width or query.stride(1) % width:
            query = query.contiguous()
        mask = mask.contiguous()
        out = torch.empty(tokens, heads, value_width, dtype=torch.float32)
        room = _MOST_NUMBERS // (heads * blocks * value_width)
        most = max(1, min(tokens, control.ATTEND_ROWS // group, room))
        parts = torch.empty(heads * blocks * most, value_width, dtype=torch.float32)
        tops, sums = torch.empty(2, heads * blocks * most, dtype=torch.float32)
        tallies = np.zeros(kv_heads, dtype=np.int64)
        sinks = None if sinks is None else sinks.float().contiguous()
        self.factors[:] = scale, softcap or 0.0
        per_head = query.stride(0)
        for first in range(0, tokens, most):
            count = min(most, tokens - first)
            places = _places(group, count, per_head // width, query.stride(1) // width)
            tallies[:] = 0
            self.words[:] = (
                query.data_ptr() + 4 * first * query.stride(1), keys.data_ptr(), values.data_ptr(),
                mask.data_ptr() + first * mask.stride(1), out.data_ptr() + 4 * first * heads * value_width,
                parts.data_ptr(), tops.data_ptr(), sums.data_ptr(), places.ctypes.data, tallies.ctypes.data,
                0 if sinks is None else sinks.data_ptr(), 4 * per_head, 4 * keys.stride(0),
                4 * values.stride(0), mask.stride(0) if len(mask) > 1 else 0, mask.stride(1), group, heads,
                blocks, width, value_width,
            )  # fmt: skip
            post(kv_heads * blocks, count, 4 * kv_heads * length * (width + value_width))
        return out


@lru_cache(maxsize=64)
def _places(group: int, tokens: int, per_head: int, per_token: int) -> NDArray[np.int32]:
    """Rows of queries that share a KV head, in units of a query."""
    heads, rows = np.arange(group)[:, None] * per_head, np.arange(tokens) * per_token
    return np.ascontiguousarray((heads + rows).ravel(), dtype=np.int32)
