"""The division of a memory budget: what holds for every model and budget, and what a refusal says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from example_models import GIB, GPU, MACHINE, QWEN, footprints
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.errors import BudgetError, HardwareError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.core.units import parse_bytes, size_at_least, size_at_most
from localmoe.hardware.host_room import host_room
from localmoe.hardware.needs import PASS_PADDING, device_needs, kv_positions
from localmoe.hardware.plan import free_memory, plan_memory

PADDING = PASS_PADDING - 1  # rows that a pass may have beyond its tokens

SHAPE: dict[str, Any] = {"compute_bytes": 2, "checkpoint_bytes_per_weight": 2, "max_window": 9}
BUDGETS = st.integers(1, 2**44)
CONTEXTS = st.integers(16, 32768)


def plan(
    model: ModelFootprint, budget: int, context: int = 4096, *, drafting: bool = True, **changes: Any
) -> MemoryPlan:
    options = {**SHAPE, **changes}
    return plan_memory(model, budget_bytes=budget, context=context, drafting=drafting, **options)


def try_plan(model: ModelFootprint, budget: int, context: int, **changes: Any) -> MemoryPlan | None:
    try:
        return plan(model, budget, context, **changes)
    except BudgetError:
        return None


@given(model=footprints(), budget=BUDGETS, context=CONTEXTS, drafting=st.booleans())
def test_a_plan_never_exceeds_its_budget_and_has_the_slots_that_a_token_needs(
    model: ModelFootprint, budget: int, context: int, drafting: bool
) -> None:
    made = try_plan(model, budget, context, drafting=drafting)
    if made is None:
        return
    assert made.total_bytes <= budget
    assert min(model.total_experts, max(2, model.experts_per_token)) <= made.num_slots <= model.total_experts
    assert made.resident_share == made.num_slots / model.total_experts
    assert made.drafting == (made.draft_bytes > 0)
    assert drafting or not made.drafting
    left = budget - made.total_bytes
    assert made.num_slots == model.total_experts or left < made.slot_bytes


@given(model=footprints(), budget=BUDGETS, more=BUDGETS, context=CONTEXTS, drafting=st.booleans())
def test_a_larger_budget_never_gives_less(
    model: ModelFootprint, budget: int, more: int, context: int, drafting: bool
) -> None:
    small = try_plan(model, budget, context, drafting=drafting)
    large = try_plan(model, budget + more, context, drafting=drafting)
    if small is None:
        return
    assert large is not None
    assert large.drafting >= small.drafting
    if large.drafting == small.drafting:
        assert large.num_slots >= small.num_slots


@given(model=footprints(), budget=BUDGETS, context=CONTEXTS, shorter=CONTEXTS)
def test_a_shorter_context_never_needs_more(
    model: ModelFootprint, budget: int, context: int, shorter: int
) -> None:
    long = try_plan(model, budget, max(context, shorter), drafting=False)
    short = try_plan(model, budget, min(context, shorter), drafting=False)
    assert long is None or (short is not None and short.num_slots >= long.num_slots)


@given(model=footprints(), context=CONTEXTS, required=st.booleans())
def test_the_budget_that_a_refusal_names_works_and_is_tight(
    model: ModelFootprint, context: int, required: bool
) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(model, 1, context, drafting_required=required)
    named = re.search(r"budget of at least (\w+)", str(caught.value))
    assert named is not None
    budget = parse_bytes(named.group(1))
    assert plan(model, budget, context, drafting_required=required).drafting or not required
    assert try_plan(model, budget - (1 << 20) - 1, context, drafting_required=required) is None


@given(model=footprints(), shorter=CONTEXTS, longer=st.integers(1, 32768), required=st.booleans())
def test_the_context_that_a_refusal_names_fits_and_no_longer_one_does(
    model: ModelFootprint, shorter: int, longer: int, required: bool
) -> None:
    budget = device_needs(model, context=shorter, **SHAPE).least_bytes(drafting=required)
    try:
        plan(model, budget, shorter + longer, drafting=required, drafting_required=required)
    except BudgetError as error:
        named = re.search(r"context of at most (\d+) tokens", str(error))
        assert named is not None
        longest = int(named.group(1))
        assert shorter <= longest < shorter + longer
        for context, fits in ((longest, True), (longest + 1, False)):
            made = try_plan(model, budget, context, drafting=required, drafting_required=required)
            assert (made is not None) == fits


def test_no_context_is_named_where_none_would_fit() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(QWEN, GIB)
    assert "context of at most" not in str(caught.value)


def test_a_real_model_fits_twelve_gibibytes_only_with_a_short_list_of_slots() -> None:
    made = plan(QWEN, 12 * GIB)
    assert made.drafting and made.drafting_reason == ""
    assert made.draft_bytes == 24 * 60 * QWEN.draft_expert_bytes
    assert made.kv_bytes == kv_positions(4096) * QWEN.kv_bytes_per_token
    assert made.shared_bytes == QWEN.shared_bytes
    assert made.slot_bytes == 2 * QWEN.expert_params
    assert 4 <= made.num_slots < QWEN.total_experts
    assert made.host_bytes == 24 * 60 * QWEN.expert_bytes


def test_float32_compute_doubles_what_a_16_bit_checkpoint_needs() -> None:
    half, full = plan(QWEN, 200 * GIB), plan(QWEN, 200 * GIB, compute_bytes=4)
    for part in ("shared_bytes", "kv_bytes", "slot_bytes"):
        assert getattr(full, part) == 2 * getattr(half, part)
    assert full.draft_bytes == half.draft_bytes and full.host_bytes == half.host_bytes


def test_reading_a_picture_takes_twice_as_much_in_float32() -> None:
    reads = replace(QWEN, image_bytes=300 << 20)
    for compute_bytes in (2, 4):
        made, blind = (plan(model, 200 * GIB, compute_bytes=compute_bytes) for model in (reads, QWEN))
        assert made.workspace_bytes - blind.workspace_bytes == (150 << 20) * compute_bytes


def test_a_float32_checkpoint_computed_in_float32_keeps_its_bytes() -> None:
    made = plan(QWEN, 200 * GIB, compute_bytes=4, checkpoint_bytes_per_weight=4)
    assert made.shared_bytes == QWEN.shared_bytes


def test_a_budget_beyond_need_makes_every_expert_resident_and_leaves_the_rest() -> None:
    made = plan(QWEN, 1000 * GIB)
    assert made.num_slots == QWEN.total_experts and made.resident_share == 1.0
    assert made.total_bytes < 100 * GIB


def test_a_draft_that_does_not_fit_is_left_out_with_a_reason_in_numbers() -> None:
    made = plan(QWEN, 7 * GIB)
    assert not made.drafting and made.draft_bytes == 0 and made.num_slots > 0
    assert "GiB" in made.drafting_reason
    named = re.search(r"(\w+) would do", made.drafting_reason)
    assert named is not None and plan(QWEN, parse_bytes(named.group(1))).drafting


def test_a_draft_that_must_fit_and_does_not_is_refused_by_name() -> None:
    with pytest.raises(BudgetError, match="low-bit draft"):
        plan(QWEN, 7 * GIB, drafting_required=True)


def test_the_caller_s_reason_for_not_drafting_is_kept() -> None:
    made = plan(QWEN, 100 * GIB, drafting=False, drafting_reason="turned off")
    assert not made.drafting and made.drafting_reason == "turned off"


def test_a_refusal_names_each_part_in_one_sentence() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(QWEN, GIB, drafting=False)
    text = str(caught.value)
    for part in ("1.0 GiB", "shared weights need 3.5 GiB", "KV cache for 4096 tokens", "4 expert slots"):
        assert part in text
    assert "\n" not in text and text.endswith(".")


@given(context=CONTEXTS)
def test_the_cache_has_room_for_the_context_and_a_padded_pass_in_whole_blocks(context: int) -> None:
    assert kv_positions(context) >= context + PADDING
    assert kv_positions(context) % 128 == 0
    assert kv_positions(context) < context + PADDING + 128


@given(window=st.integers(1, 64))
def test_a_longer_window_needs_no_less_workspace(window: int) -> None:
    shape = {"context": 4096, "compute_bytes": 2, "checkpoint_bytes_per_weight": 2}
    shorter = device_needs(QWEN, **shape, max_window=window).workspace_bytes
    assert device_needs(QWEN, **shape, max_window=window + 1).workspace_bytes >= shorter


@given(st.integers(1, 2**50))
def test_a_size_to_type_is_never_less_than_asked_and_one_to_stay_under_never_more(num_bytes: int) -> None:
    assert num_bytes <= parse_bytes(size_at_least(num_bytes)) < num_bytes * 1.02 + 1024
    assert num_bytes * 0.98 - 1 < parse_bytes(size_at_most(num_bytes)) <= num_bytes


def budget_on(machine: Any, model: ModelFootprint = QWEN, device: Any = "cuda", **more: Any) -> int:
    """As where no budget is named."""
    needs = device_needs(model, context=4096, **SHAPE)
    return min(free_memory(machine, needs, device=device, **more), needs.most_bytes(drafting=True))


@given(model=footprints(), free=st.integers(0, 200 * GIB), ram=st.integers(0, 2000 * GIB))
def test_an_automatic_budget_stays_within_what_is_free_and_what_is_useful(
    model: ModelFootprint, free: int, ram: int
) -> None:
    gpu = replace(GPU, total_bytes=200 * GIB, free_bytes=free)
    machine = replace(MACHINE, gpus=(gpu,), ram_available_bytes=ram)
    most = device_needs(model, context=4096, **SHAPE).most_bytes(drafting=True)
    on_gpu, on_cpu = budget_on(machine, model), budget_on(machine, model, "cpu")
    assert 1 <= on_gpu <= min(max(1, free - GIB // 2), most)
    assert 1 <= on_cpu <= min(max(1, ram - model.total_experts * model.expert_bytes), most)
    host = host_room(machine, device="cpu")
    assert on_cpu == 1 or on_cpu + model.total_experts * model.expert_bytes <= host.room_bytes


def test_an_automatic_budget_on_a_16_gib_gpu_gives_a_working_plan_with_a_draft() -> None:
    budget = budget_on(replace(MACHINE, gpus=(GPU,)))
    assert 14 * GIB < budget < 15 * GIB
    assert plan(QWEN, budget).drafting


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_automatic_budget_is_the_same_again_when_the_model_is_loaded(device: Any) -> None:
    held = 5 * GIB
    fresh = replace(MACHINE, gpus=(GPU,), ram_available_bytes=40 * GIB)
    loaded_gpu = replace(GPU, free_bytes=GPU.free_bytes - held)
    loaded = replace(fresh, gpus=(loaded_gpu,), ram_available_bytes=40 * GIB - held)
    assert budget_on(loaded, device=device) < budget_on(fresh, device=device)
    assert budget_on(loaded, device=device, held_bytes=held) == budget_on(fresh, device=device)


def test_an_automatic_budget_for_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(HardwareError, match=r"no CUDA device 0 \(a build without CUDA\)"):
        budget_on(replace(MACHINE, gpu_note="a build without CUDA"))


@given(model=footprints(), budget=BUDGETS, context=CONTEXTS, saved=st.integers(0, 1 << 30))
def test_a_packed_head_leaves_what_it_saves_to_experts_where_steps_run_whole_on_a_gpu(
    model: ModelFootprint, budget: int, context: int, saved: int
) -> None:
    saved = min(saved, model.shared_bytes - 2 * model.embedding_params)
    could = replace(model, head_saved_bytes=saved)
    packed = could.in_codes()
    assert packed.packs_head == (saved > 0) and not could.in_codes(packing=False).packs_head
    assert packed.in_16_bits() == could
    for layers in ({"whole_passes": True}, {"in_place": True}, {}):
        plain, away = (device_needs(m, context=context, **SHAPE, **layers) for m in (could, packed))
        less = saved if "whole_passes" in layers else 0
        assert plain.shared_bytes - away.shared_bytes == less
        assert replace(away, shared_bytes=plain.shared_bytes) == plain
    made, without = (try_plan(m, budget, context, whole_passes=True) for m in (packed, could))
    assert without is None or (made is not None and without.num_slots <= made.num_slots)


@given(model=footprints(), budget=BUDGETS, context=CONTEXTS, wide=st.booleans())
def test_an_input_embedding_leaves_its_room_on_a_gpu_to_experts(
    model: ModelFootprint, budget: int, context: int, wide: bool
) -> None:
    shape = {**SHAPE, "compute_bytes": 4 if wide else 2}
    for layers in ({"whole_passes": True}, {"in_place": True}):
        without = replace(model, embedding_params=0)
        here, away = (device_needs(m, context=context, **shape, **layers) for m in (without, model))
        assert here.shared_bytes - away.shared_bytes == model.embedding_params * shape["compute_bytes"]
        assert away.host_bytes - here.host_bytes == away.embedding_bytes == 2 * model.embedding_params
        assert replace(away, shared_bytes=here.shared_bytes, embedding_bytes=0) == here
    made = try_plan(model, budget, context, whole_passes=True)
    if made is not None:
        assert made.host_embedding_bytes == 2 * model.embedding_params
        assert made.host_bytes == model.total_experts * model.expert_bytes + made.host_embedding_bytes
        without = try_plan(replace(model, embedding_params=0), budget, context, whole_passes=True)
        assert without is None or without.num_slots <= made.num_slots
    by_layers = try_plan(model, budget, context)
    assert by_layers is None or by_layers.host_embedding_bytes == 0
