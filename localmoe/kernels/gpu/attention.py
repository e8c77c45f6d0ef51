"""Causal attention of a few or many rows over a KV cache whose live length is read on the device. Decides how
the work is cut, and no masking rule beyond causality and a window.

The cache is read in chunks at multiples of a fixed number of positions, and chunks are merged in order into
sections of SECTION chunks, sections in order. Few rows: one program a chunk writes a partial result; where
those would be too many, one program a section does; and a second kernel merges them in order (flash decoding,
Dao et al. 2023). Many rows: one program loops over all. All do the same arithmetic in the same order, so a
row's bits depend on neither the other rows, nor on the way, nor on the length that the launch was sized for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.kernels.gpu.attention_kernels import attend_loop, attend_split
from localmoe.kernels.gpu.attention_merge import merge_parts
from localmoe.kernels.gpu.configs import shared_bytes
from localmoe.kernels.gpu.dependent import after_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2

CHUNK = 128  # positions; fewer for heads wider than 128, to fit a chunk's keys and values on chip
WIDEST_HEAD = 512
SECTION = 4  # chunks
SPLIT_ROWS = 80  # most rows for which a program a part pays
# most bytes of partial results, beyond which those of chunks cost more traffic than they save time
CHUNK_PARTIAL_BYTES, SECTION_PARTIAL_BYTES = 20 << 20, 32 << 20
_SPLIT_TILE, _LOOP_TILE = 16, 32  # rows of a tile: tokens x query heads of one KV head
_TWO_LOOPS_BYTES = 170 << 10  # of shared memory, with heads of 128 or 256
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a launch is told beside its tensors; see `attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def factors(self) -> tuple[float, float]:
        """(factor on a product q k, factor on the tanh) that give scores in units of log2."""
        if self.softcap is None:
            return self.scale * _LOG2_E, 0.0
        return self.scale / self.softcap, self.softcap * _LOG2_E


@without_modes
def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start: Tensor,
    *,
    scale: float,
    max_length: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    until: Tensor | None = None,
) -> Tensor:
    """Row i, at position start + i, over positions up to its own; semantics of dense.reference_attention.

    Args:
        query: (1, heads, T, D), bfloat16 or float16, any strides; heads a multiple of kv_heads.
        key_cache: (1, kv_heads, C, D). value_cache: (1, kv_heads, C, Dv). D and Dv up to WIDEST_HEAD.
        start: int64 (1,) on the device.
        max_length: at least start + T; sizes the grid. What lies beyond start + T costs little. At most C,
            unless the cache is a ring of rows that see `window` positions: position p lies at p % C then.
        window: positions that a row sees, its own among them; None for all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (heads,) logit of a further position of value zero.
        until: int32 (T,), with a window: up to which row each sees, itself or one of those behind it. None:
            itself.

    Returns:
        (T, heads, Dv), contiguous, of query's dtype.
    """
    _, heads, rows, dim = query.shape
    value_dim = value_cache.shape[3]
    assert query.dtype == key_cache.dtype == value_cache.dtype, f"{query.dtype}, {key_cache.dtype}"
    assert heads % key_cache.shape[1] == 0 and max(dim, value_dim) <= WIDEST_HEAD, f"{heads} heads of {dim}"
    assert rows <= max_length, f"{rows} rows in {max_length} positions"
    assert window is None or window > 0, f"window {window}"
    _check_capacity(key_cache.shape[2], rows, max_length, window)
    scoring = Scoring(scale, window, softcap, sinks)
    chunk = chunk_positions(dim, value_dim)
    out = torch.empty((rows, heads, value_dim), dtype=query.dtype, device=query.device)
    if until is not None:
        assert window is not None and until.dtype == torch.int32 and until.shape == (rows,), f"{until.shape}"
        _loop(query, key_cache, value_cache, start, out, scoring, until)
        return out
    for chunks, most_bytes in ((1, CHUNK_PARTIAL_BYTES), (SECTION, SECTION_PARTIAL_BYTES)):
        slots = num_slots(rows, max_length, window, chunks * chunk)
        partial_bytes = 4 * rows * heads * slots * (value_dim + 2)
        if rows <= SPLIT_ROWS and partial_bytes <= most_bytes:
            _split(query, key_cache, value_cache, start, out, scoring, slots, chunks)
            return out
    _loop(query, key_cache, value_cache, start, out, scoring)
    return out


def _check_capacity(capacity: int, rows: int, max_length: int, window: int | None) -> None:
    """Whether all that rows see is there."""
    if max_length > capacity:
        assert window is not None, f"{max_length} of {capacity} positions"
        assert capacity % CHUNK == 0 and window + rows <= capacity, f"{rows} rows in a ring of {capacity}"


def chunk_positions(dim: int, value_dim: int) -> int:
    """Cache positions a chunk, which a head's width alone decides."""
    widest = max(dim, value_dim)
    return CHUNK if widest <= 128 else CHUNK // 2 if widest <= 256 else CHUNK // 4


