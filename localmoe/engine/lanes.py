"""Set up the CPU lane of a model whose passes run whole on a GPU: threads, measured rates, and whether it
pays. Runs no pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from localmoe.core.config import EngineConfig
from localmoe.core.errors import HardwareError, sentence_of
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.lane_balance import LanePass
from localmoe.experts.lane_block import PATIENCE, LaneBlock, LaneRates
from localmoe.experts.lane_trial import LaneTrial
from localmoe.experts.record_store import RecordStore
from localmoe.experts.records import RecordLayout
from localmoe.experts.rest_block import RestBlock
from localmoe.hardware.cpu import core_counts
from localmoe.hardware.cuda import ends_long_passes
from localmoe.kernels.activations import detect_activation
from localmoe.kernels.mailbox import Mailbox
from localmoe.model.expert_module import expert_biases
from localmoe.model.pass_kinds import WINDOW_BUCKETS
from localmoe.model.prompt_ways import MOST_ASKED
from localmoe.model.skeleton import Skeleton

if TYPE_CHECKING:  # these need Triton and numba's compiler
    from localmoe.experts.cpu_lane import CpuLane
    from localmoe.model.device_lane import DeviceLane

_LEAST_THREADS = 2
_MANY_CORES = 8
_LEAST_SHARE = 0.15  # of the link's rate, below which handing over costs more than the CPU gains
_HANDOVER_US = 15.0  # posting and answering, both ways over PCIe
_LINK_KERNEL = 0.92  # rate of kernels that read over the link, beside a copy's
_JOBS, _LONG_JOBS = 12, 3
_LONG_US = 20_000.0  # what a job may take that is measured as often as short ones
DISK_PATIENCE = 30  # times as long as a job may take otherwise
_SOME, _OF_PROMPTS = 4, 32  # tokens that ask for an expert in jobs that are measured
# bytes of a mailbox, less than what PyTorch rounds a piece of pinned memory up to
_MOST_MAILBOX = (64 << 20) - (64 << 10)


def make_lane(
    skeleton: Skeleton, store: RecordStore, memory: DeviceExpertMemory, config: EngineConfig
) -> tuple[DeviceLane | None, str]:
    """The CPU lane that the settings ask for, or None, and what to tell people of it.

    Raises:
        HardwareError: it was asked for by name and does not work here.
    """
    from localmoe.model.device_lane import DeviceLane

    disk = isinstance(store, DiskStore)
    reason = why_not(memory.slots.device, store.layouts, config)
    assert not (reason and disk), "planning comes first"
    if reason:
        return None, f"VRAM and PCIe ({reason})"
    lane: CpuLane | None = None
    try:
        lane = _threads(skeleton, store, config)
        rates, of_prompts = measure_rates(lane, store, memory)
    except Exception as error:  # numba's compiler may fail in any way; without this lane all works as well
        if lane is not None:
            lane.close()
        if config.lanes != "auto" or disk:
            raise HardwareError(
                f"The CPU lane does not work here ({sentence_of(error)}): use --lanes vram+link."
            ) from error
        return None, f"VRAM and PCIe (the CPU lane does not work here: {sentence_of(error)})"
    if config.lanes == "auto" and not disk and rates.link_us < _LEAST_SHARE * rates.first_us:
        lane.close()
        slower = f"{rates.first_us:.0f} us on this CPU and {rates.link_us:.0f} over PCIe"
        return None, f"VRAM and PCIe (an expert takes {slower})"
    block = lane_block(lane.mailbox, skeleton, store, memory.block.done.device)
    link = config.lanes != "vram+cpu"
    words = "VRAM, PCIe and CPU" if link else "VRAM and CPU"
    words += ", from RAM or the disk" if disk else ""
    brief = disk and ends_long_passes(memory.block.done.device)
    trial = LaneTrial() if config.lanes == "auto" and not disk else None
    made = DeviceLane(
        lane, block, rates, link=link, of_prompts=of_prompts, needed=disk, brief=brief, trial=trial
    )
    made.takes(memory)
    unit = ", a matrix unit for prompts" if lane.has_matrix_unit else ""
    return made, f"{words} ({lane.num_threads} threads{unit})"


def why_not(device: torch.device, layouts: Sequence[RecordLayout], config: EngineConfig) -> str:
    """Why no CPU lane is tried, for models with such records; "" if one is."""
    if device.type != "cuda":
        return "there is no GPU"
    if config.strict:
        return "strict"
    if config.lanes == "vram+link":
        return "as set"
    if len({layout.hidden for layout in layouts}) > 1:
        return "layers differ in width"
    if config.lanes == "auto" and num_threads(config) < _LEAST_THREADS:
        return "one core is too few for the CPU lane"
    return ""


def why_not_from_disk(device: torch.device, layouts: Sequence[RecordLayout], config: EngineConfig) -> str:
    """Why steps of a model whose experts lie on the disk cannot run whole on a GPU; "" if they can."""
    reason = why_not(device, layouts, config)
    return f"experts on the disk come by the CPU lane: {reason}" if reason else ""


def num_threads(config: EngineConfig) -> int:
    """As asked for, or one for each core but those that the host's own work and other programs need: threads
    that have to share a core hold all others up."""
    cores = core_counts()[0]
    return config.cpu_threads or max(1, cores - (2 if cores >= _MANY_CORES else 1))


def lane_rows(top_k: int, hidden: int) -> int:
    """Of the longest pass that may take the lane, of a model of 16 bits: all that goes to and fro lies in
    pinned memory."""
    fits = _MOST_MAILBOX // (4 * top_k * hidden + 2 * hidden + 4 * top_k)
    return max(WINDOW_BUCKETS[-1], min(MOST_ASKED, fits))


def _threads(skeleton: Skeleton, store: RecordStore, config: EngineConfig) -> CpuLane:
    from localmoe.experts.cpu_lane import CpuLane
    from localmoe.experts.disk_lane import DiskLane

    module = skeleton.experts[0].module
    activation = detect_activation(module)
    assert activation is not None, "device_support comes first"
    biases = [expert_biases(experts.module) for experts in skeleton.experts]
    make = partial(DiskLane, store) if isinstance(store, DiskStore) else partial(CpuLane, store)
    return make(
        activation,
        biases,
        tokens=lane_rows(skeleton.experts_per_token, store.layouts[0].hidden),
        top_k=skeleton.experts_per_token,
        threads=num_threads(config),
        pinned=torch.cuda.is_available(),
    )


def lane_block(box: Mailbox, skeleton: Skeleton, store: RecordStore, device: torch.device) -> LaneBlock:
    """The lane's words on the device, for jobs that go through this mailbox."""
    from localmoe.kernels.gpu.routed_experts import split_quantum

    layouts = store.layouts
    quanta = [split_quantum(layout.inner, layout.form) for layout in layouts]
    activations = [detect_activation(experts.module) for experts in skeleton.experts]
    interleaved = [activation is not None and activation.interleaved for activation in activations]
    rests = RestBlock(layouts, interleaved, quanta, store.dtype, device)
    inner = [layout.inner for layout in layouts]
    patience = PATIENCE * DISK_PATIENCE if isinstance(store, DiskStore) else PATIENCE
    return LaneBlock(box, inner, quanta, store.num_experts, device, patience, rests)


