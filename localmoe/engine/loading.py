"""Assemble an engine's parts: weights, draft, cache, slots, passes. Answers nothing; see engine."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from localmoe.core.config import DrafterName, EngineConfig
from localmoe.core.errors import BudgetError, CheckpointError, DraftError
from localmoe.core.freed_memory import return_freed_memory
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.types import ProgressCallback
from localmoe.core.units import format_bytes, parse_bytes, size_at_most
from localmoe.engine.device_parts import assemble_on_device, cache_shape
from localmoe.engine.draft_layers import DraftLayers, draft_bytes, matrix_layers, packed_layers
from localmoe.engine.draft_models import OtherDraft, load_draft_model, load_own_layer, own_draft
from localmoe.engine.drafts import DraftInfo
from localmoe.engine.failed_load import giving_back
from localmoe.engine.host_parts import make_host_memory
from localmoe.engine.log_lines import log_no_draft
from localmoe.engine.mtp_drafts import MTP, MtpShape, UnaskedLayerError
from localmoe.engine.planning import MAX_WINDOW, PreparedModel, is_asked_for
from localmoe.engine.rehearsal import Rehearsal, rehearsing
from localmoe.engine.row_padding import row_padding
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.idle_slots import fill_slots
from localmoe.experts.in_place import InPlaceMemory
from localmoe.experts.memory import ExpertMemory
from localmoe.experts.record_store import RecordStore
from localmoe.hardware.cuda import forget_peak
from localmoe.hardware.needs import kv_positions
from localmoe.kernels.rows import RowPadding
from localmoe.model.draft_experts import DraftExpert
from localmoe.model.draft_model import DraftModelShape
from localmoe.model.experts_runtime import PassState, RoutedExperts
from localmoe.model.host_embedding import look_rows_up
from localmoe.model.kv_cache import KVCache
from localmoe.model.next_gate import find_gates
from localmoe.model.recurrence import recurrent_state
from localmoe.model.rotary import freeze_length
from localmoe.model.runner import ModelRunner, SequenceState
from localmoe.model.takeover import NAME, take_over
from localmoe.prefetch.registry import make_policy
from localmoe.prefetch.scheduler import Scheduler

if TYPE_CHECKING:  # these need Triton
    from localmoe.model.device_experts import DevicePassState
    from localmoe.model.device_runner import DeviceRunner

Runner: TypeAlias = "ModelRunner | DeviceRunner"


@dataclass(slots=True)
class EngineParts:
    """What a loaded engine is made of."""

    prepared: PreparedModel
    store: RecordStore
    runner: Runner
    draft: DraftInfo | None
    draft_bytes: int  # of the low-bit draft; 0 while it is laid aside
    shared_bytes: int
    row_padding: RowPadding | None  # None: no padding makes rows independent on this machine
    drafter: DrafterName = "self"  # never "auto"
    other: OtherDraft | None = None  # another model that drafts
    fused_draft: bool = True  # see core.switches

    @property
    def passes(self) -> PassState | DevicePassState:
        """The state that all layers share."""
        return self.runner.passes

    def device_memory(self) -> dict[str, int]:
        """Bytes by owner, as allocated now."""
        return {
            "shared": self.shared_bytes,
            "draft": self.draft_bytes if self.other is None else self.other.model.num_bytes,
            "kv": self.runner.sequence.num_bytes,
            "slots": self.passes.memory.slots.num_bytes,
        }

    def fill_slots(self) -> bool:
        """See idle_slots; False where passes go layer by layer."""
        memory = self.passes.memory
        return isinstance(memory, DeviceExpertMemory) and fill_slots(memory)

    def forget(self, *, ram: bool) -> None:
        """Texts of what drafts beside the model and, if `ram`, which experts RAM holds."""
        if ram:
            self.store.forget()
        if self.other is not None:
            self.other.model.forget()

    def close(self) -> None:
        """Stop the transfer worker and give all memory back, whoever still refers to the parts."""
        passes, device = self.passes, self.prepared.compute.device
        passes.memory.close()
        if not isinstance(self.runner, ModelRunner):
            if self.runner.passes.lane is not None:
                self.runner.passes.lane.close()
            self.runner.release()
        passes.memory.slots.release()
        passes.draft = None
        if self.other is not None:
            self.other.model.release()
        self.runner.sequence.release()
        self.prepared.skeleton.model.to("meta")
        self.store.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return_freed_memory()


def assemble(
    prepared: PreparedModel,
    config: EngineConfig,
    *,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> EngineParts:
    """Load everything that the plan foresees, and compile meanwhile.

    Raises:
        LocalMoeError: damaged files, a foreign draft, a refused device, or a cancelled load; nothing is left.
        UnaskedLayerError: of a plan that has it.
    """
    shape, device = prepared.draft_model, prepared.compute.device
    own = [shape.made.skeleton] if isinstance(shape, MtpShape) else []
    with giving_back([prepared.skeleton, *own], device), rehearsing(prepared, config) as rehearsal:
        return _assemble(prepared, config, rehearsal, progress, cancel)


def _assemble(
    prepared: PreparedModel,
    config: EngineConfig,
    rehearsal: Rehearsal,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> EngineParts:
    device, skeleton, source = prepared.compute.device, prepared.skeleton, prepared.source
    forget_peak(device)
    info: DraftInfo | None = None
    draft: DraftLayers | None = None
    # before the model's weights: its experts lie in RAM in 16 bits meanwhile
    own, other = None, None
    try:
        own = load_own_layer(prepared, progress=progress, cancel=cancel)
    except torch.OutOfMemoryError:
        raise out_of_memory(prepared.plan.budget_bytes) from None
    except (CheckpointError, DraftError) as error:
        if config.drafter == MTP:
            raise
        raise UnaskedLayerError(str(error)) from error
    store = source.load_weights(
        skeleton, device, ram_experts=prepared.plan.ram_experts, progress=progress, cancel=cancel
    )
    try:
        by_kernel = prepared.compute.whole_passes
        look_rows_up(skeleton, store, prepared.compute.dtype, by_kernel=by_kernel)
        try:
            if prepared.plan.drafting and isinstance(prepared.draft_model, DraftModelShape):
                context = prepared.plan.context
                rehearsal.wait(cancel)  # transformers changes PyTorch's defaults while it loads
                other = load_draft_model(prepared.draft_model, skeleton, prepared.compute, context)
            elif prepared.plan.drafting and own is None:
                info, draft = source.load_draft(
                    skeleton,
                    store,
                    device,
                    config.draft_dir,
                    packed=prepared.compute.whole_passes,
                    may_build=not prepared.compute.in_place or is_asked_for(config),
                    progress=progress,
                    cancel=cancel,
                )
        except DraftError as error:
            if config.draft_length != "auto" or config.draft_dir is not None:
                raise
            prepared = _going_on_without(prepared, str(error))
        if device.type == "cuda":
            store.pin()
        shape = cache_shape(prepared, prepared.plan.num_slots)
        scheduler = Scheduler(make_policy(config.policy, shape))
        runner: Runner
        if prepared.compute.whole_passes:
            ready, packed = rehearsal.wait(cancel), packed_layers(draft)
            runner = assemble_on_device(prepared, store, packed, scheduler, config, own=own, compiled=ready)
            padding = runner.row_padding
        else:
            memory = make_host_memory(prepared, store, scheduler, config)
            try:
                by_lane = memory if isinstance(memory, InPlaceMemory) else None
                with nullcontext() if by_lane is None else by_lane.one_pytorch_thread():  # as passes run
                    padding = row_padding(prepared, store)
                rows = padding or RowPadding(1, MAX_WINDOW)
                runner = _assemble_by_layers(prepared, memory, matrix_layers(draft), scheduler, rows)
            except BaseException:
                memory.close()
                raise
    except torch.OutOfMemoryError:
        store.close()
        raise out_of_memory(prepared.plan.budget_bytes) from None
    except BaseException:
        store.close()
        raise
    if own is not None:
        other = own_draft(prepared, own, runner)
        if other is None:
            prepared = _going_on_without(prepared, "its MTP layer cannot run")
    shared = {t.data_ptr(): t for t in _device_tensors(skeleton.model)}
    return EngineParts(
        prepared=prepared,
        store=store,
        runner=runner,
        draft=info,
        draft_bytes=draft_bytes(draft),
        shared_bytes=sum(t.numel() * t.element_size() for t in shared.values()),
        row_padding=padding,
        drafter=MTP if own is not None and other is not None else _named(config.drafter),
        other=other,
    )


def out_of_memory(budget_bytes: int, doing: str = "loading") -> BudgetError:
    """The refusal where a GPU has less than was free at planning; a sixth less leaves room for the rest."""
    smaller = size_at_most(budget_bytes * 5 // 6)
    return BudgetError(
        f"The GPU's memory ran out while {doing} with a budget of {format_bytes(budget_bytes)}, as other "
        f"programs use it too: close them, or give a budget of at most {smaller}.",
        budget_bytes=parse_bytes(smaller),
    )


def _named(drafter: DrafterName) -> DrafterName:
    return "self" if drafter == "auto" else drafter


def _going_on_without(prepared: PreparedModel, reason: str) -> PreparedModel:
    """Without its draft: chatting so beats not chatting."""
    log_no_draft(reason)
    plan = replace(prepared.plan, drafting=False, drafting_reason=reason, draft_bytes=0)
    return replace(prepared, plan=plan, draft_model=None)


def _assemble_by_layers(
    prepared: PreparedModel,
    memory: ExpertMemory | InPlaceMemory,
    draft: list[list[DraftExpert]] | None,
    scheduler: Scheduler,
    rows: RowPadding,
) -> ModelRunner:
    """Passes in which each layer asks the host for its experts: on CPU, and for models that the GPU's
    kernels do not know."""
    skeleton, device = prepared.skeleton, prepared.compute.device
    state = _sequence_state(prepared)
    passes = PassState(
        memory, scheduler, LookaheadBuffer(len(skeleton.experts)), rows, draft, synthetic=prepared.synthetic,
        gates=find_gates(skeleton, prepared.compute.dtype), linears=prepared.linears,
    )  # fmt: skip
    layers = [RoutedExperts(i, experts.module, passes) for i, experts in enumerate(skeleton.experts)]
    freeze_length(skeleton.model, prepared.plan.context)
    take_over(skeleton, layers, attention=NAME if skeleton.can_rollback else None)
    return ModelRunner(skeleton.model, state, passes, device)


def _sequence_state(prepared: PreparedModel) -> SequenceState:
    if not prepared.skeleton.can_rollback:
        return recurrent_state(prepared.skeleton, prepared.compute.device)
    return KVCache.of_model(prepared.skeleton.text_config, kv_positions(prepared.plan.context))


def _device_tensors(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
