"""Which captured passes serve a pass, and which are captured ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from localmoe.model.pass_kinds import WINDOW_BUCKETS, likely, serving, visible_for
from localmoe.model.step_graphs import MAX_GRAPHS


def state(draft: bool = True, lane: bool = True, ahead: bool = True) -> Any:
    return SimpleNamespace(drafts=draft, fused_draft=True, lane_is_on=lane, ahead=ahead)


@given(st.integers(0, WINDOW_BUCKETS[-1]), st.integers(0, 40_000), st.integers(100, 50_000), st.booleans())
def test_what_serves_has_room_for_the_pass_and_begins_with_the_smallest(
    rows: int, start: int, capacity: int, ahead: bool
) -> None:
    start = min(start, capacity - WINDOW_BUCKETS[-1])  # caches have room for a whole window behind a text
    groups = list(serving(state(ahead=ahead), "sampled", rows, max(start, 0), capacity))
    assert all(len({kind.rows for kind in alike}) == 1 for alike in groups)
    found = [kind for alike in groups for kind in alike]
    assert found and len(set(found)) == len(found)
    for kind in found:
        assert kind.rows >= rows and (kind.rows == 0) == (rows == 0)
        assert min(start + kind.rows, capacity) <= kind.visible <= capacity
        assert not kind.ahead or kind.rows == 1
    assert found == sorted(found, key=lambda kind: (kind.rows, kind.visible))
    first = found[0]
    assert first.visible == visible_for(max(start, 0) + first.rows, capacity)


@given(st.integers(0, 30_000), st.booleans(), st.booleans())
def test_what_is_captured_ahead_serves_every_pass_that_may_come(
    length: int, draft: bool, ahead: bool
) -> None:
    capacity, now = 32_840, state(draft=draft, ahead=ahead)
    ready = likely(now, "argmax", length, capacity)
    assert len(set(ready)) == len(ready) <= MAX_GRAPHS
    for rows in ([0] if draft else []) + list(WINDOW_BUCKETS):
        alike = next(serving(now, "argmax", rows, length, capacity))
        assert any(kind in ready for kind in alike), "no pass of a likely size is captured in an answer"
    assert [kind.rows for kind in ready][: 2 + draft] == ([0] if draft else []) + [1, WINDOW_BUCKETS[-1]]


def test_a_text_near_the_end_of_a_size_is_prepared_for_the_next() -> None:
    assert {kind.visible for kind in likely(state(), "argmax", 0, 8192)} == {1024}
    assert {kind.visible for kind in likely(state(), "argmax", 800, 8192)} == {4096}
    assert {kind.visible for kind in likely(state(), "argmax", 8000, 8192)} == {8192}
