"""Rotary embedding of queries and keys, and writing keys and values into the cache. Decides nothing."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2

_HEADS_A_PROGRAM = 8
# what is turned together, and where it is put: the halves of a head (Llama); neighbours, to the halves
# (DeepSeek-V3); neighbours, where they were (DeepSeek-V2)
RopeForm = Literal["halves", "pairs to halves", "pairs"]


@without_modes
def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: RopeForm = "halves"
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, bit for bit as PyTorch does it by steps.

    Args:
        q: (1, heads, T, D), k: (1, kv_heads, T, D), bfloat16 or float16, any strides.
        cos, sin: (1, T, R) of their dtype, R even and at most D; what lies beyond R passes through. Of pairs,
            the first half of them counts; (1, T, R / 2) in float32 are such halves, and nothing is rounded
            before the end.

    Returns:
        (q', k') of the same shapes, contiguous.
    """
    heads, rows = q.shape[1:3]
    kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    blocks = cdiv(heads, _HEADS_A_PROGRAM)
    grid = rows, blocks + cdiv(kv_heads, _HEADS_A_PROGRAM)
    _launch(q, k, cos, sin, q_out, k_out, grid, heads, kv_heads, blocks, form)
    return q_out, k_out


@without_modes
def rotate(x: Tensor, cos: Tensor, sin: Tensor, form: RopeForm = "halves") -> Tensor:
    """As apply_rope, of queries or keys alone."""
    heads, rows = x.shape[1:3]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = cdiv(heads, _HEADS_A_PROGRAM)
    _launch(x, x, cos, sin, out, out, (rows, blocks), heads, 0, blocks, form)
    return out


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, grid: tuple[int, int],
    heads: int, kv_heads: int, q_blocks: int, form: RopeForm,
) -> None:  # fmt: skip
    rows, dim = q.shape[2:]
    wide = cos.dtype == torch.float32
    assert q.dtype == k.dtype and cos.dtype == sin.dtype, f"q {q.dtype}, k {k.dtype}, cos {cos.dtype}"
    assert cos.dtype == q.dtype or (wide and form != "halves"), f"q {q.dtype}, cos {cos.dtype}, {form}"
    rotated = cos.shape[-1] * (2 if wide else 1)
    assert rotated % 2 == 0 and rotated <= dim, f"{rotated} of {dim} are rotated"
    launch(
        _rope, grid,
        q, k, cos, sin, q_out, k_out, rows, heads, kv_heads, q_blocks,
        *q.stride()[1:], *k.stride()[1:], *cos.stride()[1:], *sin.stride()[1:],
        DIM=dim, HALF=rotated // 2, HALF_PAD=next_power_of_2(rotated // 2),
        REST_PAD=next_power_of_2(dim - rotated) if rotated < dim else 0,
        HEADS=_HEADS_A_PROGRAM, FROM_PAIRS=form != "halves", TO_PAIRS=form == "pairs", ROUND=not wide,
        **after_previous(q.device), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@without_modes
def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, start: Tensor, *, ring: bool = False
) -> None:
    """Write rows to positions start, start + 1, ... of the caches; positions past their end are dropped.

    Args:
        key: (1, kv_heads, T, D), value: (1, kv_heads, T, Dv), any strides.
        key_cache: (1, kv_heads, C, D), value_cache: (1, kv_heads, C, Dv), of the same dtypes.
        start: int64 (1,) on the device.
        ring: nothing is dropped: position p lies at p % C.
    """
    kv_heads, rows, dim = key.shape[1:]
    value_dim = value.shape[3]
    assert key_cache.dtype == key.dtype and value_cache.dtype == value.dtype, "caches hold what is written"
    launch(
        _write_kv, (rows, kv_heads),
        key, value, key_cache, value_cache, start, key_cache.shape[2],
        *key.stride()[1:], *value.stride()[1:], *key_cache.stride()[1:], *value_cache.stride()[1:],
        D=dim, DV=value_dim, D_PAD=next_power_of_2(dim), DV_PAD=next_power_of_2(value_dim),
        RING=ring, **after_previous(key.device), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "heads", "kv_heads", "q_blocks"])
