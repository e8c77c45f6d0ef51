"""What a scan reads of a pass: convolved queries, keys and values, and each head's rates; and the log from
which a later pass goes on. See kernels.delta_rule and kernels.state_space for what is computed.

One program a row and head, so a row's bits do not depend on the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.delta_rule import L2_EPSILON, UNBOUNDED, DecayGate
from localmoe.kernels.gpu.convolve import convolve
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.state_memory import StateMemory
from localmoe.kernels.gpu.state_places import (
    DRAFT,
    FRESH,
    GOES_ON,
    KEPT,
    PROMPT,
    READ,
    REPLAY,
    WINDOW,
    WRITE,
)
from localmoe.kernels.recurrent_shapes import ScanShape


@dataclass(frozen=True, slots=True)
class Projected:
    """Where the projections of a layer's input lie: what belongs to value head h = g * group + j, with g its
    key head, begins at offset + g * stride + j * width in each row.

    Attributes:
        x: (T, .) of queries, keys and values.
        a: (T, .) of what a head keeps; b: (T, .) of what it corrects, of the delta rule alone. Of both the
            offset is 0 and the width 1; where each channel decays by itself, a is that of one head after the
            other.
        q, k, v: (offset, stride) of each in x.
        rate_stride: of a and b.
    """

    x: Tensor
    a: Tensor
    b: Tensor | None
    q: tuple[int, int]
    k: tuple[int, int]
    v: tuple[int, int]
    rate_stride: int


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """Of a layer.

    Attributes:
        taps: (C, taps) of the convolution, contiguous. bias: (C,).
        channels: of these, where queries, keys and values begin.
        a_log: (value_heads,). dt_bias: the same, or (value_heads * key_dim,) of each channel.
        limits: between which a step lies, where it comes from a softplus.
        gate: how decays come from steps.
    """

    taps: Tensor
    bias: Tensor | None
    channels: tuple[int, int, int]
    a_log: Tensor
    dt_bias: Tensor
    limits: tuple[float, float] = (0.0, math.inf)
    gate: DecayGate = UNBOUNDED


@without_modes
def scan_inputs(
    projected: Projected, weights: ScanWeights, shape: ScanShape, memory: StateMemory, places: Tensor,
    kind: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Convolve the rows of a pass behind those that a layer's log holds, and note them there.

    Args:
        memory: of the layer.
        kind: of state_places; a draft has one row.

    Returns:
        mixed, norms and rates (see ScanMemory) with a dimension in front: of a window the log's halves, else
        one of T rows.
    """
    rows, scan = projected.x.shape[0], memory.scan
    assert scan is not None, "of a layer with a state"
    assert rows <= memory.rows or kind == PROMPT, f"{rows} rows in a log of {memory.rows}"
    assert rows >= shape.taps - 1 or kind != PROMPT, f"a prompt of {rows} tokens"
    assert rows == 1 or kind != DRAFT, f"a draft of {rows} tokens"
    assert weights.taps.shape == (shape.channels, shape.taps) and weights.taps.is_contiguous()
    gate = weights.gate
    made = scan.mixed, scan.norms, scan.rates
    if kind != WINDOW:
        made = tuple(part.new_empty(1, rows, *part.shape[2:]) for part in made)  # type: ignore[assignment]
    mixed, norms, rates = made
    x, a, raw = projected.x, projected.a, memory.raw
    b = a if projected.b is None else projected.b
    bias = weights.taps if weights.bias is None else weights.bias
    assert x.stride(-1) == a.stride(-1) == b.stride(-1) == 1
    launch(
        _scan_inputs, (rows, 2 * shape.key_heads + shape.value_heads),
        x, a, b, weights.taps, bias, weights.a_log, weights.dt_bias,
        raw, mixed, norms, rates, memory.draft_raw, memory.kept_raw, places,
        *weights.limits, gate.least or 0.0, rows, x.stride(0), a.stride(0), b.stride(0),
        raw.stride(0), mixed.stride(0), norms.stride(0), rates.stride(0),
        Q0=projected.q[0], Q1=projected.q[1], K0=projected.k[0], K1=projected.k[1],
        V0=projected.v[0], V1=projected.v[1], RATE1=projected.rate_stride,
        CQ=weights.channels[0], CK=weights.channels[1], CV=weights.channels[2],
        KEY_HEADS=shape.key_heads, GROUP=shape.group, DK=shape.key_dim, DV=shape.value_dim, TAPS=shape.taps,
        DECAYS=shape.decays, BOUNDED=gate.least is not None, ROUNDED=gate.rounded,
        BIAS=weights.bias is not None, DELTA=shape.rule == "delta", EPS=L2_EPSILON, KIND=kind,
        **after_previous(x.device), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["rows", "x_row", "a_row", "b_row"])
