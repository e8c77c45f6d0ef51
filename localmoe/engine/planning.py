"""From a model's headers and a configuration to a memory plan. Reads no weights; the division itself is
hardware.plan's."""

from __future__ import annotations

from dataclasses import dataclass

from localmoe.core.config import MAX_DRAFT_LENGTH, EngineConfig
from localmoe.core.errors import DraftingRefusedError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.engine.drafts import GROUP_SIZE
from localmoe.engine.settings import ComputeSettings, check_emulation, choose_compute, choose_context
from localmoe.hardware.plan import automatic_budget, plan_memory
from localmoe.hardware.probe import probe_hardware
from localmoe.hub.catalogue import LocalModel, resolve_model
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.footprint import checkpoint_dtype, measure_footprint
from localmoe.model.skeleton import Skeleton, build_skeleton
from localmoe.prefetch.registry import check_policy
from localmoe.quant.draft_checkpoint import DraftCheckpoint

MAX_WINDOW = -(-(MAX_DRAFT_LENGTH + 1) // 16) * 16  # rows of the largest verify pass

CUDA_LIBRARY_BYTES = 48 << 20  # cuBLAS keeps 32 MiB of workspace on recent GPUs, and the allocator rounds up


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Everything known before the first weight is read."""

    source: LocalModel
    checkpoint: Checkpoint
    skeleton: Skeleton
    footprint: ModelFootprint
    compute: ComputeSettings
    plan: MemoryPlan


def prepare_model(model: str, config: EngineConfig) -> PreparedModel:
    """Resolve, check and plan.

    Raises:
        LocalMoeError: the model is not there, not supported, damaged, or does not fit.
    """
    check_policy(config.policy)
    source = resolve_model(model)
    checkpoint = Checkpoint.open(source.folder)
    compute = choose_compute(config.device, config.dtype, checkpoint_dtype(checkpoint))
    check_emulation(config, compute.device)
    skeleton = build_skeleton(checkpoint, compute.dtype)
    # a draft of the user's own may have smaller groups, and so more scales to hold
    group_size = GROUP_SIZE if config.draft_dir is None else DraftCheckpoint.open(config.draft_dir).group_size
    footprint = measure_footprint(source.name, checkpoint, skeleton, group_size)
    plan = divide_memory(footprint, config, compute, checkpoint_dtype(checkpoint).itemsize)
    return PreparedModel(source, checkpoint, skeleton, footprint, compute, plan)


def divide_memory(
    footprint: ModelFootprint,
    config: EngineConfig,
    compute: ComputeSettings,
    stored_bytes: int,
    *,
    held_bytes: int | None = None,
) -> MemoryPlan:
    """The plan for a budget, with or without a draft. `held_bytes` is what this model holds already of the
    memory that is divided (None: nothing is loaded yet).

    Raises:
        BudgetError: it does not fit. DraftingRefusedError: a draft was demanded for a model that cannot
            roll back.
    """
    wanted = config.draft_length != 0
    reason = "" if wanted else "switched off"
    if wanted and not footprint.can_rollback:
        reason = f"{footprint.architecture} keeps recurrent state, which cannot drop a rejected draft"
        if config.draft_length != "auto":
            raise DraftingRefusedError(f"Drafting is not possible: {reason}. Use --draft-length 0 or auto.")
    hardware = probe_hardware(measure=False)
    context = choose_context(config.context, footprint)
    drafting = wanted and footprint.can_rollback
    library_bytes = CUDA_LIBRARY_BYTES if compute.device.type == "cuda" else 0
    budget = config.vram_budget_bytes
    if budget is None:
        budget = automatic_budget(
            hardware,
            footprint,
            device="cuda" if compute.device.type == "cuda" else "cpu",
            context=context,
            compute_bytes=compute.dtype.itemsize,
            checkpoint_bytes_per_weight=stored_bytes,
            max_window=MAX_WINDOW,
            drafting=drafting,
            held_bytes=held_bytes or 0,
            library_bytes=library_bytes,
        )
    host_available = hardware.ram_available_bytes
    if compute.device.type == "cpu":  # slots and records share the same memory
        host_available = max(0, host_available - budget)
    return plan_memory(
        footprint,
        budget_bytes=budget,
        context=context,
        compute_bytes=compute.dtype.itemsize,
        checkpoint_bytes_per_weight=stored_bytes,
        max_window=MAX_WINDOW,
        drafting=drafting,
        drafting_reason=reason,
        library_bytes=library_bytes,
        drafting_required=isinstance(config.draft_length, int) and config.draft_length > 0,
        host_available_bytes=None if held_bytes is not None else host_available,
    )


def plan_model(model: str, config: EngineConfig) -> tuple[ModelFootprint, MemoryPlan]:
    """What `localmoe plan` prints: footprint and division of memory, from headers alone.

    Raises:
        LocalMoeError: as `prepare_model`.
    """
    prepared = prepare_model(model, config)
    return prepared.footprint, prepared.plan
