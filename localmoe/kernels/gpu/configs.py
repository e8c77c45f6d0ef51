"""Block sizes of the dense kernels by shape, row count and number of multiprocessors. Launches nothing.

The depth of a tile depends on the weight's shape alone, never on the rows of a call, except that the tall
tiles of long prompts are less deep: the tensor-core step is 16 deep and steps are chained in order, so they
give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

_PREFILL_ROWS = 128  # from more rows on, a product is bound by arithmetic and not by its weights
_STAGE_BYTES = 96 * 1024  # shared memory of all stages; every block must fit into 99 KiB of consumer GPUs
_MAX_STAGES = 5
_DEFAULT_SMS = 32  # where there is no CUDA device, e.g. in Triton's interpreter
_DEFAULT_SHARED_BYTES = 100 << 10


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Blocks of a product (T, K) x (N, K): rows, columns, depth of a tile, warps, stages of its pipeline."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Blocks of a one-row product: columns and depth of a tile, warps."""

    block_n: int
    block_k: int
    warps: int


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return _DEFAULT_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor of a CUDA device."""
    if device.type != "cuda":
        return _DEFAULT_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@cache
def tile_config(columns: int, depth: int, rows: int, num_sms: int, matrices: int = 1) -> TileConfig:
    """Blocks of a product of `rows` rows with `matrices` weights of (columns, depth), 16-bit.

    A step is bound by reading weights: at least two programs a multiprocessor where the columns allow, and as
    many loads in flight as shared memory holds. Two warps a narrow tile, since each warp reads all of x.
    """
    block_k = tile_depth(depth, wide=columns >= 128 * num_sms)
    if rows > _PREFILL_ROWS:
        # Two warps keep 64 rows on mma.m16n8k16: four would make Triton choose wgmma on sm_90, another order.
        return TileConfig(64, 128 // matrices, min(block_k, 64), 2, 3)
    block_m = 16 if rows <= 16 else 32
    widths = (64, 32, 16) if matrices == 1 and block_k <= 128 else (32, 16)
    block_n = next((width for width in widths if columns >= 2 * num_sms * width), 16)
    stage_bytes = 2 * block_k * (block_m + matrices * block_n)
    stages = max(2, min(_MAX_STAGES, _STAGE_BYTES // stage_bytes))
    return TileConfig(block_m, block_n, block_k, 2 if block_m * block_n * matrices <= 256 else 4, stages)


def head_tile_config(depth: int, rows: int, *, columns_together: bool) -> TileConfig:
    """Blocks of a product with each head's own weight, 16-bit: heads make programs enough.

    Args:
        columns_together: whether the columns of a weight, rather than its depth, lie one after another; lines
            of memory are then as long as a tile is wide.
    """
    block_k = min(tile_depth(depth), 128)
    block_m = 16 if rows <= 16 else 32
    block_n = 16 if rows <= 16 and not columns_together else 64
    stages = max(2, min(_MAX_STAGES, _STAGE_BYTES // (2 * block_k * (block_m + block_n))))
    return TileConfig(block_m, block_n, block_k, 2 if block_n == 16 else 4, stages)


def tile_depth(depth: int, *, wide: bool = False) -> int:
    """BLOCK_K of a weight: the largest of 64..256 (128 if wide) that divides its depth, else one that is
    masked at the end, but at most half the depth.

    A loop of one turn would let the compiler start the sum from the bias; all row counts take two or none.
    """
    most = min(128 if wide else 256, depth // 2)
    fitting = [block for block in (256, 128, 64) if block <= most and depth % block == 0]
    return fitting[0] if fitting else next((block for block in (64, 32) if block <= most), 16)


@cache
def row_config(columns: int, depth: int, num_sms: int, matrices: int = 1) -> RowConfig:
    """Blocks of a one-row product: about 8 KiB of weights a program, and four programs a multiprocessor."""
    block_k = min((2048, 1024), key=lambda block: (-(-depth // block) * block, -block))
    block_n = 8
    while block_n > 1 and (block_n * depth * matrices > 8192 or -(-columns // block_n) < 4 * num_sms):
        block_n //= 2
    return RowConfig(block_n, block_k, 4)
