"""From a model's headers and a configuration to a memory plan. Reads no weights; the division itself is
hardware.plan's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from localmoe.core.config import MAX_DRAFT_LENGTH, EngineConfig
from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import ConfigError, DraftingRefusedError, NoMtpLayerError, UnsupportedModelError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import ModelFootprint
from localmoe.engine.device_support import why_not_in_place, why_not_on_device
from localmoe.engine.draft_models import DraftShape, read_draft_model, with_draft_model
from localmoe.engine.drafts import DRAFT_BITS
from localmoe.engine.lanes import why_not_from_disk
from localmoe.engine.model_source import ModelSource, as_found
from localmoe.engine.mtp_drafts import (
    MTP,
    MtpShape,
    drafting_unasked,
    may_draft_unasked,
    mtp_sizes,
    read_mtp,
)
from localmoe.engine.random_source import RandomSource
from localmoe.engine.settings import (
    SWITCHED_OFF,
    ComputeSettings,
    check_emulation,
    check_lanes,
    choose_compute,
    may_compute_in_place,
)
from localmoe.engine.sources import CheckpointSource
from localmoe.hardware.context import check_context, unasked_context, usual_context
from localmoe.hardware.facts import Hardware
from localmoe.hardware.host_room import host_room
from localmoe.hardware.needs import NeedsOptions, device_needs
from localmoe.hardware.plan import free_memory, plan_memory
from localmoe.hardware.prefill_chunk import choose_chunk
from localmoe.hardware.probe import probe_hardware
from localmoe.hardware.ram_experts import left_to_them
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.footprint import measure_footprint
from localmoe.model.host_embedding import own_embedding
from localmoe.model.host_linear import HostLinears, keep_linears, undo_linears
from localmoe.model.kv_trial import kv_layers
from localmoe.model.packed_head import own_head, packed_embedding
from localmoe.model.shapes import ModelShape
from localmoe.model.skeleton import Skeleton, with_records
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.registry import check_policy

MAX_WINDOW = -(-(MAX_DRAFT_LENGTH + 1) // 16) * 16  # rows of the largest verify pass

CUDA_LIBRARY_BYTES = 48 << 20  # cuBLAS keeps 32 MiB of workspace on recent GPUs, and the allocator rounds up


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Everything known before the first weight is read."""

    source: ModelSource
    skeleton: Skeleton
    footprint: ModelFootprint
    compute: ComputeSettings
    plan: MemoryPlan
    synthetic: SyntheticModel | None  # what stands in for a trained model's behaviour
    draft_model: DraftShape | None = None  # drafts in the place of the model's own low-bit experts
    linears: HostLinears | None = None  # layers that keep their 16-bit weights on a CPU
    may_be_in_place: bool = False  # without a budget experts would be, or are, computed where they lie


def prepare_model(model: str, config: EngineConfig) -> PreparedModel:
    """Resolve, check and plan.

    Raises:
        LocalMoeError: the model is not there, not supported, damaged, or does not fit.
    """
    check_policy(config.policy)
    return _prepare(CheckpointSource.open(model, config.draft_bits), config)


def prepare_shape(shape: ModelShape, config: EngineConfig, synthetic: SyntheticSettings) -> PreparedModel:
    """As `prepare_model`, for a model with random weights.

    Raises:
        LocalMoeError: a setting makes no sense, the trace is of another model, or the shape does not fit.
    """
    check_policy(config.policy)
    if config.draft_dir is not None or config.draft_bits != DRAFT_BITS:
        raise ConfigError("A shape's draft is random, of 4 bits: leave the draft's folder and bits out.")
    return _prepare(RandomSource(shape, synthetic), config)


