"""Set up what computes experts, and linear layers beside them, where their 16-bit weights lie, of a model
that the CPU runs alone. Runs no pass."""

from __future__ import annotations

import torch

from localmoe.core.config import EngineConfig
from localmoe.core.errors import HardwareError, sentence_of
from localmoe.engine.planning import MAX_WINDOW, PreparedModel
from localmoe.experts.in_place import InPlaceMemory
from localmoe.experts.record_store import RecordStore
from localmoe.hardware.needs import PREFILL_CHUNK
from localmoe.kernels.activations import detect_activation
from localmoe.model.expert_module import expert_biases
from localmoe.model.host_routers import route_with
from localmoe.model.takeover import attend_with
from localmoe.model.vision_kinds import find_kind
from localmoe.prefetch.scheduler import Scheduler


def make_in_place(
    prepared: PreparedModel, store: RecordStore, scheduler: Scheduler, config: EngineConfig
) -> InPlaceMemory:
    """As many threads as PyTorch has for the rest of the model, unless others are asked for; attached to the
    scheduler.

    Raises:
        HardwareError: their code cannot be compiled here.
    """
    skeleton, vision = prepared.skeleton, find_kind(prepared.skeleton.config)
    of_prompts = max(PREFILL_CHUNK, 0 if vision is None else vision.uncut_tokens)
    activation = detect_activation(skeleton.experts[0].module)
    assert activation is not None, "device_support comes first"
    biases = [expert_biases(experts.module) for experts in skeleton.experts]
    try:
        from localmoe.experts.cpu_lane import CpuLane
        from localmoe.kernels.cpu.row_ops import compile_row_ops
        from localmoe.model.host_norms import compile_norms

        lane = CpuLane(
            store, activation, biases,
            tokens=max(MAX_WINDOW, min(of_prompts, prepared.plan.context)),
            top_k=skeleton.experts_per_token, threads=config.cpu_threads or torch.get_num_threads(),
            pinned=False, dtype=prepared.compute.dtype, caller_works=True,
        )  # fmt: skip
        compile_row_ops()
        compile_norms(skeleton.model)
    except Exception as error:  # numba's compiler may fail in any way
        raise HardwareError(
            f"The CPU's kernels do not work here ({sentence_of(error)}): use --lanes vram+link."
        ) from error
    memory = InPlaceMemory(store, lane)
    if prepared.linears is not None:
        prepared.linears.lane = memory
        route_with(skeleton.model, memory)
    attend_with(skeleton.model, memory.attend)
    scheduler.attach(memory, copy_s=memory.copy_s)
    return memory
