"""Drafting by the MTP layer on a real GPU, in whole steps and for prompts of every kind: no token changes,
and where the layer agrees with the target all that it drafts is kept, whatever the text was before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import Answer, ask, load_with_slots
from support.mtp_models import BEHIND, BESIDE, mtp_model

from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.model.runner import ModelRunner
from localmoe.model.shapes import find_shape

pytestmark = pytest.mark.gpu
GIB = 1 << 30
CONFIG: dict[str, Any] = {"device": "cuda", "context": 512, "strict": True, "drafter": "mtp"}
LONG = "A fox went out on a chilly night and prayed for the moon to give him light. " * 4
PROMPTS = ("Once upon a time", LONG)


def all_kept(answer: Answer) -> bool:
    """But for what the end of the answer cut off."""
    return answer.stats.drafted - answer.stats.accepted <= 1 and answer.stats.accepted > 0


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize("architecture", [*BEHIND, *BESIDE])
def test_drafts_change_no_token(architecture: str, agrees: bool, tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", architecture, dtype=torch.bfloat16, agrees=agrees)
    lengths = (1, 3, 8, "auto")
    with load_with_slots(folder, 12, **CONFIG) as engine:
        assert engine.info().draft.startswith("its MTP layer") and engine.plan.drafting
        assert engine._loaded.passes.mtp is not None  # type: ignore[union-attr]
        for prompt in PROMPTS:
            plain = ask(engine, prompt, 40, draft_length=0)
            for length in lengths:
                answer = ask(engine, prompt, 40, draft_length=length)
                assert answer.tokens == plain.tokens, length
                assert not agrees or length == "auto" or all_kept(answer), (prompt[:9], length)
        drawn = SamplingConfig(temperature=1.0, seed=3)
        texts = {tuple(ask(engine, LONG, 32, draft_length=n, sampling=drawn).tokens) for n in (0, 1, 4)}
        assert len(texts) == 1
    with load_with_slots(folder, 12, device="cuda", context=512, strict=True, draft_length=0) as engine:
        assert ask(engine, LONG, 40).tokens == plain.tokens


@pytest.mark.parametrize("architecture", ["glm4_moe", "qwen3_next"])
def test_left_to_the_engine_it_drafts_also_where_all_layers_in_int4_would_fit(
    architecture: str, tmp_path: Path
) -> None:
    folder = str(mtp_model(tmp_path / "m", architecture, dtype=torch.bfloat16, agrees=True))
    config = EngineConfig(device="cuda", context=512, strict=True)
    with Engine.load(folder, config) as engine:
        assert engine.info().drafter == "mtp" and engine.plan.drafting and engine._loaded.draft is None
        answer = ask(engine, LONG, 40)
        assert answer.stats.accepted > 0
        plain = ask(engine, LONG, 40, draft_length=0)
    with Engine.load(folder, replace(config, draft_length=3)) as engine:
        assert engine.info().drafter == "mtp" and engine.config.draft_length == 3
        asked = ask(engine, LONG, 40)
        assert asked.stats.accepted > 0 and asked.tokens == plain.tokens
    with Engine.load(folder, replace(config, drafter="self")) as engine:
        assert engine.info().drafter == "self" and engine._loaded.draft is not None
        whole = ask(engine, LONG, 40)
    assert answer.tokens == plain.tokens == whole.tokens


def test_a_chat_goes_on_and_comes_back(tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", "glm4_moe", dtype=torch.bfloat16, agrees=True)
    with load_with_slots(folder, 12, **CONFIG, prompt_cache_bytes=64 << 20) as engine:
        turns = [Message("user", "Hello there")]
        for _ in range(3):
            answer = ask(engine, turns, 24, draft_length=3)
            assert all_kept(answer)
            turns += [Message("assistant", answer.text), Message("user", "And then?")]
        assert answer.stats.reused_tokens > 0
        other = ask(engine, LONG, 24, draft_length=3)
        assert all_kept(other)
        back = ask(engine, turns, 24, draft_length=3)
        assert back.stats.reused_tokens > 0 and all_kept(back)


def test_layer_by_layer_it_drafts_what_whole_steps_do_not_compute(tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", "glm4_moe", dtype=torch.float32, agrees=True)
    config: dict[str, Any] = {"device": "cuda", "context": 512, "dtype": "float32"}
    with load_with_slots(folder, 12, **config, draft_length=0) as engine:
        plain = [ask(engine, prompt, 32).tokens for prompt in PROMPTS]
    with load_with_slots(folder, 12, **config, drafter="mtp") as engine:
        assert isinstance(engine._loaded.runner, ModelRunner)
        for prompt, tokens in zip(PROMPTS, plain, strict=True):
            for length in (1, 3, "auto"):
                answer = ask(engine, prompt, 32, draft_length=length)
                assert answer.tokens == tokens and answer.stats.drafted > 0, (prompt[:9], length)
                assert length == "auto" or all_kept(answer), (prompt[:9], length)


@pytest.mark.parametrize(("name", "gib"), [("qwen3.5-35b-a3b", 8), ("glm-4.7-flash", 8)])
def test_real_shapes_keep_their_budget(name: str, gib: float) -> None:
    config = EngineConfig(vram_budget_bytes=int(gib * GIB), drafter="mtp", context=8192)
    settings = SyntheticSettings(parse_routing("sticky:0.66"), acceptance=0.8)
    with Engine.load_shape(find_shape(name), config, settings) as engine:
        for length, prompt in (("auto", 40), (3, 300), (8, 3000)):
            ids = torch.randint(5, 5000, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
            answer = ask_ids(engine, ids, 48, length)
            assert answer.stats.drafted > 0
        assert torch.cuda.max_memory_reserved() <= gib * GIB
        assert engine.peak_device_bytes() <= gib * GIB


def ask_ids(engine: Engine, ids: list[int], tokens: int, length: Any) -> Answer:
    """The answer to a prompt of token ids."""
    request = GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=tokens, draft_length=length)
    return Answer(list(engine.stream(request)))
