"""A twin of a model that is being loaded: a few of its layers, weights that mean nothing, and tables that
lead nowhere, on which all kernels of the model can be compiled. Runs none of its passes; decides neither
whether that is done nor when (rehearsal does).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from localmoe.core.draft_config import DraftForm
from localmoe.engine.device_parts import make_runner, replace_modules, residency_block
from localmoe.engine.lanes import lane_block, lane_rows
from localmoe.engine.planning import PreparedModel
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.host_store import HostStore
from localmoe.experts.lane_block import LaneRates
from localmoe.experts.records import RecordLayout
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.transfers import HostTransfers
from localmoe.kernels.activations import detect_activation
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_rows import PackedRows
from localmoe.kernels.mailbox import Mailbox, MailboxLayout
from localmoe.model.host_embedding import look_rows_up
from localmoe.model.packed_draft import empty_layer
from localmoe.model.shallow import fill_alike, shallow_bytes, shallow_skeleton
from localmoe.model.skeleton import embedding_shape
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.registry import make_policy
from localmoe.prefetch.scheduler import Scheduler

if TYPE_CHECKING:  # these need Triton and numba's compiler
    from localmoe.experts.cpu_lane import CpuLane
    from localmoe.model.device_lane import DeviceLane

_SPARE_BYTES = 128 << 20  # what the allocator rounds up, tables, and what loading itself takes meanwhile


@dataclass(frozen=True, slots=True)
class Twin:
    """How much of a model is gone through, and how it will run.

    Attributes:
        prepared: the model's, but with few layers.
        draft: form of the low-bit draft, if one will be loaded.
        lane: whether the CPU is to compute experts.
        num_bytes: on the device, beside activations.
    """

    prepared: PreparedModel
    draft: DraftForm | None
    lane: bool
    num_bytes: int

    @classmethod
    def of(cls, prepared: PreparedModel, draft: DraftForm | None, *, lane: bool) -> Twin:
        """See `shallow_skeleton` for where to call it, and for what it raises."""
        skeleton = shallow_skeleton(prepared.skeleton, prepared.compute.dtype)
        layers = int(skeleton.text_config.num_hidden_layers)
        kv_bytes = prepared.plan.kv_bytes * layers // int(prepared.skeleton.text_config.num_hidden_layers)
        num_bytes = shallow_bytes(skeleton) + kv_bytes + _SPARE_BYTES
        return cls(replace(prepared, skeleton=skeleton), draft, lane, num_bytes)

    def compile_passes(self, stop: threading.Event) -> None:
        """Compile what the model's passes launch on the device, and give the memory back. Once only.

        Raises:
            CompilingStopped: `stop` was set.
        """
        try:
            self._compile(stop)
        finally:
            self.prepared.skeleton.model.to("meta")
            if self.prepared.compute.device.type == "cuda":
                torch.cuda.empty_cache()

    def _compile(self, stop: threading.Event) -> None:
        skeleton, compute = self.prepared.skeleton, self.prepared.compute
        with torch.no_grad():
            fill_alike(skeleton, compute.device)
        store = self._store()
        look_rows_up(skeleton, store, compute.dtype, by_kernel=True)
        shape = CacheShape(store.num_layers, store.num_experts, skeleton.experts_per_token, 1)
        scheduler = Scheduler(make_policy("on-demand", shape))
        slots = DeviceSlots(1, 1, compute.dtype, compute.device)  # nothing is copied into it
        block = residency_block(store, compute.device)
        memory = DeviceExpertMemory(store, slots, block, HostTransfers(block.done), scheduler.keep_scores)
        lane = self._lane(store) if self.lane else None
        mode = replace_modules(self.prepared, stop)
        runner = make_runner(self.prepared, mode, memory, scheduler, self._draft(), lane)
        try:
            with torch.inference_mode():
                runner.issue.compile(stop)
        finally:
            runner.release()
            runner.sequence.release()

    def compile_lane(self, stop: threading.Event) -> None:
        """Compile what the CPU lane's threads run, for this processor. `stop` ends it early."""
        from localmoe.experts.lane_code import LaneCode

        experts, top_k = self.prepared.skeleton.experts[0], self.prepared.skeleton.experts_per_token
        activation = detect_activation(experts.module)
        assert activation is not None, "device_support comes first"
        LaneCode(
            experts.layout, self.prepared.source.stored_dtype, activation,
            tokens=lane_rows(top_k, experts.layout.hidden), top_k=top_k,
        ).prepare(stop)  # fmt: skip

    def _store(self) -> HostStore:
        skeleton = self.prepared.skeleton
        layouts = [experts.layout for experts in skeleton.experts]
        stored = self.prepared.source.stored_dtype
        return _OneRecordALayer(layouts, skeleton.num_experts, stored, embedding_shape(skeleton))

    def _draft(self) -> list[LowBitExperts] | None:
        if self.draft is None:
            return None
        skeleton, device, form = self.prepared.skeleton, self.prepared.compute.device, self.draft
        layers = []
        for experts in skeleton.experts:
            layer = empty_layer(
                experts, skeleton.num_experts, form.bits, form.group_size, torch.device("meta"),
                codebook=form.codebook,
            )  # fmt: skip
            gate_up, down = _one_for_all(layer.gate_up, device), _one_for_all(layer.down, device)
            biases = (_zeros(bias, device) for bias in (layer.gate_up_bias, layer.down_bias))
            layers.append(LowBitExperts(gate_up, down, *biases))
        return layers

    def _lane(self, store: HostStore) -> DeviceLane:
        from localmoe.model.device_lane import DeviceLane

        device, top_k = self.prepared.compute.device, self.prepared.skeleton.experts_per_token
        hidden = store.layouts[0].hidden
        layout = MailboxLayout(lane_rows(top_k, hidden), top_k, store.num_experts, hidden)
        box = Mailbox(layout, store.dtype, pinned=device.type == "cuda")
        block = lane_block(box, self.prepared.skeleton, store, device)
        nobody = cast("CpuLane", _NoThreads(box))
        return DeviceLane(nobody, block, LaneRates(1.0, 1.0, 1.0, 1.0), link=True)


@dataclass(frozen=True, slots=True)
class _NoThreads:
    """Stands for a CPU lane that is never given a job."""

    mailbox: Mailbox


class _OneRecordALayer(HostStore):
    """All experts of a layer are at one address, and all rows of the embedding: only addresses are asked for,
    and systems that promise no memory which they lack would count the rest."""

    def _allocate(self, layout: RecordLayout, memory: Callable[[int], mmap.mmap]) -> Tensor:
        return torch.zeros(1, layout.num_bytes(self.dtype), dtype=torch.uint8).expand(self.num_experts, -1)

    def _allocate_embedding(self, shape: tuple[int, int]) -> Tensor:
        # as far up as the real one: a kernel for addresses of 32 bits is another one
        return super()._allocate_embedding((1, shape[1])).expand(shape[0], -1)


def _one_for_all(rows: PackedRows, device: torch.device) -> PackedRows:
    """The codes of one expert in the place of everybody's."""

    def stand_in(like: Tensor) -> Tensor:
        return torch.zeros(like.shape[1:], dtype=like.dtype, device=device).expand(like.shape)

    return replace(
        rows,
        words=stand_in(rows.words),
        top_bits=stand_in(rows.top_bits),
        scales=stand_in(rows.scales),
        codebooks=None if rows.codebooks is None else stand_in(rows.codebooks),
    )


def _zeros(like: Tensor | None, device: torch.device) -> Tensor | None:
    return None if like is None else torch.zeros(like.shape, dtype=like.dtype, device=device)
