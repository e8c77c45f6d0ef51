"""A model in FP8, NVFP4 or INT4 on a real GPU: the same tokens whatever is drafted, cached and left to the
CPU's part, and logits as those of its weights in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import ask, budget_for_slots, device_runner_of
from support.float8_models import KEPT_BLOCK, write_float8_model
from support.int4_models import write_int4_model
from support.nvfp4_models import write_nvfp4_model
from support.tiny_models import CONTEXT, tiny_model

from localmoe.core.config import EngineConfig
from localmoe.engine import Engine

pytestmark = pytest.mark.gpu
CASES = (
    ("fp8", "qwen3_moe"), ("fp8", "deepseek_v2"), ("fp8", "qwen3_5_moe_text"),
    ("nvfp4", "qwen3_moe"), ("nvfp4", "nemotron_h"), ("nvfp4", "qwen3_5_moe_text"),
    ("int4", "qwen3_moe"), ("int4-32", "nemotron_h"), ("int4-32", "qwen3_5_moe_text"),
)  # fmt: skip
TEXT = list(range(20, 60))


ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "context": CONTEXT, "strict": True}


def folders_of(form: str, architecture: str, folder: Path) -> tuple[Path, Path]:
    """So published, and in 16 bits."""
    model = tiny_model(architecture, dtype=torch.bfloat16)
    if form == "nvfp4":
        return write_nvfp4_model(folder, model)
    if form == "int4":
        return write_int4_model(folder, model, published="awq", symmetric=False)
    if form == "int4-32":
        return write_int4_model(folder, model, published="compressed-tensors", group=32, symmetric=False)
    return write_float8_model(folder, model, block=KEPT_BLOCK)


@pytest.mark.parametrize(("form", "architecture"), CASES)
def test_no_draft_and_no_budget_changes_an_answer(form: str, architecture: str, tmp_path: Path) -> None:
    folder, _ = folders_of(form, architecture, tmp_path)
    few = budget_for_slots(str(folder), 8, **ON_GPU, draft_length=0)
    found = []
    for options in (
        {"draft_length": 0}, {"draft_length": 0, "vram_budget_bytes": few},
        {"draft_length": 4, "draft_bits": 8}, {"draft_length": 4, "drafter": "prompt-lookup"},
    ):  # fmt: skip
        with Engine.load(str(folder), EngineConfig(**{**ON_GPU, **options})) as engine:
            assert engine.footprint.expert_form == form and engine.prepared.compute.whole_passes
            found.append([ask(engine, text, 32).tokens for text in ("one two", "three four five")])
    assert all(answers == found[0] for answers in found)


@pytest.mark.parametrize(("form", "architecture"), CASES)
def test_logits_are_those_of_the_same_weights_in_16_bits(
    form: str, architecture: str, tmp_path: Path
) -> None:
    logits = []
    for folder in folders_of(form, architecture, tmp_path):
        for packing in (True, False):
            config = EngineConfig(**ON_GPU, draft_length=0, pack_experts=packing)
            with Engine.load(str(folder), config) as engine:
                runner = device_runner_of(engine)
                logits.append(runner.run(TEXT, "prefill", last_only=True).double().cpu())
    for other in logits[1:]:  # as far off as 16-bit sums in another order are, see test_cuda_lanes
        assert float((other - logits[0]).norm() / logits[0].norm()) < 3e-2