def _prepare(source: ModelSource, config: EngineConfig) -> PreparedModel:
    compute = choose_compute(config.device, config.dtype, source.stored_dtype)
    check_emulation(config, compute.device)
    skeleton = source.skeleton(compute.dtype)
    unsuited = why_not_on_device(skeleton, compute.device, compute.dtype)
    if not unsuited and source.stored_dtype != compute.dtype:
        stored, computed = _name(source.stored_dtype), _name(compute.dtype)
        unsuited = f"weights are stored as {stored} and computed in {computed}"
    if config.experts_on == "disk" and compute.device.type == "cuda":
        layouts = [experts.layout for experts in skeleton.experts]
        unsuited = unsuited or why_not_from_disk(compute.device, layouts, config)
    compute = replace(compute, whole_passes=not unsuited, by_layers_because=unsuited)
    check_lanes(config, unsuited)
    may_be_in_place = not why_not_in_place(skeleton) and may_compute_in_place(
        replace(config, vram_budget_bytes=None), compute, source.stored_dtype
    )
    in_place = may_be_in_place and config.vram_budget_bytes is None
    compute = replace(compute, in_place=in_place)
    if compute.whole_passes or in_place:
        skeleton = with_records(skeleton, _form(skeleton, source, config))
    draft_model: DraftShape | None = None
    if config.draft_model is not None and config.draft_length != 0:
        draft_model = read_draft_model(config.draft_model, source)
    elif config.drafter == MTP and config.draft_length != 0:
        draft_model = read_mtp(source, skeleton, compute)
    linears = _keep_linears(skeleton, source, compute)
    if compute.whole_passes or (in_place and not source.has_wide_matrices()):
        skeleton = replace(skeleton, host_embedding=own_embedding(skeleton.model))
    can_pack_head = source.can_pack_head(skeleton)
    if compute.whole_passes and config.pack_experts and can_pack_head:
        head, embedding = own_head(skeleton.model), packed_embedding(skeleton.model)
        skeleton = replace(skeleton, packed_head=head, packed_embedding=embedding)
    if compute.whole_passes:
        kept = kv_layers(skeleton.model, can_rollback=skeleton.can_rollback)
        skeleton = replace(skeleton, kv_layers=kept)

    device: Literal["cpu", "cuda"] = "cuda" if compute.device.type == "cuda" else "cpu"
    # that layer is rounded to INT4, whatever bits a draft would have
    draft = DraftForm() if isinstance(draft_model, MtpShape) else source.draft_form(config.draft_dir)
    footprint = measure_footprint(
        source.name, source.stored_dtype, skeleton, draft, device, knows_state=compute.whole_passes
    )
    if compute.whole_passes:
        footprint = footprint.in_whole_passes()
    if footprint.image_bytes and source.vision() is None:
        footprint = replace(footprint, text_alone=True, image_bytes=0)
    footprint = as_found(footprint, source, skeleton)
    if compute.in_place and linears is None:  # all take what is computed in
        footprint = replace(footprint, linear_params=0)
    if compute.in_place and skeleton.host_embedding is None:
        footprint = replace(footprint, embedding_params=0)
    if draft_model is not None:
        footprint = with_draft_model(footprint, draft_model, compute)
    synthetic = source.simulation(footprint)
    divide = partial(
        divide_memory, compute=compute, stored_bytes=source.stored_dtype.itemsize,
        has_draft=source.has_draft(),
    )  # fmt: skip
    found: tuple[ModelFootprint, MemoryPlan] | None = None
    if source.has_mtp() and may_draft_unasked(config, whole_passes=compute.whole_passes):
        with suppress(NoMtpLayerError):
            layer = read_mtp(source, skeleton, compute)
            found = drafting_unasked(footprint, config, mtp_sizes(layer.made), compute, divide)
            draft_model = draft_model if found is None else layer
    footprint, plan = found or (footprint, divide(footprint, config=config))
    return PreparedModel(
        source, skeleton, footprint, compute, plan, synthetic, draft_model, linears, may_be_in_place
    )


def _form(skeleton: Skeleton, source: ModelSource, config: EngineConfig) -> WeightForm:
    """In which kernels read experts. No budget decides it: sums with strays end in another order."""
    if source.can_keep_mxfp4(skeleton):
        return WeightForm.MXFP4
    if config.pack_experts and (form := source.coded_form(skeleton)) is not None:
        return form
    return WeightForm.BF12 if config.pack_experts and source.can_pack(skeleton) else WeightForm.PLAIN


