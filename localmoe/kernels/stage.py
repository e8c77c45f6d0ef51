"""What kernels see of the stage: room in VRAM into which a part of one expert is copied before its layer
begins. No Triton, no decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PLACE, NUMBER, BEGUN = range(3)  # places in `words`
STAGE_WORDS = 3
# programs that copy: those of one turn share a block of columns, and turns take the blocks one by one
TURNS, PARTS = 2, 16
NUMBER_SHIFT = 16  # of `progress`


@dataclass(frozen=True, slots=True)
class StageView:
    """The stage as one layer sees it.

    Attributes:
        layer: number of the MoE layer.
        block: inner columns that are copied at a time. columns: that there is room for, the last ones of an
            expert.
        sizes: elements of a block's two pieces: gate's rows and up's (in BF12 their codes), or both's codes
            and scales; without a gate up's rows and none.
        places: of elements in a record, where the pieces of the first column are that there is room for.
        behind: elements from where the first piece would begin with column 0, if all of them were in
            `memory`, to where the second one would.
        memory: 16-bit numbers, or words of records of codes, flat: all first pieces, then all second ones.
        words: int64 (STAGE_WORDS,): the expert that was foretold last, as layer << LAYER_SHIFT | expert, or
            -1; how often something was foretold; how often that was when a layer last began. What is
            foretold is copied until the next layer begins.
        progress: int64 (TURNS * PARTS,), number << NUMBER_SHIFT | blocks that this program has copied.
        staged: int64 (2,), the expert and the number as the layer found them.
    """

    layer: int
    block: int
    columns: int
    sizes: tuple[int, int]
    places: tuple[int, int]
    behind: int
    memory: Tensor
    words: Tensor
    progress: Tensor
    staged: Tensor
