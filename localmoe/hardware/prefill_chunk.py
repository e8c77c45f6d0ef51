"""How many tokens of a prompt go through a GPU in one pass. Divides no memory; see plan."""

from __future__ import annotations

from localmoe.core.types import ModelFootprint
from localmoe.hardware.needs import (
    DEVICE_PREFILL_CHUNK,
    DeviceNeeds,
    NeedsOptions,
    device_needs,
    expert_row_bytes,
)

MOST_ROWS = 8192  # beyond which computing takes longer than the link, even of fast GPUs
_SHARE = 48  # of the memory, a 48th may go to what longer passes need: some 1 % of an answer's speed;
_MISSING_SHARE = 32  # but where few experts are missing, no more than makes that many a 32nd more
_SLOTS_SHARE = 4  # of slots, a quarter may be lent to such a pass


def choose_chunk(
    footprint: ModelFootprint,
    budget_bytes: int,
    context: int,
    options: NeedsOptions,
    *,
    drafting: bool,
) -> int:
    """As long passes as cost answers next to no speed, where experts are missing: each pass brings nearly all
    of those over the link, so that a prompt's first token comes the sooner the fewer passes there are.

    Args:
        budget_bytes: device memory that is divided.
        context: tokens; no prompt is longer.
        options: of passes that run whole; their `prefill_chunk` plays no role.
        drafting: whether a draft is wanted; one that fits beside passes of the usual length keeps its place.
    """

    def needs_with(rows: int) -> DeviceNeeds:
        of_passes = options.copy()
        of_passes["prefill_chunk"] = rows
        return device_needs(footprint, context=context, **of_passes)

    chunk = DEVICE_PREFILL_CHUNK
    usual = needs_with(chunk)
    drafting = drafting and usual.least_bytes(drafting=True) <= budget_bytes
    missing = max(0, usual.most_bytes(drafting=drafting) - budget_bytes)
    spare = min(budget_bytes // _SHARE, missing // _MISSING_SHARE)
    allowed = usual.fixed_bytes(drafting=drafting) + spare
    while chunk < min(MOST_ROWS, context):
        longer = chunk + DEVICE_PREFILL_CHUNK
        needs = needs_with(longer)
        fixed = needs.fixed_bytes(drafting=drafting)
        lent = min(longer, context) * expert_row_bytes(footprint)
        fits = fixed <= allowed and needs.least_bytes(drafting=drafting) <= budget_bytes
        fits &= lent <= min(missing, (budget_bytes - fixed) // _SLOTS_SHARE)
        if not fits:
            break
        chunk = longer
    return chunk


def chunk_for(most: int, row_bytes: int, slot_bytes: int, num_slots: int, missing: int) -> int:
    """Of passes of up to `most` tokens, those that are worth what they are lent: slots whose experts have to
    come over the link again.

    Args:
        row_bytes: that a token needs, see `expert_row_bytes`. slot_bytes, num_slots: of slots.
        missing: experts that have none.
    """
    room = min(num_slots // _SLOTS_SHARE, missing) * slot_bytes
    rows = min(most, room // row_bytes // DEVICE_PREFILL_CHUNK * DEVICE_PREFILL_CHUNK)
    return max(DEVICE_PREFILL_CHUNK, rows)
