"""A state a head that goes on over the rows of a pass, by the gated delta rule or as a state space. See
kernels.delta_rule and kernels.state_space for what is computed, state_places for where the state stands.

A program has some rows of one head's state in registers and goes through the tokens one by one, so that what
comes out of a row depends neither on how many there are in the pass, nor on where earlier passes were cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.state_memory import StateMemory
from localmoe.kernels.gpu.state_places import FRESH, GOES_ON, KEPT, READ, REPLAY, WRITE
from localmoe.kernels.recurrent_shapes import ScanShape

_VALUES = 8  # rows of a head's state in one program: 8 x 128 float32 are a quarter of a warp's registers


@without_modes
def scan(
    inputs: tuple[Tensor, Tensor, Tensor],
    skip: Tensor | None,
    shape: ScanShape,
    memory: StateMemory,
    places: Tensor,
    live: Tensor,
    rows: int,
    kind: int,
) -> Tensor:
    """What comes out of a pass's rows, in which a layer's state moves on: to where a window begins, or to
    where a prompt ends; a draft's to behind its token.

    Args:
        inputs: of scan_inputs.
        skip: (value_heads,), of each value, added to what comes out of its head.
        live: int64 (1,), rows that count in a window. Others give zeros: what later layers make of padding
            has to be finite.

    Returns:
        (rows, value_heads, value_dim), in the dtype of `mixed`.
    """
    mixed, norms, rates = inputs
    held, delta = memory.scan, shape.rule == "delta"
    assert held is not None, "of a layer with a state"
    out = torch.empty(rows, shape.value_heads, shape.value_dim, dtype=mixed.dtype, device=mixed.device)
    block = min(_VALUES, shape.value_dim)
    launch(
        _scan, (shape.value_heads, shape.value_dim // block),
        mixed, norms, rates, held.mixed, held.norms, held.rates, mixed if skip is None else skip,
        held.state, held.draft_state, held.kept_state, places, live, out, rows,
        mixed.stride(0), norms.stride(0), rates.stride(0),
        held.mixed.stride(0), held.norms.stride(0), held.rates.stride(0), shape.key_dim**-0.5,
        KEY_HEADS=shape.key_heads, GROUP=shape.group, DK=shape.key_dim, DV=shape.value_dim, BV=block,
        DECAYS=shape.decays, DELTA=delta, SKIP=skip is not None, KIND=kind,
        **after_previous(mixed.device), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _scan(
    mixed, norms, rates, log_mixed, log_norms, log_rates, skip, state, draft_state, kept_state, places, live,
    out, rows,
    mixed_half, norms_half, rates_half, log_mixed_half, log_norms_half, log_rates_half, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    DECAYS: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr, KIND: tl.constexpr,
    DEPENDENT: tl.constexpr,
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
            log_rates + read * log_rates_half, head, v, KEY_HEADS, GROUP, DK, DV, DECAYS, DELTA,
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
        s = _learn(
            s, row, mixed, norms, rates + half * rates_half, head, v, KEY_HEADS, GROUP, DK, DV, DECAYS, DELTA
        )
        q = tl.load(mixed + row * C + d).to(tl.float32)
        if DELTA:
            q *= tl.load(norms + row * 2 * KEY_HEADS + head // GROUP) * scale
        o = tl.sum(s * q[None, :], 1)
        if SKIP:
            value = tl.load(mixed + row * C + 2 * KEY_HEADS * DK + head * DV + v).to(tl.float32)
            o += tl.load(skip + head).to(tl.float32) * value
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
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DECAYS: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """The state behind one row."""
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    C: tl.constexpr = 2 * KEY_HEADS * DK + GROUP * KEY_HEADS * DV
    key_head = head // GROUP
    keys = mixed + row * C + (KEY_HEADS + key_head) * DK
    k = tl.load(keys + tl.arange(0, DK)).to(tl.float32)
    value = tl.load(mixed + row * C + 2 * KEY_HEADS * DK + head * DV + v).to(tl.float32)
    rate = rates + row * HEADS * (DECAYS + 1)
    if DECAYS > 1:
        s = s * tl.load(rate + head * DK + tl.arange(0, DK))[None, :]
    else:
        s = s * tl.load(rate + head)
    if DELTA:
        k *= tl.load(norms + row * 2 * KEY_HEADS + KEY_HEADS + key_head)
        value -= tl.sum(s * k[None, :], 1)
    return s + (value * tl.load(rate + HEADS * DECAYS + head))[:, None] * k[None, :]
