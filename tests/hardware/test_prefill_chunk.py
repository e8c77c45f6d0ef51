"""How long a prompt's passes are: what their room takes of the memory is little, and it is taken only where
it spares copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from example_models import GIB, QWEN, footprints
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.errors import BudgetError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK, device_needs, expert_row_bytes
from localmoe.hardware.plan import plan_memory
from localmoe.hardware.prefill_chunk import MOST_ROWS, choose_chunk, chunk_for

OPTIONS: Any = {
    "compute_bytes": 2, "checkpoint_bytes_per_weight": 2, "max_window": 80, "whole_passes": True,
}  # fmt: skip


def plan(
    model: ModelFootprint, budget: int, context: int, chunk: int, *, drafting: bool
) -> MemoryPlan | None:
    options = {**OPTIONS, "prefill_chunk": chunk}
    try:
        return plan_memory(model, budget_bytes=budget, context=context, drafting=drafting, **options)
    except BudgetError:
        return None


@given(
    model=footprints(), budget=st.integers(1, 2**40), context=st.integers(16, 40_000), drafting=st.booleans(),
)  # fmt: skip
def test_longer_passes_take_little_of_the_memory_and_nothing_that_a_draft_would_have(
    model: ModelFootprint, budget: int, context: int, drafting: bool
) -> None:
    chunk = choose_chunk(model, budget, context, OPTIONS, drafting=drafting)
    assert chunk % DEVICE_PREFILL_CHUNK == 0 and DEVICE_PREFILL_CHUNK <= chunk <= MOST_ROWS
    assert chunk < context + DEVICE_PREFILL_CHUNK
    usual = plan(model, budget, context, DEVICE_PREFILL_CHUNK, drafting=drafting)
    found = plan(model, budget, context, chunk, drafting=drafting)
    if usual is None or found is None or usual.num_slots == model.total_experts:
        assert chunk == DEVICE_PREFILL_CHUNK
        return
    assert found.drafting == usual.drafting and found.prefill_chunk == chunk
    fixed = [made.total_bytes - made.num_slots * made.slot_bytes for made in (usual, found)]
    missing = (model.total_experts - usual.num_slots) * usual.slot_bytes
    assert fixed[1] - fixed[0] <= min(budget // 48, missing // 32)
    if chunk > DEVICE_PREFILL_CHUNK:  # and what experts compute has room in a quarter of the slots
        lent = min(chunk, context) * expert_row_bytes(model)
        assert lent <= missing and 4 * lent <= budget - fixed[1]


@pytest.mark.parametrize(("gib", "chunk"), [(8, 3072), (12, 4096), (16, 6144), (40, 1024)])
def test_passes_are_the_longer_the_more_memory_there_is_until_no_expert_is_missing(
    gib: int, chunk: int
) -> None:
    assert choose_chunk(QWEN, gib * GIB, 8192, OPTIONS, drafting=False) == chunk
    assert choose_chunk(QWEN, gib * GIB, 1000, OPTIONS, drafting=False) == DEVICE_PREFILL_CHUNK


@given(
    most=st.integers(1, 8).map(lambda count: count * DEVICE_PREFILL_CHUNK), row=st.integers(1, 10**6),
    slot=st.integers(1, 10**9), slots=st.integers(2, 5000), missing=st.integers(0, 5000),
)  # fmt: skip
def test_a_pass_is_lent_a_quarter_of_the_slots_at_most_and_fewer_than_experts_are_missing(
    most: int, row: int, slot: int, slots: int, missing: int
) -> None:
    rows = chunk_for(most, row, slot, slots, missing)
    assert DEVICE_PREFILL_CHUNK <= rows <= most and rows % DEVICE_PREFILL_CHUNK == 0
    if rows > DEVICE_PREFILL_CHUNK:
        assert -(-rows * row // slot) <= min(slots // 4, missing)
    if rows < most:
        assert (rows + DEVICE_PREFILL_CHUNK) * row > min(slots // 4, missing) * slot


def test_a_recurrent_layer_that_needs_more_for_a_row_than_others_has_room_for_it() -> None:
    options = {**OPTIONS, "prefill_chunk": 2 * DEVICE_PREFILL_CHUNK, "context": 16_384}
    usual, wide = 16 * 2 * QWEN.hidden_size, 60 * 2 * QWEN.hidden_size
    workspaces = [
        device_needs(replace(QWEN, state_row_bytes=size), **options).workspace_bytes
        for size in (0, usual // 2, wide)
    ]
    assert workspaces[0] == workspaces[1]
    rows = 2 * DEVICE_PREFILL_CHUNK
    assert workspaces[2] - workspaces[0] == rows * (wide + 2 * 2 * QWEN.hidden_size - usual)
