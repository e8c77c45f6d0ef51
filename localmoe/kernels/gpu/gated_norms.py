"""Norms behind recurrent layers, with a gate: behind the norm of a head (kernels.delta_rule), or before that
of a group of channels (kernels.state_space). A row's bits do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import next_power_of_2

_BLOCK = 4096  # channels of a group that are in registers at once


@without_modes
def gated_norm(
    x: Tensor, gate: Tensor, place: tuple[int, int], group: int, weight: Tensor, eps: float,
    *, sigmoid: bool = False,
) -> Tensor:  # fmt: skip
    """As kernels.delta_rule.reference_gated_norm.

    Args:
        x: (T, heads, D), contiguous.
        gate: (T, .), whose element d of head h = g * group + j lies at offset + g * stride + j * D + d.
        place: offset and stride. weight: (D,). sigmoid: see there.

    Returns:
        (T, heads * D).
    """
    rows, heads, size = x.shape
    assert x.is_contiguous() and gate.stride(-1) == 1 and weight.shape == (size,)
    out = torch.empty(rows, heads * size, dtype=x.dtype, device=x.device)
    launch(
        _gated_norm, (rows, heads), x, gate, weight, out, eps, gate.stride(0),
        OFFSET=place[0], STRIDE=place[1], GROUP=group, D=size, SIGMOID=sigmoid,
        **after_previous(x.device), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["gate_row"])
def _gated_norm(
    x, gate, weight, out, eps, gate_row,
    OFFSET: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SIGMOID: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    dtype: tl.constexpr = x.dtype.element_ty
    at = (row * tl.num_programs(1) + head) * D + d
    value = tl.load(x + at).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    if not SIGMOID:
        normed = normed.to(dtype).to(tl.float32)
    scaled = normed * tl.load(weight + d).to(tl.float32)
    z = tl.load(gate + row * gate_row + OFFSET + (head // GROUP) * STRIDE + (head % GROUP) * D + d)
    z = z.to(tl.float32)
    if SIGMOID:
        scaled *= tl.sigmoid(z)
    else:
        scaled = scaled.to(dtype).to(tl.float32) * (z * tl.sigmoid(z))
    tl.store(out + at, scaled.to(dtype))


@without_modes
def group_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """As kernels.state_space.reference_group_norm.

    Args:
        x: (T, D), contiguous. gate: (T, D), its rows contiguous. weight: (D,).

    Returns:
        (T, D).
    """
    rows, channels = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1 and weight.shape == (channels,)
    assert gate.shape == x.shape and channels % groups == 0
    out = torch.empty_like(x)
    size = channels // groups
    block = min(_BLOCK, next_power_of_2(size))
    launch(
        _group_norm, (rows, groups), x, gate, weight, out, eps, gate.stride(0),
        SIZE=size, BLOCK=block, GROUPS=groups,
        **after_previous(x.device), num_warps=4 if size <= 2048 else 16, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["gate_row"])
def _group_norm(
    x, gate, weight, out, eps, gate_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    dtype: tl.constexpr = x.dtype.element_ty
    x += (row * GROUPS + group) * SIZE
    out += (row * GROUPS + group) * SIZE
    gate += row * gate_row + group * SIZE
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in tl.static_range(0, SIZE, BLOCK):
        value = _gated(x, gate, begin + tl.arange(0, BLOCK), SIZE)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    for begin in tl.static_range(0, SIZE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        normed = (_gated(x, gate, at, SIZE) * scale).to(dtype).to(tl.float32)
        factor = tl.load(weight + group * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
        tl.store(out + at, (normed * factor).to(dtype), mask=at < SIZE)


@triton.jit
def _gated(x, gate, at, SIZE: tl.constexpr):
    """x * silu(gate) of some channels; zero beyond the group."""
    z = tl.load(gate + at, mask=at < SIZE, other=0.0).to(tl.float32)
    return tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32) * (z * tl.sigmoid(z))
