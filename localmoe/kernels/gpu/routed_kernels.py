"""Device code of the target's routed experts; routed_experts launches it and says what it computes. Dimension
letters: H hidden, I intermediate, K experts a token, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.activations import apply_activation
from localmoe.kernels.gpu.dependent import wait_for_previous
from localmoe.kernels.gpu.expert_tiles import down, gate_up
from localmoe.kernels.gpu.forms import BF12, FP8, MXFP4, PLAIN
from localmoe.kernels.gpu.lane_kernels import await_answer
from localmoe.kernels.gpu.record_sources import record_at, source_of_block, wait_for_copy
from localmoe.kernels.gpu.waiting import begin_experts, end_experts


@triton.jit
def _share_of(begin, end, SHARE: tl.constexpr):
    """A program's rows of a tile; there may be none. The last one has what is left."""
    if SHARE:
        begin += tl.program_id(1) * SHARE
        if tl.program_id(1) + 1 < tl.num_programs(1):
            end = tl.minimum(end, begin + SHARE)
    return begin, end


@triton.jit
def gate_up_kernel(
    x, x_stride, pairs, begins, ends, experts, addresses, tickets, landings, skips, done, clock, bias, inner,
    words_at, staged, stage, progress,
    BLOCKS: tl.constexpr, SHARED: tl.constexpr, FIRST_AT: tl.constexpr, BEHIND: tl.constexpr,
    TURNS: tl.constexpr, PARTS: tl.constexpr, NUMBER_SHIFT: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    FORM: tl.constexpr, PTX: tl.constexpr, STRAYS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """tickets, landings: None where nothing is waited for, or lands. words_at: where records are codes, an
    aligned pointer to words of anything; else None. SHARED: programs that a block of the stage is for. FORM,
    STRAYS: of the records, see expert_tiles. SHARE: rows of a tile that a program takes, of which the second
    dimension of the grid says the number; 0: all."""
    wait_for_previous(DEPENDENT)
    if clock is not None:
        begin_experts(clock)
    blocks: tl.constexpr = (I + BN - 1) // BN
    tile = tl.program_id(0) // blocks
    nb = tl.program_id(0) % blocks
    begin, end = _share_of(tl.load(begins + tile), tl.load(ends + tile), SHARE)
    if skips is not None:
        if begin < end:
            if (nb + 1) * BN <= tl.load(skips + tile):
                end = begin  # the CPU computes these columns
    if begin < end:
        if tickets is not None:
            wait_for_copy(done, tl.load(tickets + tile))
        dtype: tl.constexpr = x.dtype.element_ty
        address = tl.load(addresses + tile)
        anchor = x if FORM == PLAIN else words_at
        record = record_at(anchor, address)
        # from gate's weights to up's, or from both's codes to their scales, behind all codes
        plain: tl.constexpr = I if TRANSPOSED else I * H
        eighths: tl.constexpr = 2 if FORM == FP8 else 3 if FORM == BF12 else 3 if FORM == MXFP4 else 1
        coded: tl.constexpr = eighths * I * H // 8
        in_record: tl.constexpr = plain if FORM == PLAIN else coded
        behind = in_record
        if staged is not None:
            behind = tl.full([], in_record, tl.int64)
            turn = (blocks - 1 - nb) // SHARED
            if turn < BLOCKS:
                address, behind = source_of_block(
                    address, tl.load(experts + tile), staged, stage, progress, turn, in_record, FIRST_AT,
                    BEHIND, TURNS, PARTS, NUMBER_SHIFT,
                )  # fmt: skip
            behind = tl.multiple_of(behind, 8)
        landing = tl.full([], 0, tl.int64)
        if landings is not None:
            landing = tl.load(landings + tile)
        w, keep = record_at(anchor, address), record_at(anchor, landing)
        n = nb * BN + tl.arange(0, BN)
        first = begin
        while first < end:
            m = first + tl.arange(0, BM)
            ok = m < end
            pair = tl.load(pairs + m, mask=ok, other=0)
            rows = (pair // K).to(tl.int64)
            lands = False
            if landings is not None:
                lands = (landing != 0) & (first == begin)
            if lands:
                gate, up = gate_up(
                    x, x_stride, rows, ok, w, behind, record, keep, nb,
                    H, I, FORM, TRANSPOSED, GATED, INTERLEAVED, True, PTX, STRAYS, BM, BN, BK,
                )  # fmt: skip
                tl.debug_barrier()  # from here on this program's part is read from the slot
                w = keep
                record = keep
                if staged is not None:
                    behind = tl.multiple_of(tl.full([], in_record, tl.int64), 8)
            else:
                gate, up = gate_up(
                    x, x_stride, rows, ok, w, behind, record, keep, nb,
                    H, I, FORM, TRANSPOSED, GATED, INTERLEAVED, False, PTX, STRAYS, BM, BN, BK,
                )  # fmt: skip
            if bias is not None:
                row = bias + tl.load(experts + tile).to(tl.int64) * ((2 if GATED else 1) * I)
                gate_at, up_at = (2 * n, 2 * n + 1) if INTERLEAVED else (n, I + n)
                gate += tl.load(row + gate_at, mask=n < I, other=0.0).to(tl.float32)[None, :]
                if GATED:
                    up += tl.load(row + up_at, mask=n < I, other=0.0).to(tl.float32)[None, :]
                else:
                    up = gate
            y = apply_activation(gate, up, KIND, ALPHA, LIMIT)
            at = pair[:, None].to(tl.int64) * I + n[None, :]
            tl.store(inner + at, y.to(dtype), mask=ok[:, None] & (n < I)[None, :])
            first += BM


@triton.jit
def down_kernel(
    inner, pairs, begins, ends, experts, addresses, tickets, landings, skips, done, bias, out,
    words_at,
    H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr, FORM: tl.constexpr,
    PTX: tl.constexpr, STRAYS: tl.constexpr, MORE_STRAYS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """words_at, FORM, STRAYS, SHARE: as gate_up's; MORE_STRAYS: see expert_tiles."""
    wait_for_previous(DEPENDENT)
    blocks: tl.constexpr = (H + BN - 1) // BN
    tile = tl.program_id(0) // blocks
    nb = tl.program_id(0) % blocks
    begin, end = _share_of(tl.load(begins + tile), tl.load(ends + tile), SHARE)
    if begin < end:  # gate_up has waited for the copy
        address, landing = tl.load(addresses + tile), tl.full([], 0, tl.int64)
        if landings is not None:
            landing = tl.load(landings + tile)
        anchor = inner if FORM == PLAIN else words_at
        # gate_up's weights
        both: tl.constexpr = 2 * I * H if GATED else I * H
        eighths: tl.constexpr = 8 if FORM == PLAIN else 3 if FORM == BF12 else 2 if FORM == FP8 else 1
        behind: tl.constexpr = eighths * both // 8
        w, keep = record_at(anchor, address) + behind, record_at(anchor, landing) + behind
        SPLIT: tl.constexpr = skips is not None
        QUANTUM: tl.constexpr = BK if FORM != PLAIN else 64 if I % 64 == 0 else 16  # split_quantum's
        skipped = 0
        if SPLIT:
            skipped = tl.multiple_of(tl.load(skips + tile), QUANTUM)  # so that loads stay wide
        n = nb * BN + tl.arange(0, BN)
        first = begin
        while first < end:
            m = first + tl.arange(0, BM)
            ok = m < end
            pair = tl.load(pairs + m, mask=ok, other=0).to(tl.int64)
            lands = False
            if landings is not None:
                lands = (landing != 0) & (first == begin)
            if lands:
                acc = down(
                    inner, pair, ok, w, keep, nb, skipped, SPLIT,
                    H, I, FORM, TRANSPOSED, GATED, True, PTX, STRAYS, MORE_STRAYS, BM, BN, BK,
                )  # fmt: skip
                tl.debug_barrier()
                w = keep
            else:
                acc = down(
                    inner, pair, ok, w, keep, nb, skipped, SPLIT,
                    H, I, FORM, TRANSPOSED, GATED, False, PTX, STRAYS, MORE_STRAYS, BM, BN, BK,
                )  # fmt: skip
            if bias is not None:
                row = bias + tl.load(experts + tile).to(tl.int64) * H
                acc += tl.load(row + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
            tl.store(out + pair[:, None] * H + n[None, :], acc, mask=ok[:, None] & (n < H)[None, :])
            first += BM


@triton.jit(do_not_specialize=["index_stride"])  # see grouping
def combine_kernel(
    out, index, index_stride, index_stride_k, weights, weight_stride, weight_stride_k, live, result,
    clock, shares, job_count, words, answer, by_cpu, patience, I: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    WAITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """WAITS: for the CPU's answer, which is there otherwise."""
    wait_for_previous(DEPENDENT, SMALL=True)
    token = tl.program_id(0)
    first_program = token + tl.program_id(1) == 0
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros([BH], tl.float32)
    if token < tl.load(live):
        k = tl.arange(0, K_PAD)
        expert = tl.load(index + token * index_stride + k * index_stride_k, mask=k < K, other=1 << 30)
        smaller = expert[None, :] < expert[:, None]
        before = smaller | ((expert[None, :] == expert[:, None]) & (k[None, :] < k[:, None]))
        rank = tl.sum(before.to(tl.int32), 1)
        if shares is not None:
            share = tl.load(shares + expert, mask=(expert >= 0) & (expert < E), other=0)
            if WAITS:
                if tl.load(job_count) > 0:
                    await_answer(words, answer, patience, first_program)
        if clock is not None:
            if first_program:
                end_experts(clock)
        for i in tl.static_range(K):  # unrolled: all loads are on their way before the first is added
            at = tl.sum(tl.where(rank == i, k, 0), 0)
            which = tl.sum(tl.where(rank == i, expert, 0), 0)
            weight = tl.load(weights + token * weight_stride + at * weight_stride_k).to(tl.float32)
            there = (h < H) & (which >= 0) & (which < E)
            place = (token * K + at).to(tl.int64) * H + h
            if shares is not None:
                part = tl.sum(tl.where(rank == i, share, 0), 0)
                answers = by_cpu.to(tl.int64).to(tl.pointer_type(tl.float32)) + tl.multiple_of(place, 4)
                value = tl.load(out + place, mask=there & (part < I), other=0.0)
                # past all caches, as the CPU has just written it
                value += tl.load(answers, mask=there & (part > 0), other=0.0, cache_modifier=".cv")
                total += weight * value
            else:
                total += weight * tl.load(out + place, mask=there, other=0.0)
    tl.store(result + token.to(tl.int64) * H + h, total.to(result.dtype.element_ty), mask=h < H)
