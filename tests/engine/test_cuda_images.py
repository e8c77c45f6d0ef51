"""Pictures on a real GPU: the same tokens whatever is drafted and however much memory there is, chats that go
on and come back, and a budget that holds while a picture is read by an encoder of a real size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.engines import ask, budget_for_slots, device_runner_of
from support.tiny_models import tiny_config
from support.vision_models import (
    IMAGE_TOKEN_ID,
    READING_ARCHITECTURES,
    picture,
    shown,
    vision_model,
    write_vision_model,
)

from localmoe.chat import prompt_cache
from localmoe.core.config import EngineConfig
from localmoe.core.types import Message
from localmoe.engine import Engine, plan_model

pytestmark = pytest.mark.gpu
TOKENS = 24
QUESTIONS = (
    shown("what is it", (0, picture(1))),
    shown("and this  one", (9, picture(2, 160, 64))),
    shown("a text"),
    shown("large", (0, picture(3, 400, 300)), (5, picture(4, 32, 320))),
)


def on_gpu(**config: Any) -> EngineConfig:
    return EngineConfig(device="cuda", dtype="bfloat16", context=1024, strict=True, **config)


def led(engine: Engine) -> list[list[int]]:
    """The answers of a chat, a text between, and the first question once more."""
    told: list[Message] = []
    found = []
    for asked in QUESTIONS:
        told.append(asked)
        answer = ask(engine, told, TOKENS)
        found.append(answer.tokens)
        told.append(Message("assistant", answer.text))
    found.append(ask(engine, [shown("another chat")], TOKENS).tokens)
    found.append(ask(engine, told[:1], TOKENS).tokens)
    found.append(ask(engine, [*told, shown("back")], TOKENS).tokens)
    return found


@pytest.mark.parametrize("architecture", READING_ARCHITECTURES)
def test_no_draft_and_no_budget_changes_an_answer_about_pictures(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "LEAST_TOKENS", 8)
    folder = write_vision_model(tmp_path / "m", vision_model(architecture, dtype=torch.bfloat16))
    with Engine.load(str(folder), on_gpu(draft_length=0)) as engine:
        assert device_runner_of(engine).images is not None
        wanted = led(engine)
        assert wanted[-2] == wanted[0]
        engine.reset(ram=True)
        assert ask(engine, [QUESTIONS[0]], TOKENS).tokens == wanted[0]
    few = budget_for_slots(str(folder), 8, device="cuda", dtype="bfloat16", context=1024, strict=True)
    others: list[dict[str, Any]] = [{"draft_length": 4}, {"draft_length": "auto"}, {"vram_budget_bytes": few}]
    for config in others:
        with Engine.load(str(folder), on_gpu(**config)) as engine:
            assert led(engine) == wanted


def test_reading_a_large_picture_keeps_the_budget(tmp_path: Path) -> None:
    """An encoder of Qwen3.5's size before a small text part."""
    text = tiny_config("qwen3_5_moe_text", hidden_size=2048, max_position_embeddings=4096).to_dict()
    config = transformers.AutoConfig.for_model(
        "qwen3_5_moe",
        text_config=text,
        vision_config={"out_hidden_size": 2048},
        image_token_id=IMAGE_TOKEN_ID,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    folder = write_vision_model(tmp_path / "m", model)
    asked: dict[str, Any] = {"device": "cuda", "context": 2048, "strict": True, "draft_length": 0}
    _, plan = plan_model(str(folder), EngineConfig(**asked, vram_budget_bytes=8 << 30))
    with Engine.load(str(folder), EngineConfig(**asked, vram_budget_bytes=plan.total_bytes)) as engine:
        torch.cuda.reset_peak_memory_stats()
        for seed in range(3):
            answer = ask(engine, [shown("x", (0, picture(seed, 1600, 1200)))], 4)
            assert answer.prompt.count(IMAGE_TOKEN_ID) > 900
            assert torch.cuda.max_memory_reserved() <= plan.total_bytes
        again = ask(engine, [shown("x", (0, picture(2, 1600, 1200)))], 4)
        assert again.tokens == answer.tokens and again.stats.reused_tokens > 900
