"""Causal attention over a cache of latent vectors without expanding them (absorbed multi-head latent
attention, DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C). Decides how the work is cut, and
nothing about where queries and weights come from.

A head's score of a position is q W c + q' k' with the position's latent c and its rotated key k', which all
heads share: q W is made once a row, and the cache is read as it is, once for a tile of heads and rows. What
comes out is a sum of latents, which the head's value weights then turn into its output.

The cache is cut at multiples of PART positions and parts are merged in order. Few rows: one program a part
writes a partial result, and attention_merge merges them; many rows: one program loops over the parts. Both
do the same arithmetic in the same order, so a row's bits depend on neither the other rows, nor on the way,
nor on the length that the launch was sized for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.attention import SPLIT_ROWS, Scoring, num_slots, partial_results
from localmoe.kernels.gpu.attention_chunks import finish, merge, no_state
from localmoe.kernels.gpu.attention_merge import merge_parts
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.head_linear import head_linear
from localmoe.kernels.gpu.latent_chunks import attend_tile, load_latent_rows, no_part
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2

PART = 256  # positions
MOST_RANK, MOST_ROPE = 512, 64  # what fits on chip
MAX_BYTES = 32 << 20  # of a block's queries in latent space, its sums of latents, and partial results
_BM = 16  # rows (token, head) of a tile: one tensor-core tile high
_TILE = 32  # positions; two of them in flight beside a tile's queries fill 91 KiB of a block's shared memory


@without_modes
def latent_attention(
    query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    start: Tensor,
    *,
    scale: float,
    max_length: int,
) -> Tensor:
    """Row i, at position start + i, over positions up to its own; as dense.reference_latent_attention.

    Args:
        query: (1, heads, T, Dn + Dr), bfloat16 or float16, the last Dr of each rotated; rows contiguous.
        latent_cache: (1, 1, C, R), rope_cache: (1, 1, C, Dr), rows contiguous; R up to MOST_RANK, Dr up to
            MOST_ROPE.
        key_weight: (heads, Dn, R), value_weight: (heads, Dv, R), any strides.
        start: int64 (1,) on the device.
        max_length: at least start + T, at most C; sizes the grid. What lies beyond start + T costs little.

    Returns:
        (T, heads, Dv), contiguous, of query's dtype.
    """
    _, heads, rows, _ = query.shape
    rank, rope = latent_cache.shape[3], rope_cache.shape[3]
    plain = key_weight.shape[1]
    assert query.dtype == latent_cache.dtype == rope_cache.dtype == key_weight.dtype, f"{query.dtype}"
    assert query.shape[3] == plain + rope and rank <= MOST_RANK and rope <= MOST_ROPE, f"{rank}, {rope}"
    assert rows <= max_length <= latent_cache.shape[2], f"{max_length} of {latent_cache.shape[2]} positions"
    assert query.stride(3) == latent_cache.stride(3) == rope_cache.stride(3) == 1, "rows are contiguous"
    tokens = query[0].transpose(0, 1)  # (T, heads, Dn + Dr)
    out = torch.empty((rows, heads, value_weight.shape[1]), dtype=query.dtype, device=query.device)
    slots = num_slots(rows, max_length, None, PART) if rows <= SPLIT_ROWS else 0
    room = MAX_BYTES - 4 * _BM * slots * (rank + 2)  # beside a tile's partial results
    block = max(1, room // (2 * heads * rank * query.element_size()))
    for begin in range(0, rows, block):
        some = tokens[begin : begin + block]
        absorbed = head_linear(some[..., :plain], key_weight.mT)
        summed = torch.empty(absorbed.shape, dtype=absorbed.dtype, device=absorbed.device)
        launch = _Launch(
            absorbed, some[..., plain:], latent_cache, rope_cache, start, summed, begin, rows, scale
        )
        if slots:
            launch.split(slots)
        else:
            launch.loop()
        head_linear(summed, value_weight, out=out[begin : begin + block])
    return out


class _Launch:
    """Attention of a block of tokens, the first of them `begin` tokens after position `start`."""

    def __init__(
        self,
        absorbed: Tensor,
        turned: Tensor,
        latent: Tensor,
        rope: Tensor,
        start: Tensor,
        out: Tensor,
        begin: int,
        pass_rows: int,
        scale: float,
    ) -> None:
        """absorbed, out: (T, heads, R), contiguous. turned: (T, heads, Dr). pass_rows: tokens of the pass."""
        self._absorbed, self._start, self._out = absorbed, start, out
        self._heads, self._rank = absorbed.shape[1:]
        self._first_row = begin * self._heads
        self._rows = absorbed.shape[0] * self._heads
        rope_dim, half = rope.shape[3], max(16, next_power_of_2(self._rank) // 2)
        self._arguments = (
            absorbed, turned, latent, rope, start, pass_rows, self._heads, *turned.stride()[:2],
            latent.stride(2), rope.stride(2), *Scoring(scale).factors()[:1],
        )  # fmt: skip
        self._constants = {
            "RANK": self._rank, "HALF": half, "ROPE": rope_dim,
            "ROPE_PAD": max(16, next_power_of_2(rope_dim)), "PART": PART, "TILE": _TILE, "BM": _BM,
            **after_previous(absorbed.device),
            "num_warps": 4, "num_stages": 3, "enable_fp_fusion": False,
        }  # fmt: skip

    def split(self, slots: int) -> None:
        """A program a tile and part, then the merge; as many rows at a time as partial results have room."""
        room = MAX_BYTES - self._absorbed.nbytes - self._out.nbytes
        most = max(_BM, room // (4 * slots * (self._rank + 2)) // _BM * _BM)
        for at in range(0, self._rows, most):
            rows = min(most, self._rows - at)
            parts = partial_results(rows, slots, self._rank, self._out.device)
            launch(
                _latent_split, (cdiv(rows, _BM), slots),
                *self._arguments, *parts, self._first_row, at, at + rows, slots, **self._constants,
            )  # fmt: skip
            merge_parts(
                parts, self._start, None, self._out.flatten(0, 1)[at : at + rows],
                first_row=self._first_row + at, heads=self._heads, part=PART, group=1, window=None,
            )  # fmt: skip

    def loop(self) -> None:
        """A program a tile, over all parts."""
        launch(
            _latent_loop, (cdiv(self._rows, _BM),),
            *self._arguments, self._out, self._first_row, self._rows, **self._constants,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pass_rows", "first_row", "row_begin", "row_end", "slots"])
def _latent_split(
    query, rope_query, latent, rope, start, pass_rows, heads, token_stride, head_stride,
    latent_row, rope_row, scale,
    partial_peak, partial_total, partial_acc, first_row, row_begin, row_end, slots,
    RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    tile, slot = tl.program_id(0), tl.program_id(1)  # tiles of a part side by side
    first_position = tl.load(start).to(tl.int32)
    begin = slot * PART
    r = row_begin + tile * BM + tl.arange(0, BM)
    last = first_position + (first_row + tl.minimum(row_begin + tile * BM + BM, row_end) - 1) // heads
    if begin <= last:
        row_ok = r < row_end
        low, high, turned = load_latent_rows(
            query, rope_query, r, row_ok, heads, token_stride, head_stride, RANK, HALF, ROPE, ROPE_PAD
        )
        position = first_position + (first_row + r) // heads
        state = no_part(low)
        for first in tl.range(0, PART, TILE):  # the next tiles are on their way while this one is used
            state = attend_tile(
                state, low, high, turned, latent, rope, begin + first, position, row_ok,
                first_position + pass_rows, latent_row, rope_row, scale,
                RANK, HALF, ROPE, ROPE_PAD, TILE, False,
            )  # fmt: skip
        peak, total, acc_low, acc_high = state
        d = tl.arange(0, HALF)[None, :]
        at = (r - row_begin).to(tl.int64) * slots + slot
        tl.store(partial_peak + at, peak, mask=row_ok)
        tl.store(partial_total + at, tl.max(total, 1), mask=row_ok)  # all columns are alike
        to = partial_acc + at[:, None] * RANK + d
        tl.store(to, acc_low, mask=row_ok[:, None] & (d < RANK))
        tl.store(to + HALF, acc_high, mask=row_ok[:, None] & (HALF + d < RANK))


@triton.jit
def _go_on(
    done, part, tile, low, high, turned, latent, rope, position, row_ok, live, latent_row, rope_row, scale,
    RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Both states after one more tile."""
    part = attend_tile(
        part, low, high, turned, latent, rope, tile * TILE, position, row_ok, live, latent_row, rope_row,
        scale, RANK, HALF, ROPE, ROPE_PAD, TILE, WHOLE,
    )  # fmt: skip
    if (tile + 1) % (PART // TILE) == 0:
        done = _merged(done, part)
        part = no_part(low)
    return done, part


@triton.jit
def _merged(done, part):
    peak, total, acc_low, acc_high = done
    part_peak, part_total, part_low, part_high = part
    part_total = tl.max(part_total, 1)  # all columns are alike
    _, _, acc_low = merge(peak, total, acc_low, part_peak, part_total, part_low)
    peak, total, acc_high = merge(peak, total, acc_high, part_peak, part_total, part_high)
    return peak, total, acc_low, acc_high


@triton.jit(do_not_specialize=["pass_rows", "first_row", "rows"])
def _latent_loop(
    query, rope_query, latent, rope, start, pass_rows, heads, token_stride, head_stride,
    latent_row, rope_row, scale, out, first_row, rows,
    RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    first_position = tl.load(start).to(tl.int32)
    r = tile * BM + tl.arange(0, BM)
    first = first_position + (first_row + tile * BM) // heads
    last = first_position + (first_row + tl.minimum(tile * BM + BM, rows) - 1) // heads
    row_ok = r < rows
    low, high, turned = load_latent_rows(
        query, rope_query, r, row_ok, heads, token_stride, head_stride, RANK, HALF, ROPE, ROPE_PAD
    )
    peak, total, sums = no_state(tl.zeros([BM], tl.float32), tl.zeros([BM, HALF], tl.float32))
    done, part = (peak, total, sums, sums), no_part(low)  # after all parts before this one, and of this one
    position, live = first_position + (first_row + r) // heads, first_position + pass_rows
    whole_end, end = (first + 1) // TILE, last // TILE + 1
    for at in tl.range(0, whole_end):
        done, part = _go_on(
            done, part, at, low, high, turned, latent, rope, position, row_ok, live, latent_row, rope_row,
            scale, RANK, HALF, ROPE, ROPE_PAD, PART, TILE, True,
        )  # fmt: skip
    for at in tl.range(whole_end, end, num_stages=1):
        done, part = _go_on(
            done, part, at, low, high, turned, latent, rope, position, row_ok, live, latent_row, rope_row,
            scale, RANK, HALF, ROPE, ROPE_PAD, PART, TILE, False,
        )  # fmt: skip
    peak, total, acc_low, acc_high = _merged(done, part)
    d = tl.arange(0, HALF)[None, :]
    to = out + r[:, None].to(tl.int64) * RANK + d
    low_out = finish(peak, total, acc_low, 0.0, False).to(out.dtype.element_ty)
    high_out = finish(peak, total, acc_high, 0.0, False).to(out.dtype.element_ty)
    tl.store(to, low_out, mask=row_ok[:, None] & (d < RANK))
    tl.store(to + HALF, high_out, mask=row_ok[:, None] & (HALF + d < RANK))
