"""Small models whose experts lie on the disk, beside the same ones in RAM."""

from __future__ import annotations

from pathlib import Path

import torch

from localmoe.core.types import ExpertKey
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.host_store import HostStore
from localmoe.experts.record_file import RecordFile
from localmoe.experts.records import RecordLayout
from localmoe.kernels.weight_forms import WeightForm

HIDDEN, INNER = 64, 64


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
