"""What an answer leaves in the KV cache, on which later tokens and answers build: bit for bit what an answer
without drafts leaves, whatever was drafted, rolled back or interrupted on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import load_with_slots, runner_of
from support.tiny_models import ARCHITECTURES, STATEFUL_ARCHITECTURES
from torch import Tensor

from localmoe.core.config import GenerationRequest
from localmoe.engine import Engine

TWO_OF_THREE = (  # layers have experts
    "deepseek_v2", "lfm2_moe", "hybrid nemotron_h", "kimi_linear", "bailing_hybrid",
)  # fmt: skip
ON_CPU = ("qwen3_moe", "deepseek_v2", "gpt_oss")
CASES = [
    *(("cpu", name) for name in ON_CPU),
    *(
        pytest.param("cuda", name, marks=pytest.mark.gpu)
        for name in [*ARCHITECTURES, *STATEFUL_ARCHITECTURES]
    ),
]


def left_by(engine: Engine, take: int = 40, **request: Any) -> list[Tensor]:
    """Keys and values of each layer that has some, (1, heads, tokens, dim), after an answer that is dropped
    behind its first `take` events."""
    engine.reset()
    stream: Any = engine.stream(
        GenerationRequest(prompt="Once upon a time there was", max_new_tokens=32, **request)
    )
    for _ in zip(range(take), stream, strict=False):
        pass
    stream.close()
    sequence = runner_of(engine).sequence
    return [
        part[:, :, : sequence.length].clone()
        for layer in sequence.layers
        for part in (layer.keys, layer.values)
        if part is not None  # a linear layer's state shows in the keys of those behind it
    ]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("device", "architecture"), CASES)
def test_drafts_leave_nothing_in_the_cache(
    device: str, architecture: str, tiny: Callable[[str], Any], tiny16: Callable[[str], Path]
) -> None:
    chance = random.Random(architecture)
    model = tiny(architecture)[0] if device == "cpu" else tiny16(architecture)
    all_of_them = 16 if architecture in TWO_OF_THREE else 24
    for slots in (5, all_of_them):
        with load_with_slots(model, slots, device=device, context=256, strict=True) as engine:
            wanted = left_by(engine, draft_length=0)
            for _ in range(4):
                length = chance.choice([1, 3, 8, 15, "auto", "auto"])
                policy = chance.choice(["on-demand", "moe-speq", "sp-moe"])
                take = chance.choice([3, 5, 40, 40])
                left = left_by(engine, take, draft_length=length, policy=policy)
                tokens = left[0].shape[2]
                assert take < 40 or tokens == wanted[0].shape[2]
                for found, expected in zip(left, wanted, strict=True):
                    assert torch.equal(found, expected[:, :, :tokens]), (slots, length, policy, take)