def num_slots(rows: int, max_length: int, window: int | None, part: int) -> int:
    """Most parts of `part` positions that `rows` consecutive rows can see within max_length positions."""
    slots = -(-max_length // part)
    return slots if window is None else min(slots, -(-(window + rows - 2) // part) + 1)


def partial_results(rows: int, slots: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what merge_parts merges."""
    peaks, totals = torch.empty((2, rows, slots), dtype=torch.float32, device=device)
    return peaks, totals, torch.empty((rows, slots, dim), dtype=torch.float32, device=device)


def _split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    out: Tensor,
    scoring: Scoring,
    slots: int,
    chunks: int,
) -> None:
    """chunks: that one program reads, 1 or SECTION."""
    _, heads, rows, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    group, chunk = heads // kv_heads, chunk_positions(dim, value_dim)
    parts = partial_results(rows * heads, slots, value_dim, query.device)
    tile, warps = (_SPLIT_TILE, 4) if chunks == 1 else _section_tile(dim, value_dim)
    launch(
        attend_split, (cdiv(rows * group, tile), slots, kv_heads),
        query, key, value, start, *parts, rows, heads, group, slots, key.shape[2],
        *_strides(query, key, value), *scoring.factors(), scoring.window or 0,
        D=dim, DV=value_dim, D_PAD=_padded(dim), DV_PAD=next_power_of_2(value_dim),
        CHUNK=chunk, CHUNKS=chunks, SOFTCAP=scoring.softcap is not None,
        WINDOWED=scoring.window is not None, BM=tile, **after_previous(query.device),
        num_warps=warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    merge_parts(
        parts, start, scoring.sinks, out,
        heads=heads, part=chunk * chunks, group=SECTION // chunks, window=scoring.window,
    )  # fmt: skip


def _loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    out: Tensor,
    scoring: Scoring,
    until: Tensor | None = None,
) -> None:
    _, heads, rows, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    group, warps = heads // kv_heads, _loop_warps(max(dim, value_dim), query.device)
    launch(
        attend_loop, (kv_heads, cdiv(rows * group, _LOOP_TILE)),
        query, key, value, start, until, scoring.sinks, out, rows, heads, group, key.shape[2],
        *_strides(query, key, value), *scoring.factors(), scoring.window or 0,
        D=dim, DV=value_dim, D_PAD=_padded(dim), DV_PAD=next_power_of_2(value_dim),
        CHUNK=chunk_positions(dim, value_dim), CHUNKS=SECTION, SOFTCAP=scoring.softcap is not None,
        WINDOWED=scoring.window is not None, BM=_LOOP_TILE, **after_previous(query.device),
        num_warps=warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def _section_tile(dim: int, value_dim: int) -> tuple[int, int]:
    """Rows, and warps, of a program that reads a section."""
    return (_LOOP_TILE if max(dim, value_dim) <= 128 else _LOOP_TILE // 2), 8


def _loop_warps(widest: int, device: torch.device) -> int:
    """Of a program that reads all sections: as many as there are side by side on a multiprocessor make up
    for what each waits for, but registers hold a tile's sums of two programs of four warps at most."""
    if widest <= 64:
        return 4
    return 4 if widest <= 256 and shared_bytes(device) >= _TWO_LOOPS_BYTES else 8


def _padded(dim: int) -> int:
    """Columns of a tile of queries and keys: products on a GPU sum over 16 at least."""
    return max(16, next_power_of_2(dim))


def _strides(*tensors: Tensor) -> Sequence[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[1:]]
