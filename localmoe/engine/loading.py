"""Assemble an engine's parts: weights, draft, cache, slots, passes. Answers nothing; see engine."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from localmoe.core.config import EngineConfig
from localmoe.core.errors import DraftError
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ExpertKey, ProgressCallback
from localmoe.engine.drafts import GROUP_SIZE, HostExpertSource, expert_naming, load_draft
from localmoe.engine.planning import MAX_WINDOW, PreparedModel
from localmoe.experts.host_store import HostStore
from localmoe.experts.link import CudaLink, HostLink, Link
from localmoe.experts.memory import ExpertMemory
from localmoe.experts.slots import DeviceSlots
from localmoe.hardware.needs import kv_positions
from localmoe.hub.catalogue import draft_folder
from localmoe.kernels.rows import CANDIDATES, RowPadding, measure_row_multiple
from localmoe.model.experts_runtime import DraftExpert, PassState, RoutedExperts
from localmoe.model.kv_cache import KVCache
from localmoe.model.loader import load_weights
from localmoe.model.row_check import measure_row_padding
from localmoe.model.runner import ModelRunner, RecurrentState, SequenceState
from localmoe.model.takeover import take_over
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.registry import make_policy
from localmoe.prefetch.scheduler import Scheduler
from localmoe.quant.builder import build_rtn_draft


@dataclass(slots=True)
class EngineParts:
    """What a loaded engine is made of."""

    prepared: PreparedModel
    store: HostStore
    runner: ModelRunner
    draft_description: str  # "" without a draft
    draft_bytes: int
    shared_bytes: int
    row_padding: RowPadding | None  # None: no padding makes rows independent on this machine

    @property
    def passes(self) -> PassState:
        """The state that all layers share."""
        return self.runner.passes

    def close(self) -> None:
        """Stop the transfer worker and give all memory back, whoever still refers to the parts."""
        passes, device = self.passes, self.prepared.compute.device
        passes.memory.close()
        passes.memory.slots.release()
        passes.draft = None
        self.runner.sequence.release()
        self.prepared.skeleton.model.to("meta")
        self.store.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def assemble(
    prepared: PreparedModel,
    config: EngineConfig,
    *,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> EngineParts:
    """Load everything that the plan foresees.

    Raises:
        LocalMoeError: damaged files, a foreign draft, a refused device, or a cancelled load. Nothing is
            left behind.
    """
    device = prepared.compute.device
    skeleton = prepared.skeleton
    store = load_weights(skeleton, prepared.checkpoint, device=device, progress=progress, cancel=cancel)
    try:
        try:
            draft_description, draft = _draft(prepared, config, store, progress, cancel)
        except DraftError as error:
            if config.draft_length != "auto" or config.draft_dir is not None:
                raise
            draft_description, draft = "", None  # chatting without a draft beats not chatting
            prepared = replace(prepared, plan=_without_draft(prepared.plan, str(error)))
        if device.type == "cuda":
            store.pin()
        row_padding = _row_padding(prepared, store)
        passes = _make_passes(prepared, config, store, draft, row_padding or RowPadding(1, MAX_WINDOW))
        layers = [RoutedExperts(i, experts.module, passes) for i, experts in enumerate(skeleton.experts)]
        take_over(skeleton, layers, replace_attention=skeleton.can_rollback)
    except BaseException:
        store.close()
        raise
    shared = {t.data_ptr(): t for t in _device_tensors(skeleton.model)}
    return EngineParts(
        prepared=prepared,
        store=store,
        runner=ModelRunner(skeleton.model, _sequence_state(prepared), passes, device),
        draft_description=draft_description,
        draft_bytes=sum(e.gate_up.num_bytes + e.down.num_bytes for layer in draft or () for e in layer),
        shared_bytes=sum(t.numel() * t.element_size() for t in shared.values()),
        row_padding=row_padding,
    )


def _without_draft(plan: MemoryPlan, reason: str) -> MemoryPlan:
    return replace(plan, drafting=False, drafting_reason=reason, draft_bytes=0)


def _draft(
    prepared: PreparedModel,
    config: EngineConfig,
    store: HostStore,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> tuple[str, list[list[DraftExpert]] | None]:
    """The draft that the plan foresees: the one that the user named, or the one in the default place, which
    is built (round-to-nearest) where there is none or where it is damaged or of other weights."""
    if not prepared.plan.drafting:
        return "", None
    skeleton, checkpoint, source = prepared.skeleton, prepared.checkpoint, prepared.source
    naming, fingerprint = expert_naming(checkpoint, skeleton), checkpoint.fingerprint()

    def load(folder: Path) -> tuple[str, list[list[DraftExpert]]]:
        return load_draft(
            folder,
            naming,
            skeleton,
            prepared.compute.device,
            fingerprint=fingerprint,
            model_name=source.name,
            progress=progress,
            cancel=cancel,
        )

    if config.draft_dir is not None:
        return load(config.draft_dir)
    folder = draft_folder(source, "rtn", 4, GROUP_SIZE, fingerprint)
    with suppress(DraftError):
        return load(folder)
    build_rtn_draft(
        HostExpertSource(skeleton, store),
        folder,
        config=checkpoint.config,
        naming=naming,
        base_model=source.name,
        base_fingerprint=fingerprint,
        group_size=GROUP_SIZE,
        progress=progress,
        cancel=cancel,
    )
    return load(folder)


def _row_padding(prepared: PreparedModel, store: HostStore) -> RowPadding | None:
    """Measured on one expert of each shape, then on the model as a whole: for the longest windows if
    possible, else for windows that one fixed number of rows holds."""
    skeleton, compute = prepared.skeleton, prepared.compute
    if not skeleton.can_rollback:
        return RowPadding(1, 1)  # no verify pass, and padding rows would enter the recurrent state
    layout = skeleton.experts[0].layout
    layers = [
        layer for layer, experts in enumerate(skeleton.experts) if layer == 0 or experts.layout != layout
    ]
    views = [view for layer in layers for view in store.views(ExpertKey(layer, 0))]
    matrices = [view.to(device=compute.device, dtype=compute.dtype) for view in views]
    for max_rows in (MAX_WINDOW, CANDIDATES[-1]):
        with torch.inference_mode():
            multiple = measure_row_multiple(matrices, max_rows, transposed=layout.transposed)
        if multiple is not None:
            padding = measure_row_padding(skeleton, compute.device, RowPadding(multiple, max_rows))
            if padding is not None:
                return padding
    return None


def _make_passes(
    prepared: PreparedModel,
    config: EngineConfig,
    store: HostStore,
    draft: list[list[DraftExpert]] | None,
    rows: RowPadding,
) -> PassState:
    scheduler = Scheduler(make_policy(config.policy, cache_shape(prepared, prepared.plan.num_slots)))
    memory = make_memory(
        prepared, make_link(config, prepared.compute.device), store, scheduler, prepared.plan.num_slots
    )
    lookahead = LookaheadBuffer(len(prepared.skeleton.experts))
    return PassState(memory, scheduler, lookahead, rows, draft)


def cache_shape(prepared: PreparedModel, num_slots: int) -> CacheShape:
    """What a policy may know."""
    footprint = prepared.footprint
    return CacheShape(footprint.num_layers, footprint.num_experts, footprint.experts_per_token, num_slots)


def make_link(config: EngineConfig, device: torch.device) -> Link:
    """How records travel to the device."""
    return CudaLink(device) if device.type == "cuda" else HostLink(config.emulated_link_bytes_per_s)


def make_memory(
    prepared: PreparedModel, link: Link, store: HostStore, scheduler: Scheduler, num_slots: int
) -> ExpertMemory:
    """Slots of the planned number, filled by a worker of their own, and attached to the scheduler."""
    device, dtype = prepared.compute.device, prepared.compute.dtype
    elements = max(layout.elements for layout in store.layouts)
    slots = DeviceSlots(num_slots, elements, dtype, device)
    memory = ExpertMemory(store, slots, link, scheduler.choose_victim)
    scheduler.attach(memory)
    return memory


def _sequence_state(prepared: PreparedModel) -> SequenceState:
    text = prepared.skeleton.text_config
    if not prepared.skeleton.can_rollback:
        return RecurrentState(text)
    return KVCache(int(text.num_hidden_layers), kv_positions(prepared.plan.context))


def _device_tensors(model: nn.Module) -> list[Tensor]:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in tensors if not tensor.is_meta]
