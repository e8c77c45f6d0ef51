"""What passes layer by layer get their experts from: slots and the link to them, or the RAM where all lie.
Decides no number of slots."""

from __future__ import annotations

import torch

from localmoe.core.config import EngineConfig
from localmoe.engine.in_place import make_in_place
from localmoe.engine.planning import PreparedModel
from localmoe.experts.apart import ApartFromRam
from localmoe.experts.claims import VictimChooser
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.in_place import InPlaceMemory
from localmoe.experts.link import CudaLink, HostLink, Link
from localmoe.experts.memory import ExpertMemory
from localmoe.experts.record_store import RecordStore
from localmoe.experts.slots import DeviceSlots
from localmoe.prefetch.scheduler import Scheduler


def make_host_memory(
    prepared: PreparedModel, store: RecordStore, scheduler: Scheduler, config: EngineConfig
) -> ExpertMemory | InPlaceMemory:
    """What passes by layers get their experts from."""
    if prepared.plan.in_place:
        return make_in_place(prepared, store, scheduler, config)
    link = _make_link(config, prepared.compute.device)
    return make_memory(prepared, link, store, scheduler, prepared.plan.num_slots)


def _make_link(config: EngineConfig, device: torch.device) -> Link:
    """How records travel to the device."""
    return CudaLink(device) if device.type == "cuda" else HostLink(config.emulated_link_bytes_per_s)


def make_memory(
    prepared: PreparedModel, link: Link, store: RecordStore, scheduler: Scheduler, num_slots: int
) -> ExpertMemory:
    """Slots of the planned number, filled by a worker of their own, and attached to the scheduler."""
    device, dtype = prepared.compute.device, prepared.compute.dtype
    elements = max(layout.elements for layout in store.layouts)
    slots = DeviceSlots(num_slots, elements, dtype, device)
    choose: VictimChooser = scheduler.choose_victim
    if isinstance(store, DiskStore):
        choose = ApartFromRam(store, choose, lambda: memory.residency())
    memory = ExpertMemory(store, slots, link, choose)
    scheduler.attach(memory, copy_s=memory.copy_s)
    return memory
