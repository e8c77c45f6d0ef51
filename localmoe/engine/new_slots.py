"""Other slots for a loaded model. Decides no number of them."""

from __future__ import annotations

import torch

from localmoe.engine.device_parts import make_device_memory
from localmoe.engine.host_parts import make_memory
from localmoe.engine.loading import EngineParts
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.in_place import InPlaceMemory
from localmoe.experts.memory import ExpertMemory
from localmoe.model.runner import ModelRunner


def new_memory(parts: EngineParts, num_slots: int) -> None:
    """Put empty slots of another number in the place of those that are there."""
    prepared, runner = parts.prepared, parts.runner
    old = runner.passes.memory
    if isinstance(old, InPlaceMemory):
        return  # whose slots are never empty
    if isinstance(old, DeviceExpertMemory) and old.slots.num_slots == num_slots:
        old.forget()
        return
    release_slots(parts)  # before the new ones are made: both together might not fit
    scheduler = runner.passes.scheduler
    if isinstance(runner, ModelRunner):
        assert isinstance(old, ExpertMemory)
        link = old.link
        runner.passes.memory = make_memory(prepared, link, parts.store, scheduler, num_slots)
    else:
        memory = make_device_memory(prepared, parts.store, scheduler, num_slots)
        if runner.passes.lane is not None:
            runner.passes.lane.takes(memory)
        runner.passes.memory = memory


def release_slots(parts: EngineParts) -> None:
    """Give the slots' memory back, and what passes captured. None can be issued until there are new ones."""
    runner = parts.runner
    runner.passes.memory.close()
    runner.passes.memory.slots.release()
    if not isinstance(runner, ModelRunner):
        runner.forget_graphs()
    if parts.prepared.compute.device.type == "cuda":
        torch.cuda.empty_cache()  # else what comes next may lie in the way of the new slots
