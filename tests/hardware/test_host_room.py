"""Host RAM: what is left to the system, what can be pinned, and what a refusal says, which then fits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

import pytest
from example_models import GIB, MACHINE, QWEN, footprints
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.errors import BudgetError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.core.units import parse_bytes
from localmoe.hardware.host_room import HostRoom, host_room, texts_room
from localmoe.hardware.needs import device_needs
from localmoe.hardware.plan import plan_memory

Device = Literal["cpu", "cuda"]
SHAPE: dict[str, Any] = {"compute_bytes": 2, "checkpoint_bytes_per_weight": 2, "max_window": 9}
RAM = st.integers(0, 2**42)
QWEN_RECORDS = QWEN.total_experts * QWEN.expert_bytes


def room(available: int, device: Device = "cuda", total: int = 64 * GIB, system: str = "Linux") -> HostRoom:
    machine = replace(MACHINE, ram_total_bytes=total, ram_available_bytes=available, platform=system)
    return host_room(machine, device=device)


def plan(model: ModelFootprint, budget: int, host: HostRoom, **changes: Any) -> MemoryPlan:
    options = {"context": 4096, "drafting": True, **SHAPE, **changes}
    return plan_memory(model, budget_bytes=budget, host=host, **options)


def size_after(words: str, text: str) -> int:
    """The size that a refusal names after these words."""
    found = re.search(rf"{words} (\w+)", text)
    assert found is not None, text
    return parse_bytes(found.group(1))


@given(available=RAM, more=RAM, device=st.sampled_from(["cpu", "cuda"]))
def test_the_system_keeps_its_share_and_more_memory_never_means_less_room(
    available: int, more: int, device: Device
) -> None:
    total = available + more
    found = room(available, device, total)
    left = available - found.room_bytes
    assert 0 <= found.room_bytes <= available == found.available_bytes
    assert left >= min(2 * GIB, available // 4) and left >= min(total // 20, available // 4)
    assert room(total, device, total).room_bytes >= found.room_bytes


def test_two_gibibytes_stay_free_or_a_twentieth_of_a_large_machine_or_a_quarter_of_a_busy_one() -> None:
    assert room(30 * GIB, total=32 * GIB).room_bytes == 28 * GIB
    assert room(190 * GIB, total=200 * GIB).room_bytes == 180 * GIB
    assert room(4 * GIB).room_bytes == 3 * GIB
    assert room(60 * GIB, "cpu").room_bytes == 48 * GIB, "what computes in RAM leaves a fifth of it"


@given(total=RAM, available=RAM, held=RAM, limit=st.none() | RAM)
def test_texts_that_were_left_take_no_more_than_their_share_and_leave_the_system_its_own(
    total: int, available: int, held: int, limit: int | None
) -> None:
    available = min(available, total)
    room = texts_room(total, available, held, limit)
    assert 0 <= room <= (total // 16 if limit is None else limit)
    left = available + held - room
    assert left >= min(2 * GIB, (available + held) // 4) - 1
    assert texts_room(total, available, held + 1, limit) >= room, "what they hold already is theirs"


def test_texts_take_a_sixteenth_or_what_was_named_as_far_as_it_is_free() -> None:
    assert texts_room(32 * GIB, 20 * GIB, 0, None) == 2 * GIB
    assert texts_room(32 * GIB, 20 * GIB, 0, 5 * GIB) == 5 * GIB
    assert texts_room(32 * GIB, 1 * GIB, 0, None) == 3 * GIB // 4
    assert texts_room(32 * GIB, 1 * GIB, 1 * GIB, 5 * GIB) == 3 * GIB // 2
    assert texts_room(32 * GIB, 20 * GIB, 0, 0) == 0


@pytest.mark.parametrize(
    ("system", "pinned"),
    [
        ("Windows-10-10.0.22631-SP0", True),
        ("Linux-5.15.167.4-microsoft-standard-WSL2-x86_64-with-glibc2.39", True),
        ("Linux-6.8.0-45-generic-x86_64-with-glibc2.39", False),
    ],
)
def test_windows_pins_at_most_half_of_the_ram_and_linux_has_no_such_limit(system: str, pinned: bool) -> None:
    assert room(30 * GIB, total=32 * GIB, system=system).room_bytes == (16 if pinned else 28) * GIB
    assert room(8 * GIB, total=32 * GIB, system=system).room_bytes == 6 * GIB, "the smaller limit counts"
    on_cpu = room(30 * GIB, "cpu", total=32 * GIB, system=system)
    assert on_cpu == room(30 * GIB, "cpu", total=32 * GIB), "nothing is pinned without a GPU"
    if pinned:
        with pytest.raises(BudgetError, match=r"lets the GPU's driver pin 16\.0 GiB, half of the RAM"):
            plan(QWEN, 100 * GIB, room(30 * GIB, total=32 * GIB, system=system))


def test_records_that_fit_exactly_are_accepted_and_one_byte_less_is_refused_with_all_numbers() -> None:
    exact = HostRoom(QWEN_RECORDS + GIB, QWEN_RECORDS, "1.0 GiB of them stay free", holds_slots=False)
    assert plan(QWEN, 100 * GIB, exact).host_bytes == QWEN_RECORDS
    with pytest.raises(BudgetError) as caught:
        plan(QWEN, 100 * GIB, replace(exact, room_bytes=QWEN_RECORDS - 1))
    text = str(caught.value)
    for part in (
        "need 23.2 GiB of host RAM",
        "24.2 GiB available",
        "23.2 GiB may be used",
        "1.0 GiB of them",
    ):
        assert part in text
    assert "\n" not in text and text.endswith(".")


@given(model=footprints(), available=RAM)
def test_a_model_as_small_as_a_refusal_says_is_accepted(model: ModelFootprint, available: int) -> None:
    host = room(available)
    try:
        made = plan(model, 2**50, host)
    except BudgetError as error:
        if "experts take at most" not in str(error):
            assert host.room_bytes < 1 << 20 and re.search("close other programs[.,]", str(error))
            return
        named = size_after("experts take at most", str(error))
        small = replace(model, expert_bytes=named // 2, num_layers=1, num_experts=2, experts_per_token=1)
        needed = model.total_experts * model.expert_bytes
        assert plan(small, 2**50, host).host_bytes <= host.room_bytes < needed
    else:
        assert made.host_bytes <= host.room_bytes


@given(model=footprints(), available=RAM, device=st.sampled_from(["cpu", "cuda"]))
def test_the_disk_is_named_by_a_refusal_where_it_is_a_way_on_and_nowhere_else(
    model: ModelFootprint, available: int, device: Device
) -> None:
    host = room(available, device)
    options: dict[str, Any] = {"drafting": False, "in_place": device == "cpu"}
    needs = device_needs(model, context=4096, in_place=device == "cpu", **SHAPE)
    budget = needs.least_bytes(drafting=False)
    try:
        plan(model, budget, host, **options)
    except BudgetError as error:
        try:
            made = plan(model, budget, host, on_disk=True, **options)
        except BudgetError:
            assert "--experts-on disk" not in str(error)
        else:
            assert "--experts-on disk" in str(error) and made.ram_experts >= model.num_experts


@given(
    model=footprints(), available=RAM, budget=st.integers(1, 2**43), context=st.integers(16, 32768),
    required=st.booleans(),
)  # fmt: skip
def test_without_a_gpu_records_and_slots_stay_within_the_room_together_and_what_a_refusal_names_fits(
    model: ModelFootprint, available: int, budget: int, context: int, required: bool
) -> None:
    host = room(available, "cpu")
    changes: dict[str, Any] = {"context": context, "drafting_required": required}
    try:
        made = plan(model, budget, host, **changes)
    except BudgetError as error:
        text = str(error)
        if "budget of at most" in text:
            smaller = plan(model, size_after("budget of at most", text), host, **changes)
            assert smaller.total_bytes < budget
        elif "context of at most" in text and "budget of at least" not in text:
            found = re.search(r"context of at most (\d+)", text)
            assert found is not None and int(found.group(1)) < context
            shorter = device_needs(model, **{**SHAPE, "context": int(found.group(1))})
            least = shorter.least_bytes(drafting=required)
            assert plan(model, least, host, **{**changes, "context": int(found.group(1))})
        elif "budget of at least" in text:
            least = size_after("budget of at least", text)  # rounded up
            left = host.room_bytes - model.total_experts * model.expert_bytes
            assert plan(model, min(least, left), host, **changes)
        else:
            least = device_needs(model, **{**SHAPE, "context": 16}).least_bytes(drafting=required)
            assert model.total_experts * model.expert_bytes + least > host.room_bytes
    else:
        assert made.host_bytes + made.total_bytes <= host.room_bytes


def test_a_budget_that_does_not_fit_beside_the_records_is_refused_with_the_largest_that_does() -> None:
    host = room(50 * GIB, "cpu")
    with pytest.raises(
        BudgetError, match=r"budget of 30\.0 GiB .* beside 23\.2 GiB .* 40\.0 GiB may be"
    ) as caught:
        plan(QWEN, 30 * GIB, host)
    largest = size_after("budget of at most", str(caught.value))
    assert 0 <= host.room_bytes - QWEN_RECORDS - largest < 1 << 20
    made = plan(QWEN, largest, host)
    assert made.drafting and made.host_bytes + made.total_bytes <= host.room_bytes


def test_a_budget_that_a_model_does_not_use_needs_no_ram() -> None:
    host = room(100 * GIB, "cpu", total=128 * GIB)
    used = plan(QWEN, 1000 * GIB, host)
    assert used.num_slots == QWEN.total_experts
    assert used.host_bytes + used.total_bytes <= 80 * GIB


def test_ram_that_a_loaded_model_holds_counts_as_available_to_it() -> None:
    held = 5 * GIB
    loaded = replace(MACHINE, ram_available_bytes=MACHINE.ram_available_bytes - held)
    assert host_room(loaded, device="cpu", held_bytes=held) == host_room(MACHINE, device="cpu")
