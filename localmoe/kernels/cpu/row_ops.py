"""Small operations on a few float32 rows, for which PyTorch needs several: RMS norms, and the weighted sum of
a token's experts. Compiled, run by the caller alone; a row's bits do not depend on the others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from localmoe.kernels.cpu.atoms import compiled, words_at
from localmoe.kernels.cpu.worker import CompiledEntry

# a sum may be cut into vectors, always in the same way
_FAST = {"reassoc", "contract"}


@njit(nogil=True, fastmath=_FAST, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _squares(row: Any) -> Any:
    found = np.float32(0)
    for number in row:
        found += number * number
    return found


@compiled
def _norm(x_at: int, weight_at: int, out_at: int, rows: int, width: int, eps: float, offset: float) -> int:
    like = np.float32(0)
    x = carray(words_at(x_at, like), (rows, width))
    out = carray(words_at(out_at, like), (rows, width))
    weight = carray(words_at(weight_at, like), (width,))
    for t in range(rows):
        mean = np.float32(_squares(x[t]) / np.float32(width))
        factor = np.float32(1) / np.float32(math.sqrt(mean + np.float32(eps)))
        for j in range(width):
            out[t, j] = x[t, j] * factor * (weight[j] + np.float32(offset))
    return 0


@compiled
def _combine(
    out_at: int, index_at: int, weights_at: int, into_at: int, rows: int, top_k: int, width: int
) -> int:
    like = np.float32(0)
    out = carray(words_at(out_at, like), (rows, top_k, width))
    index = carray(words_at(index_at, np.int64(0)), (rows, top_k))
    weights = carray(words_at(weights_at, like), (rows, top_k))
    into = carray(words_at(into_at, like), (rows, width))
    for t in range(rows):
        for j in range(width):
            into[t, j] = like
        last = -1
        for _ in range(top_k):
            k = -1  # of the least expert after the last one
            for i in range(top_k):
                if index[t, i] > last and (k < 0 or index[t, i] < index[t, k]):
                    k = i
            if k < 0:
                break
            last = index[t, k]
            for j in range(width):
                into[t, j] += out[t, k, j] * weights[t, k]
    return 0


def _norm_entry(sources: int, *, kept: bool) -> Any:
    """See CompiledEntry. numba finds what it kept by a function's own text, so each has its own."""

    @njit(nogil=True, cache=kept)
    def norm(*arguments: Any) -> int:
        result: int = _norm(*arguments) if sources >= 0 else 0
        return result

    return norm


def _combine_entry(sources: int, *, kept: bool) -> Any:
    """See CompiledEntry."""

    @njit(nogil=True, cache=kept)
    def combine(*arguments: Any) -> int:
        result: int = _combine(*arguments) if sources >= 0 else 0
        return result

    return combine


_run_norm, _run_combine = CompiledEntry(_norm_entry), CompiledEntry(_combine_entry)


def compile_row_ops() -> None:
    """Before they are needed: a second the first time; later they are read from numba's cache on disk."""
    one = torch.ones(1, 1, dtype=torch.float32)
    rms_norm(one, weight=one[0], eps=1.0)
    combine_rows(one[None], one.long(), one)


def rms_norm(x: Tensor, *, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), of float32 (..., N) and (N,)."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    _run_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps, offset)
    return out


def combine_rows(expert_out: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The same bits as kernels.experts.combine in float32, of experts that differ:
    (T, K, H), (T, K), (T, K) -> (T, H)."""
    rows, top_k, width = expert_out.shape
    out, index, weights = expert_out.contiguous(), top_k_index.contiguous(), top_k_weights.contiguous()
    assert out.dtype == weights.dtype == torch.float32 and index.dtype == torch.int64
    into = torch.empty(rows, width, dtype=torch.float32)
    _run_combine(
        out.data_ptr(), index.data_ptr(), weights.data_ptr(), into.data_ptr(), rows, top_k, width
    )  # fmt: skip
    return into
