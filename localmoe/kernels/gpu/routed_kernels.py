"""Device code of the target's routed experts; routed_experts launches it and says what it computes. Dimension
letters: H hidden, I intermediate, K experts a token, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.activations import apply_activation
from localmoe.kernels.gpu.dependent import wait_for_previous
from localmoe.kernels.gpu.lane_kernels import await_answer
from localmoe.kernels.gpu.record_sources import record_at, source_of_block, wait_for_copy
from localmoe.kernels.gpu.waiting import begin_experts, end_experts


@triton.jit
def _gate_up_tile(
    x, x_stride, rows, ok, w, to_up, keep, nb,
    H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr, INTERLEAVED: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """gate and up, float32 (BM, BN) each; with KEEP the weights are written to `keep` as they are read.
    to_up: how far up's rows are behind gate's."""
    WIDTH: tl.constexpr = 2 * BN if INTERLEAVED else BN
    COLUMNS: tl.constexpr = 2 * I if INTERLEAVED else I
    advance: tl.constexpr = 2 * I if TRANSPOSED else 1  # from a column of the sum to the next
    kept_up: tl.constexpr = I if TRANSPOSED else I * H
    n = nb * WIDTH + tl.arange(0, WIDTH)
    inside = n < COLUMNS
    # rows of weights past the end read the first and are not stored; as columns they are masked, since the
    # compiler must see that they lie side by side
    n_read = n if TRANSPOSED else tl.where(inside, n, 0)
    k = tl.arange(0, BK)
    x_at = x + rows[:, None] * x_stride + k[None, :]
    if TRANSPOSED:
        at = k[:, None] * (2 * I) + n_read[None, :]
        kept = inside[None, :] & (k >= 0)[:, None]
    else:
        at = n_read[:, None] * H + k[None, :]
        kept = inside[:, None] & (k >= 0)[None, :]
    gate = tl.zeros([BM, WIDTH], tl.float32)
    up = tl.zeros([BM, WIDTH], tl.float32)
    for start in range(0, H, BK):
        if H % BK == 0 and not TRANSPOSED:
            a = tl.load(x_at + start, mask=ok[:, None], other=0.0)
            g = tl.load(w + at + start * advance, eviction_policy="evict_first")
            if not INTERLEAVED:
                u = tl.load(w + to_up + at + start * advance, eviction_policy="evict_first")
        else:
            in_k = start + k < H
            a = tl.load(x_at + start, mask=ok[:, None] & in_k[None, :], other=0.0)
            kept = inside[None, :] & in_k[:, None] if TRANSPOSED else inside[:, None] & in_k[None, :]
            g = tl.load(w + at + start * advance, mask=kept, other=0.0, eviction_policy="evict_first")
            if not INTERLEAVED:
                u = tl.load(
                    w + to_up + at + start * advance, mask=kept, other=0.0, eviction_policy="evict_first"
                )
        if KEEP:
            tl.store(keep + at + start * advance, g, mask=kept)
            if not INTERLEAVED:
                tl.store(keep + kept_up + at + start * advance, u, mask=kept)
        gate = tl.dot(a, g if TRANSPOSED else tl.trans(g), gate)
        if not INTERLEAVED:
            up = tl.dot(a, u if TRANSPOSED else tl.trans(u), up)
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(gate, (BM, BN, 2)))
    return gate, up


@triton.jit
def gate_up_kernel(
    x, x_stride, pairs, begins, ends, experts, addresses, tickets, landings, skips, done, clock, bias, inner,
    staged, stage, progress, COLUMNS: tl.constexpr, TURNS: tl.constexpr, PARTS: tl.constexpr,
    NUMBER_SHIFT: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr, INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    if clock is not None:
        begin_experts(clock)
    blocks: tl.constexpr = (I + BN - 1) // BN
    tile = tl.program_id(0) // blocks
    nb = tl.program_id(0) % blocks
    begin, end = tl.load(begins + tile), tl.load(ends + tile)
    if skips is not None:
        if begin < end:
            if (nb + 1) * BN <= tl.load(skips + tile):
                end = begin  # the CPU computes these columns
    if begin < end:
        wait_for_copy(done, tl.load(tickets + tile))
        dtype: tl.constexpr = x.dtype.element_ty
        address = tl.load(addresses + tile)
        in_record: tl.constexpr = I if TRANSPOSED else I * H
        to_up = in_record
        if staged is not None:
            to_up = tl.full([], in_record, tl.int64)
            turn = blocks - 1 - nb
            if turn < COLUMNS // BN:
                address, to_up = source_of_block(
                    address, tl.load(experts + tile), staged, stage, progress, turn, H, I, COLUMNS, TURNS,
                    PARTS, NUMBER_SHIFT,
                )  # fmt: skip
            to_up = tl.multiple_of(to_up, 8)
        w = record_at(x, address)
        landing = tl.load(landings + tile)
        keep = record_at(x, landing)
        n = nb * BN + tl.arange(0, BN)
        first = begin
        while first < end:
            m = first + tl.arange(0, BM)
            ok = m < end
            pair = tl.load(pairs + m, mask=ok, other=0)
            rows = (pair // K).to(tl.int64)
            if (landing != 0) & (first == begin):
                gate, up = _gate_up_tile(
                    x, x_stride, rows, ok, w, to_up, keep, nb, H, I, TRANSPOSED, INTERLEAVED, True, BM, BN, BK
                )
                tl.debug_barrier()  # from here on this program's part is read from the slot
                w = keep
                if staged is not None:
                    to_up = tl.multiple_of(tl.full([], in_record, tl.int64), 8)
            else:
                gate, up = _gate_up_tile(
                    x,
                    x_stride,
                    rows,
                    ok,
                    w,
                    to_up,
                    keep,
                    nb,
                    H,
                    I,
                    TRANSPOSED,
                    INTERLEAVED,
                    False,
                    BM,
                    BN,
                    BK,
                )
            if bias is not None:
                row = bias + tl.load(experts + tile).to(tl.int64) * (2 * I)
                gate_at, up_at = (2 * n, 2 * n + 1) if INTERLEAVED else (n, I + n)
                gate += tl.load(row + gate_at, mask=n < I, other=0.0).to(tl.float32)[None, :]
                up += tl.load(row + up_at, mask=n < I, other=0.0).to(tl.float32)[None, :]
            y = apply_activation(gate, up, KIND, ALPHA, LIMIT)
            at = pair[:, None].to(tl.int64) * I + n[None, :]
            tl.store(inner + at, y.to(dtype), mask=ok[:, None] & (n < I)[None, :])
            first += BM


@triton.jit
def _down_tile(
    inner, pair, ok, w, keep, nb, skipped, SPLIT: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = nb * BN + tl.arange(0, BN)
    inside = n < H
    n_read = n if TRANSPOSED else tl.where(inside, n, 0)
    k = tl.arange(0, BK)
    a_at = inner + pair[:, None] * I + k[None, :]
    advance: tl.constexpr = H if TRANSPOSED else 1
    if TRANSPOSED:
        at = k[:, None] * H + n_read[None, :]
        kept = inside[None, :] & (k >= 0)[:, None]
    else:
        at = n_read[:, None] * I + k[None, :]
        kept = inside[:, None] & (k >= 0)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(0, I, BK):
        start = step + skipped
        if I % BK == 0 and not TRANSPOSED and not SPLIT:
            a = tl.load(a_at + start, mask=ok[:, None], other=0.0)
            b = tl.load(w + at + start * advance, eviction_policy="evict_first")
        else:
            in_k = start + k < I
            a = tl.load(a_at + start, mask=ok[:, None] & in_k[None, :], other=0.0)
            kept = inside[None, :] & in_k[:, None] if TRANSPOSED else inside[:, None] & in_k[None, :]
            b = tl.load(w + at + start * advance, mask=kept, other=0.0, eviction_policy="evict_first")
        if KEEP:
            tl.store(keep + at + start * advance, b, mask=kept)
        acc = tl.dot(a, b if TRANSPOSED else tl.trans(b), acc)
    return acc


@triton.jit
def down_kernel(
    inner, pairs, begins, ends, experts, addresses, tickets, landings, skips, done, bias, out,
    H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    blocks: tl.constexpr = (H + BN - 1) // BN
    tile = tl.program_id(0) // blocks
    nb = tl.program_id(0) % blocks
    begin, end = tl.load(begins + tile), tl.load(ends + tile)
    if begin < end:  # gate_up has waited for the copy
        w = record_at(inner, tl.load(addresses + tile)) + 2 * I * H
        landing = tl.load(landings + tile)
        keep = record_at(inner, landing) + 2 * I * H
        SPLIT: tl.constexpr = skips is not None
        QUANTUM: tl.constexpr = 64 if I % 64 == 0 else 16
        skipped = 0
        if SPLIT:
            skipped = tl.multiple_of(tl.load(skips + tile), QUANTUM)  # so that loads stay wide
        n = nb * BN + tl.arange(0, BN)
        first = begin
        while first < end:
            m = first + tl.arange(0, BM)
            ok = m < end
            pair = tl.load(pairs + m, mask=ok, other=0).to(tl.int64)
            if (landing != 0) & (first == begin):
                acc = _down_tile(
                    inner, pair, ok, w, keep, nb, skipped, SPLIT, H, I, TRANSPOSED, True, BM, BN, BK
                )
                tl.debug_barrier()
                w = keep
            else:
                acc = _down_tile(
                    inner, pair, ok, w, keep, nb, skipped, SPLIT, H, I, TRANSPOSED, False, BM, BN, BK
                )
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
    DEPENDENT: tl.constexpr,
):  # fmt: skip
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
