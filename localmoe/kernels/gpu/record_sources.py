"""Device code that finds an expert's record: behind an address, once a copy is complete, or, of a block that
was copied ahead, in the stage. Computes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_copy(done, ticket):
    """Until the copy `ticket` is complete. The copy engine writes `done`, so waiting programs cannot keep it
    from being written."""
    if ticket > 0:
        seen = tl.atomic_add(done, 0, sem="acquire", scope="sys")
        while seen < ticket:
            seen = tl.atomic_add(done, 0, sem="acquire", scope="sys")


@triton.jit
def record_at(anchor, address):
    """Pointer to an address of 16-byte alignment. Going by way of an aligned argument of the kernel tells the
    compiler of the alignment, which it loses in a plain cast, and with it all wide loads."""
    element_bytes: tl.constexpr = anchor.dtype.element_ty.primitive_bitwidth // 8
    return anchor + tl.multiple_of((address - anchor.to(tl.int64)) // element_bytes, 16 // element_bytes)


@triton.jit
def source_of_block(
    address, expert, staged, stage, progress, turn, IN_RECORD: tl.constexpr, FIRST_AT: tl.constexpr,
    BEHIND: tl.constexpr, TURNS: tl.constexpr, PARTS: tl.constexpr, NUMBER_SHIFT: tl.constexpr,
):  # fmt: skip
    """Where a block's record is read, and how far its second piece is behind its first: in the stage, if all
    of the block has been copied there. `turn`: the block's number from the last on; there is room for it.
    IN_RECORD: how far the piece is behind in a record."""
    behind = tl.full([], IN_RECORD, tl.int64)
    if tl.load(staged) == expert:
        at = progress + (turn % TURNS) * PARTS + tl.arange(0, PARTS)
        seen = tl.min(tl.atomic_add(at, tl.zeros([PARTS], tl.int64), sem="acquire", scope="gpu"), 0)
        if seen >= (tl.load(staged + 1) << NUMBER_SHIFT) + turn // TURNS + 1:
            element_bytes: tl.constexpr = stage.dtype.element_ty.primitive_bitwidth // 8
            address = stage.to(tl.int64) - FIRST_AT * element_bytes
            behind = tl.full([], BEHIND, tl.int64)
    return address, behind