def _rope(
    q, k, cos, sin, q_out, k_out, rows, heads, kv_heads, q_blocks,
    q_head, q_row, q_col, k_head, k_row, k_col, cos_row, cos_col, sin_row, sin_col,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    HEADS: tl.constexpr, FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr, ROUND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos += row * cos_row
    sin += row * sin_row
    if block < q_blocks:
        _rotate_heads(
            q + row * q_row, cos, sin, q_out + row * DIM, block, heads, rows, q_head, q_col, cos_col, sin_col,
            DIM, HALF, HALF_PAD, REST_PAD, HEADS, FROM_PAIRS, TO_PAIRS, ROUND,
        )  # fmt: skip
    else:
        _rotate_heads(
            k + row * k_row, cos, sin, k_out + row * DIM, block - q_blocks, kv_heads, rows,
            k_head, k_col, cos_col, sin_col, DIM, HALF, HALF_PAD, REST_PAD, HEADS,
            FROM_PAIRS, TO_PAIRS, ROUND,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    x, cos, sin, out, block, heads, rows, x_head, x_col, cos_col, sin_col,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    HEADS: tl.constexpr, FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One token's heads: low' = low cos - high sin, high' = high cos + low sin, each product rounded."""
    dtype: tl.constexpr = x.dtype.element_ty
    head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    d = tl.arange(0, HALF_PAD)[None, :]
    inside = (head < heads) & (d < HALF)
    x_at = x + head * x_head
    out_at = out + head * rows * DIM
    low_at, high_at = _columns(d, HALF, FROM_PAIRS)
    low = tl.load(x_at + low_at * x_col, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_at + high_at * x_col, mask=inside, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + d * cos_col, mask=d < HALF, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + d * sin_col, mask=d < HALF, other=0.0).to(tl.float32)
    cos_high, sin_high = cos_low, sin_low
    if not FROM_PAIRS:
        cos_high = tl.load(cos + (HALF + d) * cos_col, mask=d < HALF, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + (HALF + d) * sin_col, mask=d < HALF, other=0.0).to(tl.float32)
    new_low = _rounded(low * cos_low, dtype, ROUND) - _rounded(high * sin_low, dtype, ROUND)
    new_high = _rounded(high * cos_high, dtype, ROUND) + _rounded(low * sin_high, dtype, ROUND)
    low_at, high_at = _columns(d, HALF, TO_PAIRS)
    tl.store(out_at + low_at, new_low.to(dtype), mask=inside)
    tl.store(out_at + high_at, new_high.to(dtype), mask=inside)
    if REST_PAD > 0:
        rest = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        beyond = (head < heads) & (rest < DIM)
        tl.store(out_at + rest, tl.load(x_at + rest * x_col, mask=beyond, other=0.0), mask=beyond)


@triton.jit
def _columns(d, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Of what is turned together."""
    low = 2 * d if PAIRS else d
    return low, (low + 1 if PAIRS else HALF + d)


@triton.jit
def _rounded(product, dtype: tl.constexpr, ROUND: tl.constexpr):
    return product.to(dtype).to(tl.float32) if ROUND else product


@triton.jit
def _write_kv(
    key, value, key_cache, value_cache, start, capacity,
    key_head, key_row, key_col, value_head, value_row, value_col,
    key_cache_head, key_cache_row, key_cache_col, value_cache_head, value_cache_row, value_cache_col,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, RING: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    position = tl.load(start) + row
    if RING:
        position = position % capacity
    fits = position < capacity
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    k = tl.load(key + head * key_head + row * key_row + d * key_col, mask=fits & (d < D), other=0.0)
    v = tl.load(
        value + head * value_head + row * value_row + dv * value_col, mask=fits & (dv < DV), other=0.0
    )
    k_at = key_cache + head * key_cache_head + position * key_cache_row + d * key_cache_col
    v_at = value_cache + head * value_cache_head + position * value_cache_row + dv * value_cache_col
    tl.store(k_at, k, mask=fits & (d < D))
    tl.store(v_at, v, mask=fits & (dv < DV))
