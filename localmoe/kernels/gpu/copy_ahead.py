"""Copy a part of the expert that was foretold into the stage, while the link has nothing else to do: from the
end of one layer's experts to the begin of the next one's. Chooses nothing; routed_experts' products read what
is complete by then.

A program writes its part of a block and then, in `progress`, that it has: who sees the number also sees the
weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.sizes import next_power_of_2
from localmoe.kernels.mailbox import LAYER_SHIFT
from localmoe.kernels.residency import ResidencyView
from localmoe.kernels.stage import NUMBER_SHIFT, PARTS, TURNS, StageView


def copy_ahead(stage: StageView, residency: ResidencyView) -> None:
    """Copy until all of the stage is full or the layer begins. stage, residency: of the layer to come."""
    first, second = (size // PARTS for size in stage.sizes)
    launch(
        _copy_ahead, (TURNS * PARTS,),
        stage.words, residency.home, stage.memory, stage.progress,
        BLOCKS=stage.columns // stage.block, FIRST_AT=stage.places[0], SECOND_AT=stage.places[1],
        FIRST=first, FIRST_PAD=next_power_of_2(first),
        SECOND=second, SECOND_PAD=next_power_of_2(max(1, second)),
        TURNS=TURNS, PARTS=PARTS, LAYER_SHIFT=LAYER_SHIFT, NUMBER_SHIFT=NUMBER_SHIFT,
        **after_previous(stage.memory.device), num_warps=4,
    )  # fmt: skip


@triton.jit
def _copy_ahead(
    words, homes, memory, progress, BLOCKS: tl.constexpr, FIRST_AT: tl.constexpr, SECOND_AT: tl.constexpr,
    FIRST: tl.constexpr, FIRST_PAD: tl.constexpr, SECOND: tl.constexpr, SECOND_PAD: tl.constexpr,
    TURNS: tl.constexpr, PARTS: tl.constexpr, LAYER_SHIFT: tl.constexpr, NUMBER_SHIFT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """FIRST, SECOND: elements of a part of a block's two pieces; the second may have none."""
    wait_for_previous(DEPENDENT)
    place, number = tl.load(words), tl.load(words + 1)
    if place >= 0:
        home = tl.load(homes + (place & ((1 << LAYER_SHIFT) - 1)))
        element_bytes: tl.constexpr = memory.dtype.element_ty.primitive_bitwidth // 8
        weights = memory + tl.multiple_of((home - memory.to(tl.int64)) // element_bytes, 8)
        turn, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
        i, j = tl.arange(0, FIRST_PAD), tl.arange(0, SECOND_PAD)
        for block in range(turn, BLOCKS, TURNS):
            # by one thread for all: warps that each looked for themselves might not agree
            if tl.atomic_add(words + 2, 0, sem="relaxed", scope="gpu") < number:
                nth = (BLOCKS - 1 - block) * PARTS + part
                at = tl.multiple_of(nth * FIRST, 16 // element_bytes) + i
                behind = tl.multiple_of(nth * SECOND, 16 // element_bytes) + j
                first = tl.load(weights + FIRST_AT + at, mask=i < FIRST)
                if SECOND > 0:
                    second = tl.load(weights + SECOND_AT + behind, mask=j < SECOND)
                tl.store(memory + at, first, mask=i < FIRST)
                if SECOND > 0:
                    tl.store(memory + BLOCKS * PARTS * FIRST + behind, second, mask=j < SECOND)
                tl.debug_barrier()
                done = (number << NUMBER_SHIFT) + block // TURNS + 1
                tl.atomic_xchg(progress + tl.program_id(0), done, sem="release", scope="gpu")


@triton.jit
def begin_layer(words, staged, layer, LAYER_SHIFT: tl.constexpr):
    """Copying ahead ends; what was foretold of the layer is kept while the next one is foretold."""
    place, number = tl.load(words), tl.load(words + 1)
    tl.store(staged, tl.where(place >> LAYER_SHIFT == layer, place & ((1 << LAYER_SHIFT) - 1), -1))
    tl.store(staged + 1, number)
    tl.atomic_xchg(words + 2, number, sem="relaxed", scope="gpu")
