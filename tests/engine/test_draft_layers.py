"""What a draft takes of the device's memory while it is read."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from support.gptq_checkpoints import CPU, Model, write_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localmoe.engine.draft_layers import LayerReader
from localmoe.quant.draft_checkpoint import DraftCheckpoint


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages that operations made and that are alive: the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)):
            if storage._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self._now -= num_bytes


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.slow(but=4)
def test_what_is_unpacked_takes_less_than_two_slots_beside_the_draft(
    tiny16: Any, tmp_path: Path, bits: int, act_order: bool
) -> None:
    """Which is the room that a rehearsal leaves for it."""
    model = Model.load(tiny16("qwen2_moe"))
    write_checkpoint(model, tmp_path / "draft", bits=bits, act_order=act_order)
    draft, layer = DraftCheckpoint.open(tmp_path / "draft"), model.skeleton.experts[0]
    reader = LayerReader(draft.reader(draft.naming()), layer, model.skeleton.num_experts, CPU)
    with PeakMemory() as memory:
        packed = reader.packed()
    slot_bytes = 2 * layer.layout.elements
    assert 1 < (memory.most - packed.num_bytes) / slot_bytes < 2
