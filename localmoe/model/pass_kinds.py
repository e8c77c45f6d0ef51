"""What captured passes are told apart by, which of them serve a pass, and which the next answers will likely
ask for. Captures none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from localmoe.model.device_choice import ChoiceKind
    from localmoe.model.device_experts import DevicePassState

WINDOW_BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 72)  # rows that windows are padded to
_LEAST_VISIBLE = 1024  # cache positions of the smallest graphs; each next size is four times as large
# every answer has windows of one row, and the widest serves where the fitting one is not there
_FIRST_WANTED = (1, WINDOW_BUCKETS[-1])


class PassKind(NamedTuple):
    """Passes of one kind issue the same kernels.

    Attributes:
        rows: of a window; 0: a draft pass.
        visible: cache positions that it may look at.
        choice: how it chooses tokens.
        lane: whether a window takes the CPU lane.
        ahead: whether a window of one row looks ahead (DevicePassState.ahead).
        fused: whether a draft's experts are one kernel (core.switches).
    """

    rows: int
    visible: int
    choice: ChoiceKind
    lane: bool = False
    ahead: bool = False
    fused: bool = True


def visible_for(length: int, capacity: int) -> int:
    """Cache positions that a pass up to `length` is made for."""
    visible = _LEAST_VISIBLE
    while visible < length:
        visible *= 4
    return min(visible, capacity)


def serving(
    state: DevicePassState, choice: ChoiceKind, rows: int, start: int, capacity: int
) -> Iterator[list[PassKind]]:
    """Kinds that do for a window of `rows` tokens, or a draft pass (0), behind `start` positions: of as many
    rows, then of more. Each list has those that cost alike, the smallest first: what a longer text would have
    costs little while it is not there."""
    for enough in [0] if not rows else [bucket for bucket in WINDOW_BUCKETS if bucket >= rows]:
        visible = visible_for(start + enough, capacity)
        sizes = dict.fromkeys((visible, visible_for(visible + 1, capacity)))
        yield [_kind(state, choice, enough, positions) for positions in sizes]


def likely(state: DevicePassState, choice: ChoiceKind, length: int, capacity: int) -> list[PassKind]:
    """Kinds that the next answers will likely ask for behind a text of `length` tokens, the likeliest first.
    A text that comes near the end of a size is prepared for the next one."""
    visible = visible_for(length + length // 3 + 1, capacity)
    drafts = [0] if state.drafts else []
    return [
        _kind(state, choice, rows, visible)
        for rows in dict.fromkeys((*drafts, *_FIRST_WANTED, *WINDOW_BUCKETS))
    ]


def _kind(state: DevicePassState, choice: ChoiceKind, rows: int, visible: int) -> PassKind:
    if not rows:
        return PassKind(0, visible, choice, fused=state.fused_draft)
    return PassKind(rows, visible, choice, state.lane_is_on, state.ahead and rows == 1)
