"""The engine on a real GPU: exact for every setting, and inside its budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import ask, load_with_slots
from support.tiny_models import ARCHITECTURES

from localmoe.core.config import EngineConfig
from localmoe.core.types import Message
from localmoe.engine import Engine

pytestmark = pytest.mark.gpu
QUESTIONS = (
    "hello",
    "who are you?",
    "tell me a story about a fox",
    "what is 3 + 4?",
    "Once there was a king",
)
Tiny = Callable[[str], tuple[Path, Any]]


def answers(engine: Engine, **request: Any) -> list[list[int]]:
    return [ask(engine, [Message("user", question)], 48, **request).tokens for question in QUESTIONS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_embedded_model_answers_alike_for_every_setting_within_the_budget(dtype: str) -> None:
    expected: list[list[int]] | None = None
    for budget in (120 << 20, 100 << 20):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        config = EngineConfig(device="cuda", dtype=dtype, vram_budget_bytes=budget)  # type: ignore[arg-type]
        with Engine.load("demo", config) as engine:
            assert engine.info().exactness.startswith("exact")
            for policy in ("on-demand", "moe-speq"):
                for length in (0, 1, 4, 8, "auto"):
                    engine.reset()
                    given = answers(engine, policy=policy, draft_length=length)
                    expected = expected or given
                    assert given == expected, (budget, policy, length)
            assert torch.cuda.max_memory_allocated() <= budget
            assert torch.cuda.max_memory_reserved() <= budget


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models_answer_alike_with_and_without_drafts(architecture: str, tiny: Tiny) -> None:
    slots = 5
    with load_with_slots(
        tiny(architecture)[0], slots, device="cuda", dtype="bfloat16", context=256
    ) as engine:
        plain = ask(engine, "Once upon a time", 48, draft_length=0).tokens
        for policy in ("on-demand", "moe-speq"):
            for length in (1, 4, 8, 15, "auto"):
                assert ask(engine, "Once upon a time", 48, draft_length=length, policy=policy).tokens == plain
