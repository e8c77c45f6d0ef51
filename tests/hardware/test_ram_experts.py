"""How many experts RAM holds of a model on the disk, and what a refusal says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

import pytest
from example_models import GIB, MACHINE, QWEN, footprints
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.errors import BudgetError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.core.units import parse_bytes
from localmoe.hardware.host_room import HostRoom, host_room
from localmoe.hardware.needs import device_needs
from localmoe.hardware.plan import plan_memory
from localmoe.hardware.ram_experts import ram_bytes, ram_experts

BYTES = st.integers(1, 2**44)
DEVICES: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")


def room(available: int, device: Literal["cpu", "cuda"] = "cpu") -> HostRoom:
    hardware = replace(MACHINE, ram_total_bytes=2 * available, ram_available_bytes=available)
    return host_room(hardware, device=device)


def plan(model: ModelFootprint, host: HostRoom, budget: int, ram_budget: int | None) -> MemoryPlan:
    return plan_memory(
        model, budget_bytes=budget, context=1024, compute_bytes=2, checkpoint_bytes_per_weight=2,
        max_window=9, drafting=False, host=host, on_disk=True, ram_budget_bytes=ram_budget,
    )  # fmt: skip


@given(footprints(), BYTES, BYTES, st.one_of(st.none(), BYTES), st.sampled_from(DEVICES))
def test_all_that_is_held_in_ram_fits_there(
    model: ModelFootprint, available: int, budget: int, ram_budget: int | None, device: Literal["cpu", "cuda"]
) -> None:
    host = room(available, device)
    try:
        made = plan(model, host, budget, ram_budget)
    except BudgetError as error:
        assert "\n" not in str(error)
        return
    assert min(model.num_experts, model.total_experts) <= made.ram_experts <= model.total_experts
    assert ram_bytes(model, made.ram_experts) <= (ram_budget or 2**63)
    beside = made.total_bytes if device == "cpu" else 0
    assert made.host_bytes + beside <= host.room_bytes
    assert made.host_bytes >= ram_bytes(model, made.ram_experts)
    assert made.disk_bytes == model.total_experts * model.expert_bytes


@given(footprints(), st.integers(1, 2**40))
def test_a_budget_that_is_refused_names_one_that_fits(model: ModelFootprint, ram_budget: int) -> None:
    try:
        ram_experts(model, room(2**50), 0, ram_budget)
    except BudgetError as error:
        named = re.search(r"give at least (\S+)\.$", str(error))
        assert named, error
        least = min(model.num_experts, model.total_experts)
        assert ram_experts(model, room(2**50), 0, parse_bytes(named[1])) >= least


def test_where_too_little_is_free_the_refusal_says_how_much() -> None:
    with pytest.raises(BudgetError, match=r"need .* of RAM at a time, and of the 1\.0 GiB available"):
        ram_experts(QWEN, room(GIB), GIB, None)
    with pytest.raises(BudgetError, match="close other programs"):  # the budget would do
        ram_experts(QWEN, room(GIB), GIB, 64 * GIB)


def test_records_on_the_disk_take_none_of_what_a_model_needs_in_ram() -> None:
    options = {"context": 1024, "compute_bytes": 2, "checkpoint_bytes_per_weight": 2, "max_window": 9}
    in_ram, on_disk = (device_needs(QWEN, **options, on_disk=disk) for disk in (False, True))  # type: ignore[arg-type]
    assert on_disk.host_bytes == in_ram.host_bytes - in_ram.record_bytes
    assert on_disk.disk_bytes == in_ram.record_bytes
