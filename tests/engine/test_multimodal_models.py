"""The text part of models for text and pictures: answers as transformers gives them with all parts there, in
the memory of the text part alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.engines import ROOMY, ask, check_consistent, check_stats, load_with_slots
from support.multimodal_models import MULTIMODAL, mrope, multimodal_model
from support.tiny_models import reference_greedy, tiny_config, write_model

from localmoe.core.config import EngineConfig
from localmoe.core.errors import UnsupportedModelError
from localmoe.engine import Engine, plan_model
from localmoe.model.draft_model import DraftModelShape

PROMPTS = ("Hello there, how are", "far more than one sliding window is long: " * 2)
Write = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Folder and model of an architecture."""
    found: dict[str, tuple[Path, Any]] = {}

    def write(architecture: str) -> tuple[Path, Any]:
        if architecture not in found:
            model = multimodal_model(architecture)
            folder = write_model(tmp_path_factory.mktemp("multimodal") / architecture, model)
            found[architecture] = folder, model
        return found[architecture]

    return write


def text_parameters(model: Any) -> int:
    """Of its decoder and head, tied ones once."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    return sum(p.numel() for p in {id(p): p for part in parts for p in part.parameters()}.values())


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("architecture", MULTIMODAL)
def test_greedy_answers_are_those_of_the_whole_model(architecture: str, written: Write) -> None:
    folder, model = written(architecture)
    with load_with_slots(folder, 6) as engine:
        assert engine.plan.drafting
        for prompt in PROMPTS:
            for draft_length in (0, 4, "auto"):
                answer = ask(engine, prompt, 10, draft_length=draft_length)
                assert answer.tokens == reference_greedy(model, answer.prompt, 10), (prompt, draft_length)
                check_stats(answer)
        check_consistent(engine)


@pytest.mark.parametrize("architecture", MULTIMODAL)
@pytest.mark.slow(but=3)
def test_what_sees_is_neither_planned_nor_loaded(architecture: str, written: Write) -> None:
    folder, model = written(architecture)
    footprint, _ = plan_model(str(folder), EngineConfig(vram_budget_bytes=ROOMY))
    experts = footprint.num_layers * footprint.num_experts * footprint.expert_params
    assert footprint.text_alone
    assert footprint.shared_params + experts == text_parameters(model) < model.num_parameters()
    with load_with_slots(folder, 6) as engine:
        planned, held = engine.plan.shared_bytes, engine.device_memory()["shared"]
        assert held <= planned + 4096, (held, planned)


def test_a_dense_model_with_eyes_drafts_for_one_with_experts(written: Write, tmp_path: Path) -> None:
    folder, model = written("qwen3_vl_moe")
    dense = write_model(tmp_path / "dense", multimodal_model("qwen3_vl"))
    drafted: dict[str, Any] = {"drafter": "model", "draft_model": str(dense)}
    with load_with_slots(folder, 6, **drafted) as engine:
        assert engine.info().draft == "the model dense"
        for prompt in PROMPTS:
            answer = ask(engine, prompt, 10, draft_length=3)
            assert answer.tokens == reference_greedy(model, answer.prompt, 10)
            assert answer.stats.drafted > 0
        eyeless = text_parameters(multimodal_model("qwen3_vl"))
        assert DraftModelShape.read("dense", dense).num_params == eyeless
        assert engine.device_memory()["draft"] <= engine.plan.draft_bytes


def test_experts_for_words_beside_those_for_pictures_are_refused(tmp_path: Path) -> None:
    text = tiny_config(
        "ernie4_5_vl_moe_text", moe_num_experts=8, moe_k=2, moe_intermediate_size=[128, 64], head_dim=32,
        intermediate_size=128, mlp_layer_types=["dense", "sparse", "sparse"],
        **mrope([5, 5, 6]),
    ).to_dict()  # fmt: skip
    eyes = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
    config = transformers.AutoConfig.for_model("ernie4_5_vl_moe", text_config=text, vision_config=eyes)
    refused(config, tmp_path, "experts of several kinds")


def refused(config: Any, folder: Path, words: str) -> None:
    """Before any weight is looked at: there is none."""
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(UnsupportedModelError, match=words) as refusal:
        Engine.load(str(folder), EngineConfig(vram_budget_bytes=ROOMY))
    assert "\n" not in str(refusal.value)


def test_what_keeps_a_prompt_otherwise_than_an_answer_is_refused(tmp_path: Path) -> None:
    """Its window slides over the answer alone, and prompts come in chunks and are kept between answers."""
    text = tiny_config(
        "unlimited_ocr_text", n_routed_experts=8, moe_intermediate_size=128, intermediate_size=128,
        n_shared_experts=1, num_key_value_heads=4, sliding_window=16,
    ).to_dict()  # fmt: skip
    config = transformers.AutoConfig.for_model("unlimited_ocr", text_config=text)
    refused(config, tmp_path, "keeps what it reads in another way than what it writes")


@pytest.mark.parametrize("architecture", ["diffusion_gemma", "qwen3_omni_moe"])
def test_what_does_not_write_one_token_after_another_is_refused(architecture: str, tmp_path: Path) -> None:
    experts = {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 32}
    if architecture == "diffusion_gemma":
        text = tiny_config("diffusion_gemma_text", **experts, top_k_experts=3).to_dict()
        config = transformers.AutoConfig.for_model(architecture, text_config=text)
    else:
        thinker = {"text_config": tiny_config("qwen3_omni_moe_text", **experts, **mrope([6, 5, 5])).to_dict()}
        talker = {"text_config": {"shared_expert_intermediate_size": 64}, "spatial_merge_size": 2}
        config = transformers.AutoConfig.for_model(architecture, thinker_config=thinker, talker_config=talker)
    refused(config, tmp_path, "one token after another")