def _keep_linears(skeleton: Skeleton, source: ModelSource, compute: ComputeSettings) -> HostLinears | None:
    """Linear layers of a model whose experts are computed in place keep their weights as well, unless its
    code does not bear that."""
    if not compute.in_place or compute.dtype == source.stored_dtype or source.has_wide_matrices():
        return None
    linears = keep_linears(skeleton.model, source.stored_dtype)
    try:
        kv_layers(skeleton.model, can_rollback=skeleton.can_rollback)
    except UnsupportedModelError:
        undo_linears(skeleton.model, compute.dtype)
        return None
    return linears


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def divide_memory(
    footprint: ModelFootprint,
    config: EngineConfig,
    compute: ComputeSettings,
    stored_bytes: int,
    *,
    held_bytes: int | None = None,
    hardware: Hardware | None = None,
    has_draft: bool = True,
) -> MemoryPlan:
    """The plan for a budget, with or without a draft. `held_bytes` is what this model holds already of the
    memory that is divided (None: nothing is loaded yet); `hardware` what is free (None: look); `has_draft`
    whether one was made.

    Raises:
        BudgetError: it does not fit. DraftingRefusedError: a draft was demanded for a model that cannot
            roll back.
    """
    wanted = config.draft_length != 0
    loads_draft = wanted and config.drafter != "prompt-lookup"
    reason = "" if loads_draft else SWITCHED_OFF if not wanted else "tokens are looked up in the text"
    if wanted and not footprint.can_rollback:
        reason = (
            f"{footprint.architecture} keeps more than keys and values, which cannot drop a rejected draft"
        )
        if config.draft_length != "auto":
            raise DraftingRefusedError(f"Drafting is not possible: {reason}. Use --draft-length 0 or auto.")
    if loads_draft and not is_asked_for(config) and not footprint.draft_model_bytes:
        if footprint.keeps_four_bits:
            form = WeightForm(footprint.expert_form).shown
            loads_draft, reason = False, f"the experts, kept in {form}, are as small as a draft's would be"
        elif config.experts_on == "disk":  # each that memory holds more is one that need not be read
            loads_draft, reason = False, "its memory holds experts, which else come from the disk"
        elif compute.in_place and not has_draft:
            loads_draft, reason = False, "it would not make the CPU faster, so none is built"
    hardware = hardware or probe_hardware(measure=False)
    drafting = loads_draft and footprint.can_rollback
    device: Literal["cpu", "cuda"] = "cuda" if compute.device.type == "cuda" else "cpu"
    host = None  # loaded records are pinned already, and what is held on a GPU is no RAM
    if device == "cpu" or held_bytes is None:
        host = host_room(hardware, device=device, held_bytes=held_bytes or 0)
    options = NeedsOptions(
        compute_bytes=compute.dtype.itemsize,
        checkpoint_bytes_per_weight=stored_bytes,
        max_window=MAX_WINDOW,
        library_bytes=CUDA_LIBRARY_BYTES if device == "cuda" else 0,
        whole_passes=compute.whole_passes,
        in_place=compute.in_place,
        on_disk=config.experts_on == "disk",
    )
    budget, context = config.vram_budget_bytes, config.context
    check_context(context, footprint)
    if budget is None:
        needs = device_needs(footprint, context=context or usual_context(footprint), **options)
        budget = free_memory(hardware, needs, device=device, held_bytes=held_bytes or 0)
        if device == "cpu" and needs.disk_bytes:
            least = min(budget, needs.least_bytes(drafting=False))
            budget = max(least, budget - left_to_them(footprint, config.ram_budget_bytes))
    room = None if host is None else host.room_bytes
    if context is None:
        context = unasked_context(footprint, budget, options, drafting=drafting, host_bytes=room)
    if compute.whole_passes:
        options["prefill_chunk"] = choose_chunk(footprint, budget, context, options, drafting=drafting)
    if config.vram_budget_bytes is None:  # with more than this the rest would lie idle
        needs = device_needs(footprint, context=context, **options)
        budget = min(budget, needs.most_bytes(drafting=drafting))
    return plan_memory(
        footprint,
        budget_bytes=budget,
        context=context,
        drafting=drafting,
        drafting_reason=reason,
        drafting_required=loads_draft and config.draft_length != "auto",
        host=host,
        ram_budget_bytes=config.ram_budget_bytes,
        **options,
    )


def is_asked_for(config: EngineConfig) -> bool:
    """Whether somebody wants a draft, rather than what is fastest."""
    return config.draft_length != "auto" or config.draft_dir is not None or config.draft_bits != DRAFT_BITS


def plan_model(model: str, config: EngineConfig) -> tuple[ModelFootprint, MemoryPlan]:
    """What `localmoe plan` prints: footprint and division of memory, from headers alone.

    Raises:
        LocalMoeError: as `prepare_model`.
    """
    prepared = prepare_model(model, config)
    return prepared.footprint, prepared.plan