def measure_rates(
    lane: CpuLane, store: RecordStore, memory: DeviceExpertMemory
) -> tuple[LaneRates, dict[LanePass, LaneRates]]:
    """What a job and each expert in it cost on the CPU, for one token and for each further one, and what an
    expert costs over the link; for the few tokens of a window, and for as many as a prompt's pass has, of
    each kind that there can be.

    Raises:
        HardwareError: the lane does not answer.
    """
    few, many = 1, min(4, store.num_experts)
    one, several = _job_us(lane, store, few, 1), _job_us(lane, store, many, 1)
    first = max((several - one) / (many - few), several / (2 * many)) if many > few else one
    overhead = max(0.0, one - few * first)
    for_some = _job_us(lane, store, many, _SOME)
    further = max(0.0, (for_some - several) / ((_SOME - 1) * many))
    assert memory.copy_s is not None, "a GPU has a link"
    handover, link = _HANDOVER_US + overhead, memory.copy_s * 1e6 / _LINK_KERNEL
    of_prompts = {}
    for kind in (LanePass.PROMPT, LanePass.UNIT) if lane.has_matrix_unit else (LanePass.PROMPT,):
        lane.use_matrix_unit(kind is LanePass.UNIT)
        cost = _of_many(lane, store, many)
        of_prompts[kind] = LaneRates(handover, max(cost[0] - overhead / many, first / 2), cost[1], link)
    lane.use_matrix_unit(False)
    return LaneRates(handover, first, further, link), of_prompts


def _of_many(lane: CpuLane, store: RecordStore, experts: int) -> tuple[float, float]:
    """Microseconds of an expert for its first token and for each further one, in jobs of `experts`. Memory is
    the limit for few tokens, of which further ones cost next to nothing, and computing for many."""
    for_some = _job_us(lane, store, experts, _SOME) / experts
    together, jobs = experts, _JOBS  # as many as keep all threads busy, and a matrix unit awake
    if for_some * experts * _OF_PROMPTS / _SOME > _LONG_US:  # a slow CPU's
        together, jobs = 1, _LONG_JOBS
    for_many = _job_us(lane, store, together, _OF_PROMPTS, jobs) / together
    each = max(0.0, (for_many - for_some) / (_OF_PROMPTS - _SOME))
    return for_some - (_SOME - 1) * each, each


def _job_us(lane: CpuLane, store: RecordStore, num_experts: int, tokens: int, num_jobs: int = _JOBS) -> float:
    """The median of jobs, of other experts each time, so that no cache holds them."""
    if isinstance(store, DiskStore):  # which has to read each of them, and they divide no work
        num_jobs = min(num_jobs, _LONG_JOBS)
    pairs = [lane.layout.top_k * row for row in range(tokens)]
    x = torch.full((tokens, lane.layout.hidden), 0.5, dtype=store.dtype)
    times = []
    for job in range(num_jobs):
        experts = [(num_experts * job + i) % store.num_experts for i in range(num_experts)]
        layer = job % store.num_layers
        with _in_ram(store, layer, experts):
            before = lane.counters().busy_s
            lane.compute(layer, x, [(expert, pairs, store.layouts[layer].inner) for expert in experts])
            times.append((lane.counters().busy_s - before) * 1e6)
    return sorted(times)[num_jobs // 2]


@contextmanager
def _in_ram(store: RecordStore, layer: int, experts: Sequence[int]) -> Iterator[None]:
    """What a disk takes is no part of the CPU's rates."""
    if not isinstance(store, DiskStore):
        yield
        return
    with store.held(layer, experts, counts=False) as (_, groups):
        for _ in groups:
            pass
        yield
