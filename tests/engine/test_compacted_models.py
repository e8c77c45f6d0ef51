"""A model whose tensors were moved together computes as before, and nothing keeps its memory of before."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_more_architectures import ANSWERING
from engine.test_rehearsal import PLAIN, prepared_for_kernels
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("triton")

from localmoe.engine import device_parts
from localmoe.engine.loading import assemble
from localmoe.model.compaction import move_together
from localmoe.model.device_runner import DeviceRunner

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]
TOKENS = [5, 17, 5, 40, 61, 7, 9]
FEW = {"num_hidden_layers": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": FEW, "deepseek_v2": FEW, "glm4_moe_lite": {**FEW, "q_lora_rank": 64}, "gpt_oss": {},
    "qwen3_next": {**FEW, "layer_types": ["linear_attention", "full_attention"]},
    "gemma4_text": ANSWERING["gemma4_text"],
}  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_passes_have_the_same_bits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.choice.prepare(torch.zeros(1, 256)))
    found, old, views, changes = [], [], 0, ARCHITECTURES[architecture]
    for moves in (False, True):
        prepared = prepared_for_kernels(tmp_path, architecture, vocab_size=256, **changes)

        def compact(tensors: Iterable[Tensor], moves: bool = moves) -> None:
            nonlocal views
            given = [tensor for tensor in tensors if not tensor.is_meta]
            if moves and given:
                storages = {t.untyped_storage().data_ptr(): t for t in given}
                views += len({id(t) for t in given}) - len(storages)
                old.extend((StorageWeakRef(t.untyped_storage()), t.nbytes) for t in storages.values())
                del storages
                move_together(given, lambda: None)

        monkeypatch.setattr(device_parts, "compact", compact)
        parts = assemble(prepared, PLAIN, progress=None, cancel=None)
        try:
            runner = parts.runner
            found.append([runner.run(TOKENS, "prefill", last_only=True).clone()])
            found[-1] += [runner.run([token], "verify", last_only=True).clone() for token in (3, 8)]
        finally:
            parts.close()
    assert all(map(torch.equal, *found))
    assert views >= 6 and len(old) > 20
    kept = sum(num_bytes for storage, num_bytes in old if not storage.expired())
    assert kept <= 512  # frequencies of angles
