"""Assemble the passes of a model whose steps run whole on a GPU; see device_support for which can."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from localmoe.core.config import EngineConfig
from localmoe.core.errors import UnsupportedModelError, sentence_of
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.engine.lanes import make_lane
from localmoe.engine.mtp_drafts import MTP
from localmoe.engine.planning import PreparedModel
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.disk_memory import DiskExpertMemory
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.link_speed import measure_copy_s
from localmoe.experts.record_store import RecordStore
from localmoe.experts.residency_block import ResidencyBlock
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.stage_block import StageBlock
from localmoe.experts.transfers import CudaTransfers, HostTransfers, Transfers
from localmoe.hardware.cuda import read_ns
from localmoe.hardware.needs import cache_positions, kv_positions
from localmoe.kernels.activations import Activation, detect_activation
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.rows import RowPadding
from localmoe.model.compaction import compact
from localmoe.model.mtp_layer import MtpLayer
from localmoe.model.next_gate import find_gates
from localmoe.model.pass_kinds import WINDOW_BUCKETS
from localmoe.model.recurrent_nets import recurrent_nets
from localmoe.model.skeleton import Skeleton
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.scheduler import Scheduler

if TYPE_CHECKING:  # these need Triton
    from localmoe.model.device_cache import DeviceKVCache
    from localmoe.model.device_lane import DeviceLane
    from localmoe.model.device_linear import KernelMode
    from localmoe.model.device_mtp import DeviceMtp
    from localmoe.model.device_runner import DeviceRunner
    from localmoe.model.device_window import DeviceWindow


def assemble_on_device(
    prepared: PreparedModel,
    store: RecordStore,
    draft: list[LowBitExperts] | None,
    scheduler: Scheduler,
    config: EngineConfig,
    *,
    own: MtpLayer | None = None,
    compiled: bool = False,
) -> DeviceRunner:
    """Cache, slots, table, CPU lane and passes; the skeleton's shared weights are on the device already.

    Args:
        own: the layer that drafts, likewise.
        compiled: the kernels were, on a twin of the model (see rehearsal).

    Raises:
        UnsupportedModelError: the first pass fails.
        HardwareError: the CPU lane that was asked for does not work.
    """
    skeleton = prepared.skeleton
    mode = replace_modules(prepared)
    compact([*skeleton.model.parameters(), *skeleton.model.buffers(), *mode.joined])
    compact(tensor for layer in draft or () for tensor in layer.tensors())  # which may be given up alone
    memory = make_device_memory(prepared, store, scheduler, prepared.plan.num_slots)
    lane, lanes = make_lane(skeleton, store, memory, config)
    if lane is not None:
        scheduler.watch_cpu(lambda: lane.counters().busy_s)
    try:
        runner = make_runner(prepared, mode, memory, scheduler, draft, lane, own)
        runner.passes.lanes = lanes
        runner.issue.compiled |= compiled and own is None  # the twin has no such layer
        try:
            _prepare(runner, prepared.source.name)
        except UnsupportedModelError:
            if own is None or config.drafter == MTP:
                raise
            runner.passes.mtp = None  # nobody asked for it: without it the model may run
            runner.rewind(0)  # of the pass that failed
            runner.forget_graphs()
            _prepare(runner, prepared.source.name)
    except BaseException:
        if lane is not None:
            lane.close()
        raise
    return runner


@torch.inference_mode()
def replace_modules(prepared: PreparedModel, stop: threading.Event | None = None) -> KernelMode:
    """Give the skeleton, whose shared weights are on the device, kernels for what lies around its experts.
    The mode in which it has to run. `stop` ends it early (CompilingStopped)."""
    from localmoe.model.device_modules import install

    return install(prepared.skeleton.model, prepared.plan.context, stop)


def make_runner(
    prepared: PreparedModel,
    mode: KernelMode,
    memory: DeviceExpertMemory,
    scheduler: Scheduler,
    draft: list[LowBitExperts] | None,
    lane: DeviceLane | None,
    own: MtpLayer | None = None,
) -> DeviceRunner:
    """Window, cache and passes over all that; nothing has run yet. mode: of `replace_modules`. own: the layer
    that drafts.

    Raises:
        UnsupportedModelError: the architecture does not let its attention or experts be replaced.
    """
    from localmoe.kernels.gpu.routed_experts import ExpertShape, stage_block
    from localmoe.model.device_cache import DeviceKVCache
    from localmoe.model.device_experts import DevicePassState, DeviceRoutedExperts, pair_bytes
    from localmoe.model.device_foresight import Foresight
    from localmoe.model.device_linear import KernelMode
    from localmoe.model.device_passes import DevicePasses
    from localmoe.model.device_rests import RestCopies
    from localmoe.model.device_runner import DeviceRunner
    from localmoe.model.device_stamp import form_of, stamp_of
    from localmoe.model.device_states import RecurrentStates, take_over_recurrence
    from localmoe.model.device_takeover import take_over_device
    from localmoe.model.device_window import DeviceWindow

    skeleton, device = prepared.skeleton, prepared.compute.device
    context, synthetic = prepared.plan.context, prepared.synthetic
    window = DeviceWindow(WINDOW_BUCKETS[-1], device)
    rows = RowPadding(1, WINDOW_BUCKETS[-1])
    lookahead = LookaheadBuffer(len(skeleton.experts))
    passes = DevicePassState(
        memory, scheduler, lookahead, rows, window, draft, lane=lane, synthetic=synthetic
    )
    layers, shapes = [], []
    for layer, experts in enumerate(skeleton.experts):
        layout = experts.layout
        activation = _activation(skeleton, layer)
        shape = ExpertShape(layout.hidden, layout.inner, layout.transposed, activation, layout.form)
        shapes.append(shape)
        layers.append(DeviceRoutedExperts(layer, experts.module, shape, passes))
    stage, block = None, min(stage_block(shape) for shape in shapes)
    on_disk = isinstance(memory.store, DiskStore)  # the CPU takes part then
    if block and memory.may_prefetch and not on_disk and len({shape.hidden for shape in shapes}) == 1:
        layouts = [experts.layout for experts in skeleton.experts]
        stage = StageBlock(layouts, block, prepared.compute.dtype, device)
    if lane is not None or stage is not None:
        with KernelMode():  # products of PyTorch's library would take memory of the GPU for good
            gates = find_gates(skeleton)
        passes.foresight = Foresight(gates, device, stage)
    if lane is not None:
        passes.rests = RestCopies(device)
    take_over_device(skeleton, layers, window)
    nets = {} if skeleton.can_rollback else recurrent_nets(skeleton.model)
    states = RecurrentStates(nets, window, prepared.compute.dtype) if nets else None
    if states is not None:
        take_over_recurrence(nets, states)
    num_layers = int(skeleton.text_config.num_hidden_layers)
    positions, sliding = kv_positions(context), prepared.footprint.sliding_window
    # of a twin, those of its few layers; all rings are as long as the plan's
    windows = {layer: sliding for layer, shape in enumerate(skeleton.kv_layers) if shape.window}
    kept = [
        shape.elements * cache_positions(positions, windows.get(layer))
        for layer, shape in enumerate(skeleton.kv_layers)
    ]
    if own is not None:  # keeps what it does behind all layers
        kept.append(own.made.kv_elements_per_token * positions)
    kv_bytes = sum(kept) * prepared.compute.dtype.itemsize or None
    cache = DeviceKVCache(num_layers + (own is not None), positions, window, states, kv_bytes, windows)
    stamp = stamp_of(
        skeleton.model.config, prepared.compute.dtype, device,
        context=context, draft=form_of(draft), form=shapes[0].form, lane=lane is not None,
        synthetic=synthetic, packed=len(skeleton.packed_keys), mtp=own is not None,
    )  # fmt: skip
    passes.experts_per_token = skeleton.experts_per_token
    passes.row_bytes = skeleton.experts_per_token * max(map(pair_bytes, shapes))
    passes.prompt_rows = prepared.plan.prefill_chunk
    if own is not None:
        passes.mtp = make_mtp(own, mode, skeleton, window, cache, context, num_layers)
    issue = DevicePasses(skeleton.model, cache, passes, mode, context)
    return DeviceRunner(issue, cache, passes, stamp if issue.on_gpu else None)


def make_mtp(
    own: MtpLayer,
    target_mode: KernelMode,
    target: Skeleton,
    window: DeviceWindow,
    cache: DeviceKVCache,
    context: int,
    layer: int,
) -> DeviceMtp:
    """The layer that drafts, with kernels, as decoder layer `layer` of the cache.

    Raises:
        UnsupportedModelError: the architecture does not let its attention or experts be replaced.
    """
    from localmoe.model.device_modules import install
    from localmoe.model.device_mtp import DeviceMtp, MtpModules
    from localmoe.model.device_takeover import take_over_device

    with torch.inference_mode():
        mode = install(own.model, context)
    take_over_device(own.made.skeleton, [own.experts], window)
    for module in own.model.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = layer
    modules = MtpModules(own, mode, target.model, target_mode)
    return DeviceMtp(modules, window, cache, own.model.dtype, context)


def _prepare(runner: DeviceRunner, name: str) -> None:
    try:
        runner.prepare()
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ) as error:  # a model's own code may fail in any way on what stands in for masks and modules
        raise UnsupportedModelError(
            f"{name} cannot run in localmoe's GPU kernels ({sentence_of(error)}): "
            "use --dtype float32, which computes it pass by pass, or --device cpu."
        ) from error


def _activation(skeleton: Skeleton, layer: int) -> Activation:
    found = detect_activation(skeleton.experts[layer].module)
    assert found is not None, "device_support comes first"
    return found


def make_device_memory(
    prepared: PreparedModel, store: RecordStore, scheduler: Scheduler, num_slots: int
) -> DeviceExpertMemory:
    """Slots of the planned number, empty, and attached to the scheduler."""
    device, dtype = prepared.compute.device, prepared.compute.dtype
    assert store.dtype == dtype, "kernels read records as they are"
    slots = DeviceSlots(num_slots, store.largest_record, store.word, device)
    block = residency_block(store, device)
    make: Callable[[torch.Tensor], Transfers] = CudaTransfers if device.type == "cuda" else HostTransfers
    arguments = slots, block, make(block.done), scheduler.keep_scores
    memory: DeviceExpertMemory
    if isinstance(store, DiskStore):
        memory = DiskExpertMemory(store, *arguments)
    else:
        memory = DeviceExpertMemory(store, *arguments)
    record_bytes = store.layouts[0].num_bytes(store.dtype)
    memory.copy_s = copy_s = measure_copy_s(store.some_record, slots)
    scheduler.attach(
        memory,
        copy_s=None if copy_s is None else lambda: copy_s,
        copies=lambda: memory.counters().h2d_bytes / record_bytes,
        stall_s=lambda: memory.counters().stall_s,
        issue_s=lambda: memory.issue_s,
    )
    return memory


def cache_shape(prepared: PreparedModel, num_slots: int) -> CacheShape:
    """What a policy may know."""
    footprint = prepared.footprint
    return CacheShape(footprint.num_layers, footprint.num_experts, footprint.experts_per_token, num_slots)


def residency_block(store: RecordStore, device: torch.device) -> ResidencyBlock:
    """The table of a model's experts; on a GPU, passes measure what they wait for."""
    expert_ns = None
    if device.type == "cuda":
        expert_ns = [read_ns(device, layout.num_bytes(store.dtype)) for layout in store.layouts]
    return ResidencyBlock(store.num_layers, store.num_experts, device, expert_ns)
