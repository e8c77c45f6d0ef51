"""Pictures where a CPU computes: experts where their 16-bit weights lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from support.engines import ask
from support.vision_models import (
    READING_ARCHITECTURES,
    picture,
    reference_answer,
    shown,
    vision_model,
    write_vision_model,
)

from localmoe.core.config import EngineConfig
from localmoe.engine import Engine


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
