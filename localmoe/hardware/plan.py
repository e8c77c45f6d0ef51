"""Divides a memory budget: shared weights, KV cache and workspace first, then the draft, and the rest is
slots. Measures nothing and allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from localmoe.core.errors import BudgetError, HardwareError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_bytes, size_at_least, size_at_most, typed_at_least
from localmoe.hardware.facts import Hardware
from localmoe.hardware.host_room import HostRoom, host_room
from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK, DeviceNeeds, device_needs
from localmoe.hardware.ram_experts import ram_bytes, ram_experts

_MIN_CONTEXT = 16
_VRAM_RESERVE_SHARE = 0.05  # of the device, for libraries, fragmentation and the display
_VRAM_RESERVE_BYTES = 512 << 20  # at least
_OR_ON_DISK = ", or keep {what} on the disk, at the price of speed (--experts-on disk)"


def plan_memory(
    footprint: ModelFootprint,
    *,
    budget_bytes: int,
    context: int,
    compute_bytes: int,
    checkpoint_bytes_per_weight: int,
    max_window: int,
    drafting: bool,
    drafting_reason: str = "",
    drafting_required: bool = False,
    host: HostRoom | None = None,
    library_bytes: int = 0,
    whole_passes: bool = False,
    in_place: bool = False,
    on_disk: bool = False,
    ram_budget_bytes: int | None = None,
    prefill_chunk: int = DEVICE_PREFILL_CHUNK,
) -> MemoryPlan:
    """The division of `budget_bytes` for one sequence of `context` tokens.

    Args:
        compute_bytes: bytes a weight on the device (2 or 4).
        checkpoint_bytes_per_weight: bytes a weight in the checkpoint.
        max_window: most tokens verified in one pass.
        drafting: whether a draft is wanted; `drafting_reason` says why not.
        drafting_required: refuse, rather than plan without a draft, where it does not fit.
        host: RAM for the expert records (and, where it holds them, the slots); None skips the check.
        library_bytes: device memory that the matrix library takes for itself.
        whole_passes, in_place, on_disk, prefill_chunk: see `device_needs`.
        ram_budget_bytes: of RAM for experts that lie on the disk; None: all that is left.

    Raises:
        BudgetError: the device budget or the host RAM is too small; what the message names fits.
    """

    needs_at = partial(
        device_needs,
        footprint,
        compute_bytes=compute_bytes,
        checkpoint_bytes_per_weight=checkpoint_bytes_per_weight,
        max_window=max_window,
        library_bytes=library_bytes,
        whole_passes=whole_passes,
        in_place=in_place,
        on_disk=on_disk,
        prefill_chunk=prefill_chunk,
    )
    needs = needs_at(context=context)
    if host is not None:
        _check_host(footprint, host, context, needs_at, drafting=drafting and drafting_required)
    drafted, reason = drafting, "" if drafting else drafting_reason
    if drafting and not drafting_required and needs.least_bytes(drafting=True) > budget_bytes:
        drafted, reason = False, _why_no_draft(footprint, budget_bytes, needs)
    if needs.least_bytes(drafting=drafted) > budget_bytes:
        shorter = _longest_context(budget_bytes, context, needs_at, drafting=drafted)
        raise BudgetError(
            _too_small(footprint, budget_bytes, context, needs, shorter, drafting=drafted),
            budget_bytes=typed_at_least(needs.least_bytes(drafting=drafted)),
            context=shorter,
        )
    free = budget_bytes - needs.fixed_bytes(drafting=drafted)
    num_slots = needs.max_slots if in_place else min(free // max(1, needs.slot_bytes), needs.max_slots)
    plan = MemoryPlan(
        budget_bytes=budget_bytes,
        context=context,
        shared_bytes=needs.shared_bytes,
        draft_bytes=needs.draft_bytes if drafted else 0,
        kv_bytes=needs.kv_bytes,
        workspace_bytes=needs.workspace_bytes,
        slot_bytes=footprint.expert_bytes if in_place else needs.slot_bytes,
        num_slots=num_slots,
        resident_share=num_slots / needs.max_slots,
        drafting=drafted,
        drafting_reason=reason,
        host_bytes=needs.host_bytes,
        host_embedding_bytes=needs.embedding_bytes,
        host_aside_bytes=needs.aside_bytes,
        disk_bytes=needs.disk_bytes,
        in_place=in_place,
        prefill_chunk=prefill_chunk,
    )
    if host is not None and host.holds_slots:
        _check_beside_records(footprint, host, plan)
    if on_disk and host is not None:
        taken = plan.host_bytes + (plan.total_bytes if host.holds_slots else 0)
        count = ram_experts(footprint, host, taken, ram_budget_bytes)
        held = ram_bytes(footprint, count)
        plan = replace(plan, ram_experts=count, host_bytes=plan.host_bytes + held)
    return plan


def free_memory(
    hardware: Hardware,
    needs: DeviceNeeds,
    *,
    device: Literal["cpu", "cuda"],
    gpu_index: int = 0,
    held_bytes: int = 0,
) -> int:
    """What may be taken where no budget is named: what is free, less a reserve. On CPU the "device" is RAM
    too, beside the expert records. May be less than the model needs; `plan_memory` says so.

    Args:
        held_bytes: what of that memory the caller holds for this model already (on CPU with its expert
            records) and will use again; 0 before loading.

    Raises:
        HardwareError: there is no such GPU.
    """
    if device == "cpu":
        host = host_room(hardware, device="cpu", held_bytes=held_bytes)
        return max(1, host.room_bytes - needs.host_bytes)
    gpu = next((gpu for gpu in hardware.gpus if gpu.index == gpu_index), None)
    if gpu is None:
        note = f" ({hardware.gpu_note})" if hardware.gpu_note else ""
        raise HardwareError(f"There is no CUDA device {gpu_index}{note}: use --device cpu.")
    reserve = max(_VRAM_RESERVE_BYTES, int(gpu.total_bytes * _VRAM_RESERVE_SHARE))
    return max(1, gpu.free_bytes + held_bytes - reserve)


def check_records(name: str, records: int, host: HostRoom, beside: str = "", or_else: str = "") -> None:
    """Whether the expert records of a model, and what lies beside them, fit into host RAM. or_else: a further
    remedy.

    Raises:
        BudgetError: they do not.
    """
    if records > host.room_bytes:
        smaller = f", or use a model whose experts take at most {size_at_most(host.room_bytes)}"
        raise BudgetError(
            f"The experts{beside} of {name} need {format_bytes(records)} of host RAM, and of the "
            f"{format_bytes(host.available_bytes)} available {format_bytes(host.room_bytes)} may be used "
            f"({host.reason}): close other programs{smaller if host.room_bytes >= 1 << 20 else ''}{or_else}."
        )


def _check_host(
    footprint: ModelFootprint,
    host: HostRoom,
    context: int,
    needs_at: Callable[..., DeviceNeeds],
    *,
    drafting: bool,
) -> None:
    """Whether the records fit, and where slots share the RAM, beside them the smallest budget that works."""
    needs = needs_at(context=context)
    records, beside = needs.host_bytes, _and_more(needs.embedding_bytes, needs.aside_bytes)
    least = needs.least_bytes(drafting=drafting)
    layer = ram_bytes(footprint, min(footprint.num_experts, footprint.total_experts))
    on_disk = records - needs.record_bytes + layer + (least if host.holds_slots else 0)
    or_else = _OR_ON_DISK if needs.record_bytes and on_disk <= host.room_bytes else ""
    check_records(footprint.name, records, host, beside, or_else.format(what="them"))
    left = host.room_bytes - records
    if host.holds_slots and least > left:
        shorter = _longest_context(left, context, needs_at, drafting=drafting)
        remedy = "use a smaller model" if shorter is None else f"use a context of at most {shorter} tokens"
        if needs.disk_bytes:
            needed = f"{format_bytes(records + least)} of RAM beside its experts"
        else:
            needed = f"{format_bytes(records)} of RAM for its experts{beside} and {format_bytes(least)} to "
            needed += "compute with"
        raise BudgetError(
            f"{footprint.name} needs {needed}, and of the {format_bytes(host.available_bytes)} available "
            f"{format_bytes(host.room_bytes)} may be used ({host.reason}): "
            f"close other programs, or {remedy}{or_else.format(what='its experts')}.",
            context=shorter,
        )


def _check_beside_records(footprint: ModelFootprint, host: HostRoom, plan: MemoryPlan) -> None:
    """Whether what the plan takes fits beside the records in the same RAM."""
    left = host.room_bytes - plan.host_bytes
    beside = _and_more(plan.host_embedding_bytes, plan.host_aside_bytes)
    if plan.total_bytes > left:
        raise BudgetError(
            f"With a memory budget of {format_bytes(plan.budget_bytes)} {footprint.name} would take "
            f"{format_bytes(plan.total_bytes)} of RAM beside {format_bytes(plan.host_bytes)} for its "
            f"experts{beside}, and of the {format_bytes(host.available_bytes)} available "
            f"{format_bytes(host.room_bytes)} may be used ({host.reason}): give a budget of at most "
            f"{size_at_most(left)}, or close other programs.",
            budget_bytes=left,
        )


def _and_more(embedding: int, aside: int) -> str:
    """What lies beside the experts."""
    parts = (" and the input embedding" if embedding else "", " and a prompt's last tokens" if aside else "")
    return "".join(parts)


def _draft(footprint: ModelFootprint) -> str:
    return footprint.draft_model_called if footprint.draft_model_bytes else "the low-bit draft"


def _why_no_draft(footprint: ModelFootprint, budget_bytes: int, needs: DeviceNeeds) -> str:
    return (
        f"{_draft(footprint)} needs {format_bytes(needs.draft_bytes)}, which does not fit the budget of "
        f"{format_bytes(budget_bytes)}; {size_at_least(needs.least_bytes(drafting=True))} would do"
    )


def _longest_context(
    budget_bytes: int, context: int, needs_at: Callable[..., DeviceNeeds], *, drafting: bool
) -> int | None:
    """The longest context that fits the budget; None if not even the shortest does."""

    def fits(tokens: int) -> bool:
        return needs_at(context=tokens).least_bytes(drafting=drafting) <= budget_bytes

    low, high = _MIN_CONTEXT, context  # needs grow with the context, and `context` does not fit
    if low >= high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _too_small(
    footprint: ModelFootprint,
    budget_bytes: int,
    context: int,
    needs: DeviceNeeds,
    shorter: int | None,
    *,
    drafting: bool,
) -> str:
    draft = f"{_draft(footprint)} {format_bytes(needs.draft_bytes)}, " if drafting else ""
    remedy = f"give a budget of at least {size_at_least(needs.least_bytes(drafting=drafting))}"
    if shorter is not None:
        remedy += f", or a context of at most {shorter} tokens"
    return (
        f"The memory budget of {format_bytes(budget_bytes)} is too small: the shared weights need "
        f"{format_bytes(needs.shared_bytes)}, the KV cache for {context} tokens "
        f"{format_bytes(needs.kv_bytes)}, {draft}the workspace {format_bytes(needs.workspace_bytes)} and "
        f"{needs.min_slots} expert slots {format_bytes(needs.min_slots * needs.slot_bytes)}; {remedy}."
    )
