"""Pictures where a CPU computes: experts where their 16-bit weights lie, and passes that are padded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from support.engines import ask, runner_of
from support.vision_models import (
    BY_GRID,
    READING_ARCHITECTURES,
    picture,
    reference_answer,
    shown,
    vision_model,
    write_vision_model,
)

from localmoe.core.config import EngineConfig
from localmoe.engine import Engine
from localmoe.kernels.rows import RowPadding


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", READING_ARCHITECTURES)
def test_experts_in_place_answer_as_transformers_does_also_about_large_pictures(
    architecture: str, tmp_path: Path
) -> None:
    folder = write_vision_model(tmp_path / "m", vision_model(architecture, dtype=torch.bfloat16))
    if architecture == "gemma4":  # as many tokens as it is made for, which one pass takes
        file = folder / "processor_config.json"
        settings = json.loads(file.read_text())
        settings["image_processor"]["max_soft_tokens"] = 280
        file.write_text(json.dumps(settings))
    exact = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    large = picture(1, 640, 448)
    with Engine.load(str(folder), EngineConfig(device="cpu", context=768, draft_length=0)) as engine:
        assert engine.plan.in_place
        answer = ask(engine, [shown("look", (2, large))], 4)
        assert len(answer.prompt) > 280
        assert answer.tokens == reference_answer(exact, folder, answer.prompt, [large], 4)


@pytest.mark.parametrize("architecture", BY_GRID)
def test_padded_passes_reach_the_contexts_end(architecture: str, tmp_path: Path) -> None:
    model = vision_model(architecture)
    folder, seen = write_vision_model(tmp_path / "m", model), picture(1)
    with Engine.load(str(folder), EngineConfig(device="cpu", context=32, draft_length=0)) as engine:
        runner_of(engine).passes.rows = RowPadding(8, 16)
        answer = ask(engine, [shown("x", (0, seen))], 100)
        assert answer.finish_reason == "length" and len(answer.prompt) + len(answer.tokens) == 32
        assert answer.tokens == reference_answer(model, folder, answer.prompt, [seen], len(answer.tokens))
