"""Small models whose experts lie on the disk, beside the same ones in RAM."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import numpy as np
import torch

from localmoe.core.types import ExpertKey
from localmoe.experts.disk_memory import DiskExpertMemory
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.host_store import HostStore
from localmoe.experts.record_file import RecordFile
from localmoe.experts.records import RecordLayout
from localmoe.experts.residency_block import ResidencyBlock
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.transfers import HostTransfers
from localmoe.kernels.residency import CPU, HIT, MISS, ON_HOST
from localmoe.kernels.weight_forms import WeightForm

HIDDEN, INNER = 64, 64
_CPU_DEVICE = torch.device("cpu")


def fill(store: HostStore) -> None:
    """Random weights, the same each time."""
    generator = torch.Generator().manual_seed(1)
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            key = ExpertKey(layer, expert)
            if store.layouts[layer].bf12:
                for matrix in store.bf12_views(key):
                    weights = torch.randn(matrix.rows, matrix.columns, generator=generator) * 0.1
                    matrix.put(0, weights.bfloat16())
            else:
                store.record(key).copy_(torch.randn(store.record(key).shape, generator=generator) * 0.1)


def stores(
    folder: Path, places: int, *, layers: int = 3, experts: int = 12, form: WeightForm = WeightForm.BF12
) -> tuple[DiskStore, HostStore]:
    """With so many places in RAM; and all there."""
    layouts = [RecordLayout((2 * INNER, HIDDEN), (HIDDEN, INNER), False, form)] * layers
    file = RecordFile.in_folder(folder, layouts, experts, torch.bfloat16, "these weights")
    with file.written(lambda num_bytes: None) as memory:
        written = HostStore(layouts, experts, torch.bfloat16, memory=memory)
        fill(written)
        written.close()
    whole = HostStore(layouts, experts, torch.bfloat16)
    fill(whole)
    return DiskStore(file, places), whole


def memory_of(store: DiskStore, num_slots: int) -> DiskExpertMemory:
    """On the CPU."""
    block = ResidencyBlock(store.num_layers, store.num_experts, _CPU_DEVICE)
    slots = DeviceSlots(num_slots, store.largest_record, store.word, _CPU_DEVICE)
    return DiskExpertMemory(
        store, slots, block, HostTransfers(block.done), lambda last_use: (last_use.astype(np.float32), True)
    )


def settle(store: DiskStore) -> None:
    """Until nothing is read any more."""
    until = time.monotonic() + 30
    while store._coming or store._to_fill is not None:
        assert time.monotonic() < until
        time.sleep(0.002)


def run_pass(
    memory: DiskExpertMemory, store: DiskStore, asked: list[ExpertKey], *, behind: bool = False,
    whole: HostStore | None = None,
) -> int:  # fmt: skip
    """As the GPU and the lane do: what is in no slot is computed by the CPU, for which it comes into RAM, or
    read by kernels where the table says that it lies there; so many experts are. whole: by which what they
    find is checked."""
    (memory.open_behind if behind else memory.open_pass)()
    log = np.zeros((store.num_layers, store.num_experts), dtype=np.int32)
    for layer in range(store.num_layers):
        absent, tickets = [], memory.block.view(layer).ticket.tolist()
        for key in (key for key in asked if key.layer == layer):
            log[key] = HIT if tickets[key.expert] >= 0 else MISS if tickets[key.expert] == ON_HOST else CPU
            if log[key] == CPU:
                absent.append(key.expert)
        if absent:
            with store.held(layer, absent, counts=False) as (_, groups):
                assert list(groups)
    if whole is not None:
        for key in (key for key in asked if log[key] == MISS):
            found, wanted = int(memory.block.view(key.layer).address[key.expert]), whole.record(key)
            lies = (ctypes.c_char * wanted.nbytes).from_address(found)
            assert bytes(lies) == wanted.contiguous().view(torch.uint8).numpy().tobytes(), key
    memory.close_pass(log)
    return int((log == MISS).sum())
