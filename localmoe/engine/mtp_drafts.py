"""A draft by the layer that a model was trained with to predict one token more: whether there is one, what it
takes, and the layer itself, its experts rounded to low bits. Drafts nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from localmoe.core.config import EngineConfig
from localmoe.core.errors import NoMtpLayerError, UnsupportedModelError
from localmoe.core.model_facts import MtpSizes
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint, Progress, ProgressCallback
from localmoe.engine.draft_layers import fused
from localmoe.engine.drafts import DRAFT_BITS, GROUP_SIZE, HostExpertSource
from localmoe.engine.model_source import ModelSource
from localmoe.engine.settings import ComputeSettings
from localmoe.experts.record_store import RecordStore
from localmoe.hardware.needs import PREFILL_CHUNK
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_linear import LowBitLinear
from localmoe.model.draft_experts import DraftExpert, LowBitLayer
from localmoe.model.host_linear import HostLinears
from localmoe.model.mtp_draft import MtpDraft, MtpFacts, MtpTarget
from localmoe.model.mtp_layer import MtpLayer, MtpSkeleton, mtp_skeleton
from localmoe.model.packed_draft import empty_layer, set_expert
from localmoe.model.skeleton import Skeleton
from localmoe.model.takeover import take_over
from localmoe.quant.builder import rounded_experts

MTP: Final = "mtp"  # the drafter
_SLOT_SHARE = 1 / 4  # of the slots, that the layer may take by itself: an eighth fewer cost 2 % of the speed


class UnaskedLayerError(Exception):
    """The layer that nobody asked for cannot be read; before anything else is."""


@dataclass(frozen=True, slots=True)
class MtpShape:
    """What is known of the layer before its weights are read."""

    facts: MtpFacts
    made: MtpSkeleton


def read_mtp(source: ModelSource, skeleton: Skeleton, compute: ComputeSettings) -> MtpShape:
    """See whether the model has such a layer that can draft.

    Raises:
        NoMtpLayerError: it has none, or one of a form that is not known.
    """
    advice = "choose another drafter"
    if not source.has_mtp():
        raise NoMtpLayerError(
            f"The files of {source.name} have no layer that predicts one token more (MTP): {advice}."
        )
    try:
        made = mtp_skeleton(skeleton, compute.dtype)
    except UnsupportedModelError as error:
        raise NoMtpLayerError(
            f"The MTP layer of {source.name} cannot be used ({str(error).rstrip('.')}): {advice}."
        ) from error
    text = skeleton.text_config
    longest = int(getattr(text, "max_position_embeddings", 0) or 4096)
    return MtpShape(MtpFacts(source.name, int(text.vocab_size), longest), made)


def mtp_sizes(made: MtpSkeleton) -> MtpSizes:
    """What a plan has to know of the layer."""
    (experts,) = made.skeleton.experts
    return MtpSizes(made.shared_params, made.buffer_bytes, made.kv_elements_per_token, experts.layout.inner)


def with_mtp(footprint: ModelFootprint, sizes: MtpSizes, compute: ComputeSettings) -> ModelFootprint:
    """The footprint of the target, whose draft's experts are counted in DRAFT_BITS, with this layer beside
    it, and with what its longest pass computes."""
    size = compute.dtype.itemsize
    row = footprint.experts_per_token * 3 * sizes.inner_size + 8 * footprint.hidden_size
    held = sizes.shared_params * size + footprint.num_experts * footprint.draft_expert_bytes
    return replace(
        footprint,
        draft_model_bytes=held + sizes.buffer_bytes + PREFILL_CHUNK * row * size,
        draft_model_kv_bytes_per_token=sizes.kv_elements_per_token * size,
        draft_model_called="the MTP layer",
        draft_model_foretells=False,
    )


def may_draft_unasked(config: EngineConfig, *, whole_passes: bool) -> bool:
    """Whether the layer may draft though nobody asked for it: who drafts is left to the engine, and in whole
    steps it costs next to nothing while it is of no use. Experts have the memory then that a draft of all
    layers would take."""
    as_usual = config.draft_dir is None and config.draft_bits == DRAFT_BITS
    return whole_passes and config.drafter == "auto" and config.draft_length != 0 and as_usual


class Divide(Protocol):
    """Makes the plan of a footprint under a config."""

    def __call__(self, footprint: ModelFootprint, *, config: EngineConfig) -> MemoryPlan:
        """Raises BudgetError: it does not fit."""


def drafting_unasked(
    footprint: ModelFootprint,
    config: EngineConfig,
    sizes: MtpSizes,
    compute: ComputeSettings,
    divide: Divide,
) -> tuple[ModelFootprint, MemoryPlan] | None:
    """The footprint with the layer, and its plan; None if there is no room for it, or, where nobody said that
    tokens are to be drafted, experts would lose too many slots by it.

    Raises:
        BudgetError: nothing fits.
    """
    left_to_us = replace(config, draft_length="auto")  # no draft of all layers has to fit
    with_layer = with_mtp(footprint, sizes, compute)
    found = divide(with_layer, config=left_to_us)
    if found.drafting and config.draft_length == "auto":
        least = (1 - _SLOT_SHARE) * divide(footprint, config=config).num_slots
        return (with_layer, found) if found.num_slots >= least else None
    return (with_layer, found) if found.drafting else None


def load_mtp(
    shape: MtpShape,
    source: ModelSource,
    compute: ComputeSettings,
    *,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> MtpLayer:
    """Read the layer and round its experts, 16-bit ones of which are in RAM meanwhile: before the target's
    weights are.

    Raises:
        CheckpointError: weights are missing, or of another shape.
        DraftError: a weight is not finite. LoadCancelledError: `cancel` was set.
    """
    made, device = shape.made, compute.device

    def tell(report: Progress) -> None:
        if progress is not None:
            progress(replace(report, stage="Loading the MTP layer"))

    store = source.load_mtp(made, device, progress=tell, cancel=cancel)
    try:
        rounded = (_packed if compute.whole_passes else _matrices)(made, store, device)
    finally:
        store.close()
    return MtpLayer(made, LowBitLayer(made.skeleton.experts[0].module, rounded))


def follow_by_layers(
    shape: MtpShape, layer: MtpLayer, target: Skeleton, linears: HostLinears | None, context: int
) -> MtpDraft:
    """The layer as it drafts for a target whose passes run layer by layer. linears: the target's, see
    MtpTarget.

    Raises:
        UnsupportedModelError: the architecture does not let its experts be replaced.
    """
    take_over(layer.made.skeleton, [layer.experts], attention=None)
    return MtpDraft(shape.facts, layer, MtpTarget(target.model, linears), context)


def _packed(made: MtpSkeleton, store: RecordStore, device: torch.device) -> LowBitExperts:
    (experts,) = made.skeleton.experts
    layer = empty_layer(experts, made.skeleton.num_experts, DRAFT_BITS, GROUP_SIZE, device)
    source = HostExpertSource(made.skeleton, store)
    for expert, matrices in enumerate(rounded_experts(source, 0, DRAFT_BITS, GROUP_SIZE)):
        set_expert(layer, expert, *fused(matrices, concatenated=True))
    return layer


def _matrices(made: MtpSkeleton, store: RecordStore, device: torch.device) -> list[DraftExpert]:
    (experts,) = made.skeleton.experts
    concatenated = bool(experts.module.is_concatenated)
    source = HostExpertSource(made.skeleton, store)
    return [
        DraftExpert(*(LowBitLinear(part, device) for part in fused(matrices, concatenated=concatenated)))
        for matrices in rounded_experts(source, 0, DRAFT_BITS, GROUP_SIZE)
    ]
