"""Whether a model fits this machine as it is now, in which tiers, and how fast it may be at most: the
planner's own answer for a model that need not be here. Probes nothing, loads nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from localmoe.core.config import EngineConfig
from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import BudgetError, LocalMoeError
from localmoe.core.model_facts import BudgetRange, Fit, ModelFacts
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_bytes
from localmoe.engine.device_support import why_no_kernels
from localmoe.engine.drafts import DRAFT_BITS, GROUP_SIZE
from localmoe.engine.lanes import why_not_from_disk
from localmoe.engine.mtp_drafts import MTP, drafting_unasked, may_draft_unasked, with_mtp
from localmoe.engine.planning import divide_memory
from localmoe.engine.settings import ComputeSettings, check_emulation, check_lanes, may_compute_in_place
from localmoe.hardware.facts import Hardware
from localmoe.hardware.limits import Rates, assumed_acceptance, predict_limits
from localmoe.hardware.ram_experts import ram_bytes
from localmoe.model.footprint import group_bytes

DISK_MARGIN_BYTES = 64 << 20  # what a download leaves free
_FILE_MARGIN_BYTES = 256 << 20  # likewise a file of experts (experts.record_file)
_ENDLESS = 1 << 60
_FILE_GRAIN_BYTES = 64 << 10  # of which its head and each layer take whole ones
_DTYPE_BY_BYTES = ((2, torch.bfloat16), (4, torch.float32))


def fit_model(
    facts: ModelFacts,
    hardware: Hardware,
    rates: Rates | None,
    config: EngineConfig | None = None,
    *,
    download_bytes: int = 0,
) -> Fit:
    """Ask the planner.

    Args:
        hardware: with what is free now, and what a load gives back first (see `with_given_back`).
        rates: measured, None if they were not.
        config: budget, context, draft length and where experts lie; the default is what the page starts with.
        download_bytes: still to be written to the disk.
    """
    config = config or EngineConfig()
    context = config.context
    if context is not None:  # chosen for another model: this one may be made for less
        config = replace(config, context=min(context, facts.footprint.max_context))
    compute = _compute(facts, hardware, config)
    device: Literal["cpu", "cuda"] = "cuda" if compute.device.type == "cuda" else "cpu"
    by_layers_because = compute.by_layers_because
    missing = _missing(download_bytes, hardware)
    try:
        check_emulation(config, compute.device)
        check_lanes(config, by_layers_because)
        config, facts = _with_drafter(config, facts, compute)
        stored = _stored(facts)
        compute = replace(
            compute, in_place=may_compute_in_place(config, compute, stored) and not facts.unsuited_in_place
        )
        if compute.whole_passes:
            facts = replace(facts, footprint=facts.footprint.in_whole_passes())
        if compute.whole_passes or compute.in_place:
            facts = replace(facts, footprint=facts.footprint.in_codes(packing=config.pack_experts))
        divide = partial(
            divide_memory, compute=compute, stored_bytes=facts.weight_bytes, hardware=hardware,
            has_draft=facts.has_draft,
        )  # fmt: skip
        found: tuple[ModelFootprint, MemoryPlan] | None = None
        if facts.mtp is not None and may_draft_unasked(config, whole_passes=compute.whole_passes):
            found = drafting_unasked(facts.footprint, config, facts.mtp, compute, divide)
        footprint, plan = found or (facts.footprint, divide(facts.footprint, config=config))
        facts = replace(facts, footprint=footprint)
    except BudgetError as error:
        return Fit(
            False, str(error), device, budget_bytes=error.budget_bytes, better_context=error.context,
            missing_disk_bytes=missing,
        )  # fmt: skip
    except LocalMoeError as error:
        return Fit(False, str(error), device, missing_disk_bytes=missing)
    file_bytes, is_written = _record_file(facts, plan)
    missing = _missing(download_bytes, hardware, 0 if is_written else file_bytes)
    wanted = [what for what, size in (("download", download_bytes), ("experts' file", file_bytes)) if size]
    if hardware.home_free_bytes is not None and len(wanted) > 1:  # each has a disk of its own
        wanted = wanted[:1] if _missing(download_bytes, hardware) == missing else wanted[1:]
    what = " and the ".join(wanted)
    reason = "" if not missing else f"The disk has {format_bytes(missing)} too little room for the {what}."
    return Fit(
        fits=not missing,
        reason=reason,
        device=device,
        vram_bytes=plan.total_bytes if device == "cuda" else 0,
        ram_bytes=plan.host_bytes + (0 if device == "cuda" else plan.total_bytes),
        drafting=plan.drafting,
        by_mtp=plan.drafting and facts.footprint.draft_model_bytes > 0,
        tokens_per_s=None if plan.disk_bytes else _speed(facts, plan, rates, compute),
        context=plan.context,
        missing_disk_bytes=missing,
        disk_bytes=file_bytes,
        disk_is_written=is_written,
        ram_share=plan.ram_experts / facts.footprint.total_experts if plan.disk_bytes else 1.0,
        plan=plan,
    )


def fit_or_from_disk(
    facts: ModelFacts,
    hardware: Hardware,
    rates: Rates | None,
    config: EngineConfig,
    on_disk: EngineConfig,
    *,
    download_bytes: int = 0,
) -> Fit:
    """As `fit_model`; of a model that RAM alone refuses, how it would run with `on_disk`, the same
    configuration with experts on the disk. Where only the disk lacks room for that, the reason says both."""
    fit = fit_model(facts, hardware, rates, config, download_bytes=download_bytes)
    if fit.plan is not None:
        return fit
    endless = replace(hardware, ram_total_bytes=_ENDLESS, ram_available_bytes=_ENDLESS)
    found = fit_model(facts, hardware, None, on_disk, download_bytes=download_bytes)
    if found.plan is None or fit_model(facts, endless, None, config).plan is None:
        return fit
    return found if found.fits else replace(fit, reason=f"{fit.reason} {found.reason}")


def budget_range(
    facts: ModelFacts, hardware: Hardware, config: EngineConfig | None = None
) -> BudgetRange | None:
    """Between which budgets a user may choose; None where the model does not fit with any.

    Args:
        hardware: as of `fit_model`.
        config: context and draft length; its budget plays no role.
    """
    config = replace(config or EngineConfig(), vram_budget_bytes=None)
    if not hardware.gpus and config.lanes == "auto":
        config = replace(config, lanes="vram+link")  # a budget is one of slots
    found = fit_model(facts, hardware, None, config)
    if found.plan is None:
        return None
    undrafted = replace(config, draft_length=0, vram_budget_bytes=1)
    least = fit_model(facts, hardware, None, undrafted).budget_bytes
    gpu = next(iter(hardware.gpus), None)
    free = hardware.ram_available_bytes if gpu is None else gpu.free_bytes
    total = hardware.ram_total_bytes if gpu is None else gpu.total_bytes
    most = found.plan.budget_bytes
    return BudgetRange(min(least or most, most), most, free, total)


def with_draft_bits(
    facts: ModelFacts, bits: int, before: int = DRAFT_BITS, device: Literal["cpu", "cuda"] = "cpu"
) -> ModelFacts:
    """The same model with a draft of integers of other bits, in groups of as many weights as before."""
    footprint = facts.footprint
    then, now = (group_bytes(DraftForm(one, GROUP_SIZE), device) for one in (before, bits))
    scaled = footprint.draft_expert_bytes * now // then
    return replace(facts, footprint=replace(footprint, draft_expert_bytes=scaled))


def with_given_back(hardware: Hardware, vram_bytes: int, ram_bytes: int) -> Hardware:
    """The machine once the model that is loaded has given its memory back."""
    gpus = tuple(
        replace(gpu, free_bytes=min(gpu.total_bytes, gpu.free_bytes + vram_bytes)) if gpu.index == 0 else gpu
        for gpu in hardware.gpus
    )
    ram = min(hardware.ram_total_bytes, hardware.ram_available_bytes + ram_bytes)
    return replace(hardware, gpus=gpus, ram_available_bytes=ram)


def _with_drafter(
    config: EngineConfig, facts: ModelFacts, compute: ComputeSettings
) -> tuple[EngineConfig, ModelFacts]:
    """A model without an MTP layer is loaded as the page does it: with its own low-bit draft."""
    if config.drafter != MTP:
        return config, facts
    if facts.mtp is None:
        return replace(config, drafter="self"), facts
    return config, replace(facts, footprint=with_mtp(facts.footprint, facts.mtp, compute))


def _missing(download_bytes: int, hardware: Hardware, file_bytes: int = 0) -> int:
    """That the disk lacks for both, or, if each has its own, the one that lacks more."""

    def lacking(wanted: int, margin: int, free: int) -> int:
        return max(0, wanted + margin - free) if wanted else 0

    margin = _FILE_MARGIN_BYTES if file_bytes else DISK_MARGIN_BYTES
    if hardware.home_free_bytes is None:
        return lacking(download_bytes + file_bytes, margin, hardware.disk_free_bytes)
    return max(
        lacking(download_bytes, DISK_MARGIN_BYTES, hardware.disk_free_bytes),
        lacking(file_bytes, margin, hardware.home_free_bytes),
    )


def _record_file(facts: ModelFacts, plan: MemoryPlan) -> tuple[int, bool]:
    """Bytes of the file of experts that the plan asks for, at most, and whether it is there; 0 for none."""
    if not plan.disk_bytes:
        return 0, False
    footprint = facts.footprint
    most = ram_bytes(footprint, footprint.total_experts) + _FILE_GRAIN_BYTES * (1 + footprint.num_layers)
    return most, any(plan.disk_bytes <= size <= most for size in facts.record_files)


def _compute(facts: ModelFacts, hardware: Hardware, config: EngineConfig) -> ComputeSettings:
    """As `engine.settings.choose_compute` chooses on that machine."""
    stored = _stored(facts)
    if not hardware.gpus:
        return ComputeSettings(torch.device("cpu"), torch.float32, by_layers_because="there is no GPU")
    unsuited = facts.unsuited or ("its weights have 32 bits" if stored == torch.float32 else "")
    if config.experts_on == "disk":  # as engine.planning has it
        unsuited = unsuited or why_not_from_disk(torch.device("cuda"), [], config)
    unsuited = unsuited or why_no_kernels()
    return ComputeSettings(torch.device("cuda", 0), stored, not unsuited, unsuited)


def _stored(facts: ModelFacts) -> torch.dtype:
    return dict(_DTYPE_BY_BYTES).get(facts.weight_bytes, torch.float32)


def _speed(
    facts: ModelFacts, plan: MemoryPlan, rates: Rates | None, compute: ComputeSettings
) -> float | None:
    if rates is None:
        return None
    acceptance = assumed_acceptance(facts.footprint)
    limits = predict_limits(
        facts.footprint, plan, rates, compute_bytes=compute.dtype.itemsize, acceptance=acceptance
    )
    speeds = [limits.on_demand.tokens_per_s]
    if limits.speculative is not None:
        speeds.append(limits.speculative.tokens_per_s)
    finite = [speed for speed in speeds if math.isfinite(speed) and speed > 0]
    return max(finite, default=None)
