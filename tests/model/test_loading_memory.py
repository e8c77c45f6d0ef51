"""A load needs hardly more memory than the checkpoint, and gives it back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import budget_for_slots
from support.sparse_files import tensor_shapes, write_zeros
from support.tiny_models import tiny_config
from support.tokenizer import write_tokenizer

from localmoe.hub.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
LIMIT = 1.15
MB = 10**6
NUM_EXPERTS, HIDDEN, INNER = 32, 512, 1024


def write_big_checkpoint(folder: Path, *, fused: bool) -> Path:
    """A bfloat16 model of some 400 MB, nearly all experts, as a file with holes: all weights are zero."""
    config = tiny_config(
        "qwen2_moe", num_hidden_layers=4, hidden_size=HIDDEN, moe_intermediate_size=INNER,
        num_experts=NUM_EXPERTS, dtype=torch.bfloat16,
    )  # fmt: skip
    folder.mkdir()
    config.save_pretrained(folder)
    write_tokenizer(folder)
    write_zeros(folder / "model.safetensors", tensor_shapes(config, fused=fused))
    return folder


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("fused", [False, True], ids=["one tensor an expert", "fused"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is measured as Linux counts it")
def test_peak_memory_of_a_load_is_at_most_115_percent_of_the_checkpoint(
    fused: bool, tiny: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder = write_big_checkpoint(tmp_path / "big", fused=fused)
    size = Checkpoint.open(folder).total_bytes
    assert 300 * MB < size < 500 * MB
    budget = budget_for_slots(str(folder), 3, draft_length=0, context=64)
    command = [sys.executable, str(Path(__file__).with_name("load_and_report_memory.py")), str(budget)]
    # without a GPU, whose driver takes memory of its own
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(tiny("qwen2_moe")[0]), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(f"held {report['held'] / size:.3f}, peak {report['peak'] / size:.3f} of {size / MB:.0f}M")
    assert 0.9 * size < report["held"], "the weights have to be in memory"
    assert report["peak"] <= LIMIT * size
