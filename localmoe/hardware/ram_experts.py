"""How many experts RAM holds of a model whose experts lie in a file on the disk. Measures nothing and reads
nothing."""

from __future__ import annotations

from localmoe.core.errors import BudgetError
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_bytes, size_at_least
from localmoe.hardware.host_room import HostRoom

_PAGE_BYTES = 4096  # records lie in whole ones


def ram_experts(footprint: ModelFootprint, host: HostRoom, taken_bytes: int, budget_bytes: int | None) -> int:
    """As many as there is room for, but no more than there are.

    Args:
        taken_bytes: of the room, by all else of the model.
        budget_bytes: that they may take at most; None: all that is left.

    Raises:
        BudgetError: not even those of a layer, which one pass may ask for together.
    """
    left = max(0, host.room_bytes - taken_bytes)
    if budget_bytes is not None and budget_bytes <= left:
        return budget_experts(footprint, budget_bytes)
    count, least = _fitting(footprint, left), min(footprint.num_experts, footprint.total_experts)
    if count < least:
        wanted = ram_bytes(footprint, least)
        raise BudgetError(
            f"The {least} experts of a layer of {footprint.name} need {format_bytes(wanted)} of RAM at a "
            f"time, and of the {format_bytes(host.available_bytes)} available {format_bytes(left)} are left "
            f"for them ({host.reason}): close other programs, or use a smaller model."
        )
    return count


def budget_experts(footprint: ModelFootprint, budget_bytes: int) -> int:
    """How many so much RAM holds. Raises BudgetError: as `ram_experts`."""
    count, least = _fitting(footprint, budget_bytes), min(footprint.num_experts, footprint.total_experts)
    if count < least:
        raise BudgetError(
            f"A RAM budget of {format_bytes(budget_bytes)} does not hold the {least} experts of a layer "
            f"of {footprint.name}: give at least {size_at_least(ram_bytes(footprint, least))}."
        )
    return count


def _fitting(footprint: ModelFootprint, num_bytes: int) -> int:
    return min(num_bytes // ram_bytes(footprint, 1), footprint.total_experts)


def left_to_them(footprint: ModelFootprint, budget_bytes: int | None) -> int:
    """Bytes of RAM that slots in the same RAM leave to them: the budget, or those of a layer, as what is in
    a slot need not be read."""
    least = ram_bytes(footprint, min(footprint.num_experts, footprint.total_experts))
    most = ram_bytes(footprint, footprint.total_experts)
    return least if budget_bytes is None else max(least, min(most, budget_bytes))


def ram_bytes(footprint: ModelFootprint, count: int) -> int:
    """Of so many records there, each in whole pages."""
    return count * -(-footprint.expert_bytes // _PAGE_BYTES) * _PAGE_BYTES
