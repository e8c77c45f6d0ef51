"""The gated delta rule over the rows of a pass, and the gated norm behind it. See kernels.delta_rule for what
is computed, delta_places for where the state stands.

A program has some rows of one head's state in registers and goes through the tokens one by one, so that what
comes out of a row depends neither on how many there are in the pass, nor on where earlier passes were cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.delta_rule import DeltaShape
from localmoe.kernels.gpu.delta_memory import DeltaMemory
from localmoe.kernels.gpu.delta_places import FRESH, GOES_ON, KEPT, READ, REPLAY, WRITE
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch

_VALUES = 8  # rows of a head's state in one program: 8 x 128 float32 are a quarter of a warp's registers


def delta_rule(
    inputs: tuple[Tensor, Tensor, Tensor],
    shape: DeltaShape,
    memory: DeltaMemory,
    places: Tensor,
    live: Tensor,
    rows: int,
    kind: int,
) -> Tensor:
    """What comes out of a pass's rows, in which a layer's state moves on: to where a window begins, or to
    where a prompt ends; a draft's to behind its token.

    Args:
        inputs: of delta_inputs.
        live: int64 (1,), rows that count in a window. Others give zeros: what later layers make of padding
            has to be finite.

    Returns:
        (rows, value_heads, value_dim), in the dtype of `mixed`.
    """
    mixed, norms, rates = inputs
    out = torch.empty(rows, shape.value_heads, shape.value_dim, dtype=mixed.dtype, device=mixed.device)
    block = min(_VALUES, shape.value_dim)
    launch(
        _delta_rule, (shape.value_heads, shape.value_dim // block),
        mixed, norms, rates, memory.mixed, memory.norms, memory.rates,
        memory.state, memory.draft_state, memory.kept_state, places, live, out, rows,
        mixed.stride(0), norms.stride(0), rates.stride(0),
        memory.mixed.stride(0), memory.norms.stride(0), memory.rates.stride(0), shape.key_dim**-0.5,
        KEY_HEADS=shape.key_heads, GROUP=shape.group, DK=shape.key_dim, DV=shape.value_dim, BV=block,
        KIND=kind, **after_previous(mixed.device), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _delta_rule(
    mixed, norms, rates, log_mixed, log_norms, log_rates, state, draft_state, kept_state, places, live, out,
    rows,
    mixed_half, norms_half, rates_half, log_mixed_half, log_norms_half, log_rates_half, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    KIND: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    head = tl.program_id(0)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    at = head * DV * DK + v[:, None] * DK + tl.arange(0, DK)[None, :]
    read, replay = tl.load(places + READ), tl.load(places + REPLAY).to(tl.int32)
    fresh = tl.load(places + FRESH) != 0
    held = state
    if KIND == 2:
        goes_on = tl.load(places + GOES_ON) != 0
        held = tl.where(goes_on, draft_state, state)
        replay = tl.where(goes_on, 0, replay)
        fresh = fresh & (goes_on == 0)
    s = tl.load(held + at)
    s = tl.where(fresh, 0.0, s)
    for row in range(replay):
        s = _learn(
            s, row, log_mixed + read * log_mixed_half, log_norms + read * log_norms_half,
            log_rates + read * log_rates_half, head, v, KEY_HEADS, GROUP, DK, DV,
        )  # fmt: skip
    half = tl.load(places + WRITE) if KIND == 0 else 0
    count = rows
    if KIND == 0:
        count = tl.minimum(tl.load(live).to(tl.int32), rows)
        if (replay > 0) | fresh:
            tl.store(state + at, s)
    C: tl.constexpr = 2 * KEY_HEADS * DK + GROUP * KEY_HEADS * DV
    mixed += half * mixed_half
    norms += half * norms_half
    d = head // GROUP * DK + tl.arange(0, DK)
    kept = tl.load(places + KEPT) if KIND != 2 else -1
    for row in range(count):
        if row == kept:
            tl.store(kept_state + at, s)
        s = _learn(s, row, mixed, norms, rates + half * rates_half, head, v, KEY_HEADS, GROUP, DK, DV)
        q = tl.load(mixed + row * C + d).to(tl.float32)
        q *= tl.load(norms + row * 2 * KEY_HEADS + head // GROUP) * scale
        o = tl.sum(s * q[None, :], 1)
        tl.store(out + (row * KEY_HEADS * GROUP + head) * DV + v, o.to(out.dtype.element_ty))
    for row in range(count, rows):
        nothing = tl.zeros([BV], out.dtype.element_ty)
        tl.store(out + (row * KEY_HEADS * GROUP + head) * DV + v, nothing)
    if KIND == 1:
        tl.store(state + at, s)
    if KIND == 2:
        tl.store(draft_state + at, s)


@triton.jit
def _learn(
    s, row, mixed, norms, rates, head, v,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The state behind one row."""
    C: tl.constexpr = 2 * KEY_HEADS * DK + GROUP * KEY_HEADS * DV
    key_head = head // GROUP
    keys = mixed + row * C + (KEY_HEADS + key_head) * DK
    k = tl.load(keys + tl.arange(0, DK)).to(tl.float32)
    k *= tl.load(norms + row * 2 * KEY_HEADS + KEY_HEADS + key_head)
    value = tl.load(mixed + row * C + 2 * KEY_HEADS * DK + head * DV + v).to(tl.float32)
    rate = rates + row * 2 * KEY_HEADS * GROUP + head
    s = s * tl.load(rate)
    error = value - tl.sum(s * k[None, :], 1)
    return s + (error * tl.load(rate + KEY_HEADS * GROUP))[:, None] * k[None, :]


def gated_norm(
    x: Tensor, gate: Tensor, place: tuple[int, int], group: int, weight: Tensor, eps: float
) -> Tensor:
    """As kernels.delta_rule.reference_gated_norm.

    Args:
        x: (T, heads, D), contiguous.
        gate: (T, .), whose element d of head h = g * group + j lies at offset + g * stride + j * D + d.
        place: offset and stride. weight: (D,).

    Returns:
        (T, heads * D).
    """
    rows, heads, size = x.shape
    assert x.is_contiguous() and gate.stride(-1) == 1 and weight.shape == (size,)
    out = torch.empty(rows, heads * size, dtype=x.dtype, device=x.device)
    launch(
        _gated_norm, (rows, heads), x, gate, weight, out, eps, gate.stride(0),
        OFFSET=place[0], STRIDE=place[1], GROUP=group, D=size,
        **after_previous(x.device), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["gate_row"])
def _gated_norm(
    x, gate, weight, out, eps, gate_row,
    OFFSET: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    dtype: tl.constexpr = x.dtype.element_ty
    at = (row * tl.num_programs(1) + head) * D + d
    value = tl.load(x + at).to(tl.float32)
    normed = (value * tl.rsqrt(tl.sum(value * value, 0) / D + eps)).to(dtype).to(tl.float32)
    scaled = (normed * tl.load(weight + d).to(tl.float32)).to(dtype).to(tl.float32)
    z = tl.load(gate + row * gate_row + OFFSET + (head // GROUP) * STRIDE + (head % GROUP) * D + d)
    z = z.to(tl.float32)
    tl.store(out + at, (scaled * (z * tl.sigmoid(z))).to(dtype))
