"""The target's routed experts, with weights read through the residency table: from slots, or from pinned host
records over the link, in any of their forms. Decides neither what is resident
nor what is copied.

A weight is read once for all tokens of a window that chose its expert. What comes over the link is written to
its new slot by the very program that multiplies with it, so a miss costs the link its bytes once. Products
are 16-row tensor-core tiles accumulated along K in one program, so a row's bits do not depend on what rides
along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.kernels import mxfp4_tiles
from localmoe.kernels.activations import Activation
from localmoe.kernels.bf12_tiles import TILE_COLUMNS, TILE_ROWS, stray_room
from localmoe.kernels.gpu.dependent import after_previous
from localmoe.kernels.gpu.forms import NUMBERS
from localmoe.kernels.gpu.grouping import Groups
from localmoe.kernels.gpu.lane_kernels import post_job, wait_for_answer
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.routed_kernels import combine_kernel, down_kernel, gate_up_kernel
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.stage import NUMBER_SHIFT, PARTS, TURNS, StageView
from localmoe.kernels.weight_forms import WeightForm

_IN_TILES = (
    WeightForm.BF12, WeightForm.FP8, WeightForm.NVFP4, WeightForm.INT4, WeightForm.INT4_32,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """How an expert's record [gate_up | down] is laid out.

    Attributes:
        hidden, inner: H and I.
        transposed: matrices are (in, out) instead of (out, in).
        activation: of gate and up; says whether their rows alternate, and whether there is a gate.
        form: of the record, see experts.records; of codes `transposed` says nothing.
    """

    hidden: int
    inner: int
    transposed: bool
    activation: Activation
    form: WeightForm = WeightForm.PLAIN

    @property
    def mxfp4(self) -> bool:
        """Whether the record is in MXFP4."""
        return self.form is WeightForm.MXFP4

    @property
    def bf12(self) -> bool:
        """Whether it is in BF12."""
        return self.form is WeightForm.BF12


@dataclass(frozen=True, slots=True)
class Launch:
    """Block sizes of one kernel."""

    block_n: int
    block_k: int
    warps: int
    stages: int


# in BF12: tiles as they lie, so that each load is of whole lines of memory
_STRIP = Launch(TILE_ROWS, TILE_COLUMNS, 1, 5)
_TALL_STRIP = Launch(TILE_ROWS, TILE_COLUMNS, 1, 3)  # of a prompt's rows, which are more bytes than the codes
_FP8, _TALL_FP8 = Launch(32, TILE_COLUMNS, 2, 5), Launch(64, TILE_COLUMNS, 4, 3)
_FOUR_BITS, _TALL_FOUR_BITS = Launch(32, TILE_COLUMNS, 2, 4), Launch(64, TILE_COLUMNS, 2, 4)
_HALVES = Launch(32, TILE_COLUMNS, 2, 3)
_TALL = 64  # rows
_WAITING = 8  # tokens whose sums each wait for the CPU's answer themselves
_COLUMNS_AHEAD = 64  # that are copied ahead at a time, so that many bytes are on their way


def gate_up_launch(shape: ExpertShape, rows: int) -> Launch:
    """Blocks for gate_up; measured (benchmarks/routed_experts.py --sweep, long_prompts.py)."""
    if shape.form is not WeightForm.PLAIN:
        return _coded_launch(shape.form, rows, shape.hidden)
    return Launch(32 if shape.hidden % 128 == 0 else 64, _block_k(shape.hidden), 2, 4)


def down_launch(shape: ExpertShape, rows: int) -> Launch:
    """Blocks for down; measured likewise."""
    if shape.form is not WeightForm.PLAIN:
        return _coded_launch(shape.form, rows, shape.inner)
    return Launch(64, _block_k(shape.inner), 4, 4)


def _coded_launch(form: WeightForm, rows: int, length: int) -> Launch:
    """Blocks for either, of weights in codes that are summed along so many."""
    tall = rows >= _TALL
    if form is WeightForm.BF12:
        return _TALL_STRIP if tall else _STRIP
    if form is WeightForm.FP8:
        return _TALL_FP8 if tall else _FP8
    if form is WeightForm.INT4_32:
        return _HALVES
    if form is not WeightForm.MXFP4:
        return _TALL_FOUR_BITS if tall else _FOUR_BITS
    # two warps keep tall tiles on the tensor cores' step that short ones take
    return Launch(32, _coded_block_k(length), 2, 5)


def split_quantum(inner: int, form: WeightForm) -> int:
    """Inner columns by which an expert may be split between GPU and CPU, such that the GPU's loads stay
    aligned and it reads whole blocks of codes; 0: not at all."""
    if form in _IN_TILES:
        return TILE_COLUMNS
    if form is WeightForm.MXFP4:
        return _coded_block_k(inner)
    return next((quantum for quantum in (64, 16) if inner % quantum == 0), 0)


def stage_block(shape: ExpertShape) -> int:
    """Inner columns that are copied ahead at a time, as some of gate_up's programs read them; 0: its records
    do not come in such pieces."""
    block, interleaved = gate_up_launch(shape, 1).block_n, shape.activation.interleaved
    if shape.form in _IN_TILES:
        return _COLUMNS_AHEAD
    if shape.mxfp4:
        return block if interleaved else 0
    scattered = shape.transposed or interleaved or block * shape.hidden % (8 * PARTS) != 0
    return 0 if scattered else block


def _block_k(length: int) -> int:
    """The largest block that divides the summed dimension, but at most half of it; of 16 the last one is
    masked where none does. A loop of one turn lets the compiler start the sum from the bias, which it does in
    some variants of a kernel and not in others."""
    most = length // 2
    return next((block for block in (128, 64, 32) if block <= most and length % block == 0), 16)


def _coded_block_k(length: int) -> int:
    """Likewise, of whole tiles of MXFP4."""
    return max(mxfp4_tiles.TILE_COLUMNS, _block_k(length))


@without_modes
def routed_experts(
    x: Tensor,
    groups: Groups,
    index: Tensor,
    weights: Tensor,
    live: Tensor,
    done: Tensor,
    shape: ExpertShape,
    num_experts: int,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    block_rows: int = 16,
    lane: LaneView | None = None,
    before_waiting: Callable[[], None] | None = None,
) -> Tensor:
    """sum_k weights[:, k] * expert_k(x), for one layer.

    Args:
        x: (T, H) bfloat16 or float16. index: int64 (T, K). weights: (T, K). live: int32 (1,).
        groups: of `index`. done: int64 (1,), see ResidencyView.
        gate_up_bias: (E, 2I) in the record's order, without a gate (E, I). down_bias: (E, H).
        lane: the one that `groups` were made with. before_waiting: is called before a kernel is issued that
            waits for the CPU's answer.

    Returns:
        (T, H) in x.dtype; rows from `live` on are zero.
    """
    tokens, hidden = x.shape
    top_k = index.shape[1]
    if lane is not None:
        post_job(x, groups, live, lane, top_k)
    inner = x.new_empty(tokens * top_k, shape.inner)
    out = x.new_empty(tokens * top_k, hidden, dtype=torch.float32)
    run_groups(x, groups, top_k, done, shape, inner, out, gate_up_bias, down_bias, block_rows)
    if before_waiting is not None:
        before_waiting()
    return combine(out, index, weights, live, num_experts, x.dtype, lane, groups.clock)


@without_modes
def run_groups(
    x: Tensor,
    groups: Groups,
    top_k: int,
    done: Tensor,
    shape: ExpertShape,
    inner: Tensor,
    out: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    block_rows: int,
    share: int = 0,
) -> None:
    """Both products of the experts in `groups`: out[pair] = expert(x[token of pair]), float32 (P, H);
    inner is scratch, (P, I). Pairs of other experts are left alone. share: rows of an expert that a program
    takes, as most tokens of a prompt may choose the same; 0: all. Only where nothing is waited for or lands.
    """
    assert not share or (groups.ticket is None and groups.landing is None and groups.skipped is None)
    tiles = groups.begin.shape[0]
    shares = -(-x.shape[0] // share) if share else 1  # a token chooses an expert once, or the last has more
    common = (groups.pairs, groups.begin, groups.end, groups.expert, groups.address, groups.ticket)
    kind, alpha, limit = shape.activation.kind, shape.activation.alpha, shape.activation.limit
    words = None if shape.form is WeightForm.PLAIN else inner.view(torch.int32)
    form, ptx = NUMBERS[shape.form], takes_ptx(x)
    strays, more_strays = (stray_room(size) if shape.bf12 else 0 for size in (shape.hidden, shape.inner))
    blocks = gate_up_launch(shape, block_rows)
    launch(
        gate_up_kernel, (tiles * cdiv(shape.inner, blocks.block_n), shares),
        x, x.stride(0), *common, groups.landing, groups.skipped, done, groups.clock, gate_up_bias, inner,
        words, *_stage_arguments(groups.stage, blocks.block_n),
        TURNS=TURNS, PARTS=PARTS, NUMBER_SHIFT=NUMBER_SHIFT,
        K=top_k, H=shape.hidden, I=shape.inner, TRANSPOSED=shape.transposed, GATED=shape.activation.gated,
        INTERLEAVED=shape.activation.interleaved, KIND=kind, ALPHA=alpha, LIMIT=limit, FORM=form, PTX=ptx,
        STRAYS=strays,
        BM=block_rows, BN=blocks.block_n, BK=blocks.block_k, SHARE=share, **after_previous(x.device),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    blocks = down_launch(shape, block_rows)
    launch(
        down_kernel, (tiles * cdiv(shape.hidden, blocks.block_n), shares),
        inner, *common, groups.landing, groups.skipped, done, down_bias, out, words,
        H=shape.hidden, I=shape.inner, TRANSPOSED=shape.transposed, GATED=shape.activation.gated, FORM=form,
        PTX=ptx,
        STRAYS=strays, MORE_STRAYS=more_strays,
        BM=block_rows, BN=blocks.block_n, BK=blocks.block_k, SHARE=share, **after_previous(x.device),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


def takes_ptx(x: Tensor) -> bool:
    """Whether kernels on x's device may have assembly for NVIDIA's."""
    return x.is_cuda


@without_modes
def combine(
    out: Tensor,
    index: Tensor,
    weights: Tensor,
    live: Tensor,
    num_experts: int,
    dtype: torch.dtype,
    lane: LaneView | None = None,
    clock: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's experts, in ascending expert order, in float32, rounded once.

    Args:
        out: float32 (T * K, H). index, weights: (T, K); an index outside the experts adds nothing.
        live: int32 (1,).
        lane: waits for its answer and adds it: rows of `out` that it computes all of are not read.
        clock: of the layer, see ResidencyView.

    Returns:
        (T, H) in `dtype`; rows from `live` on are zero.
    """
    tokens, top_k = index.shape
    hidden = out.shape[1]
    waits = lane is not None and tokens <= _WAITING
    if lane is not None and not waits:
        wait_for_answer(lane)
    result = out.new_empty(tokens, hidden, dtype=dtype)
    block = min(1024, next_power_of_2(hidden))
    launch(
        combine_kernel, (tokens, cdiv(hidden, block)),
        out, index, *index.stride(), weights, *weights.stride(), live, result,
        clock, *_lane_arguments(lane),
        K=top_k, K_PAD=next_power_of_2(top_k), E=num_experts, H=hidden, BH=block, WAITS=waits,
        **after_previous(out.device), num_warps=4,
    )  # fmt: skip
    return result


def _stage_arguments(stage: StageView | None, block_n: int) -> tuple[object, ...]:
    """staged, memory, progress, blocks, programs that one is for, place of the first pieces, `behind`."""
    if stage is None:
        return (None, None, None, 0, 1, 0, 0)
    blocks, shared = stage.columns // stage.block, stage.block // block_n
    return (stage.staged, stage.memory, stage.progress, blocks, shared, stage.places[0], stage.behind)


def _lane_arguments(lane: LaneView | None) -> tuple[object, ...]:
    """share, count, words, addresses of the answer's number and rows, patience, I."""
    if lane is None:
        return (None, None, None, 0, 0, 0, 0)
    answer, rows = lane.box + lane.layout.answered, lane.box + lane.layout.out
    return (lane.share, lane.count, lane.words, answer, rows, lane.patience, lane.inner)