def _scan_inputs(
    x, a, b, weight, bias, a_log, dt_bias, raw, mixed, norms, rates, draft_raw, kept_raw, places,
    least, most, strongest, rows, x_row, a_row, b_row, raw_half, mixed_half, norms_half, rates_half,
    Q0: tl.constexpr, Q1: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, RATE1: tl.constexpr,
    CQ: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr,
    DECAYS: tl.constexpr, BOUNDED: tl.constexpr, ROUNDED: tl.constexpr,
    BIAS: tl.constexpr, DELTA: tl.constexpr, EPS: tl.constexpr, KIND: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0)
    part = tl.program_id(1)
    C: tl.constexpr = 2 * KEY_HEADS * DK + GROUP * KEY_HEADS * DV
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    read, write = tl.load(places + READ), tl.load(places + WRITE)
    if KIND == 2:
        write = read  # drafts leave the log alone
    before = raw + read * raw_half + tl.load(places + REPLAY) * C
    known = tl.load(places + FRESH) == 0
    if KIND == 2:
        before = tl.where(tl.load(places + GOES_ON) != 0, draft_raw, before)
    half = 0 if KIND != 0 else write
    mixed_row = mixed + half * mixed_half + row * C
    log = raw + write * raw_half
    kept = tl.load(places + KEPT) if KIND != 2 else -1
    if part < 2 * KEY_HEADS:
        head = part % KEY_HEADS
        k = tl.arange(0, DK)
        k_at = x + tl.where(part < KEY_HEADS, Q0 + head * Q1, K0 + head * K1) + k
        channel = tl.where(part < KEY_HEADS, CQ, CK) + head * DK + k
        key = convolve(
            k_at, k_at, channel, weight, bias, log, draft_raw, kept_raw, before, known, kept, row, rows,
            x_row, C, TAPS, False, BIAS, True, KIND,
        )  # fmt: skip
        tl.store(mixed_row + part * DK + k, key)
        if DELTA:
            wide = key.to(tl.float32)
            norm = tl.rsqrt(tl.sum(wide * wide, 0) + EPS)
            tl.store(norms + half * norms_half + row * 2 * KEY_HEADS + part, norm)
    else:
        head = part - 2 * KEY_HEADS
        v = tl.arange(0, DV)
        v_at = x + V0 + (head // GROUP) * V1 + (head % GROUP) * DV + v
        value = convolve(
            v_at, v_at, CV + head * DV + v, weight, bias, log, draft_raw, kept_raw, before, known, kept, row,
            rows, x_row, C, TAPS, False, BIAS, True, KIND,
        )  # fmt: skip
        tl.store(mixed_row + 2 * KEY_HEADS * DK + head * DV + v, value)
        rate_at = (head // GROUP) * RATE1 + head % GROUP
        a_at, decays = rate_at, head
        if DECAYS > 1:
            decays = head * DECAYS + tl.arange(0, DECAYS)
            a_at = decays
        step = tl.load(a + row.to(tl.int64) * a_row + a_at).to(tl.float32)
        step += tl.load(dt_bias + decays).to(tl.float32)
        keep = tl.exp(tl.load(a_log + head).to(tl.float32))
        if BOUNDED:
            keep = strongest * tl.sigmoid(keep * step)
        else:
            step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))  # softplus
            step = tl.minimum(tl.maximum(step, least), most)
            keep = -keep * step
        if ROUNDED:
            keep = keep.to(mixed.dtype.element_ty).to(tl.float32)
        decay = tl.exp(keep)
        rate = rates + half * rates_half + row * HEADS * (DECAYS + 1)
        tl.store(rate + decays, decay)
        if DELTA:
            error_rate = tl.load(b + row.to(tl.int64) * b_row + rate_at)
            step = tl.sigmoid(error_rate.to(tl.float32)).to(error_rate.dtype).to(tl.float32)
        tl.store(rate + HEADS * DECAYS + head, step)
