"""A model with recurrent state answers as transformers does, and drafting for it is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.engines import (
    ROOMY,
    Answer,
    ask,
    check_stats,
    load_with_slots,
    memory_of,
    runner_of,
    watch_link,
)
from support.tiny_models import (
    RECURRENT_ARCHITECTURE,
    reference_greedy,
    tiny_config,
    tiny_model,
    write_model,
)
from support.tokenizer import SPECIAL_TOKENS
from test_packed_experts import as_on_a_gpu

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import DraftingRefusedError, TransferError
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.engine.facts import local_facts
from localmoe.model import recurrent_nets

Tiny = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def recurrent(tiny: Tiny) -> tuple[Path, Any]:
    return tiny(RECURRENT_ARCHITECTURE)


@pytest.fixture
def engine(recurrent: tuple[Path, Any]) -> Any:
    with load_with_slots(recurrent[0], 10) as loaded:
        yield loaded


def test_what_a_recurrent_layer_computes_is_tried_once_a_load_and_once_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    computes_alike = recurrent_nets._computes_alike

    def watched(net: recurrent_nets.RecurrentNet, config: Any) -> bool:
        tried.append(net)
        return computes_alike(net, config)

    monkeypatch.setattr(recurrent_nets, "_computes_alike", watched)
    folder = write_model(tmp_path / "m", tiny_model("qwen3_next", dtype=torch.bfloat16))
    prepared = as_on_a_gpu(folder, monkeypatch, draft_length=0)
    assert prepared.compute.whole_passes and prepared.footprint.state_bytes and len(tried) == 1
    assert prepared.footprint.state_bytes == local_facts(str(folder)).footprint.state_bytes
    assert len(tried) == 2


def test_drafting_is_refused_with_a_reason_before_weights_are_read(recurrent: tuple[Path, Any]) -> None:
    reports: list[object] = []
    config = EngineConfig(vram_budget_bytes=ROOMY, draft_length=4)
    with pytest.raises(DraftingRefusedError, match="more than keys and values"):
        Engine.load(str(recurrent[0]), config, progress=reports.append)
    assert not reports


def test_a_request_for_drafts_is_refused_and_the_engine_goes_on(
    engine: Engine, recurrent: tuple[Path, Any]
) -> None:
    assert engine.plan.draft_bytes == 0 and "keys and values" in engine.plan.drafting_reason
    with pytest.raises(DraftingRefusedError, match="more than keys and values"):
        ask(engine, "hello", draft_length=4)
    answer = ask(engine, "hello", draft_length="auto")
    assert answer.tokens == reference_greedy(recurrent[1], answer.prompt, 16)


@pytest.mark.parametrize("draft_length", [0, "auto"])
def test_greedy_tokens_are_those_of_transformers_also_after_a_prompt_of_several_chunks(
    draft_length: Any, engine: Engine, recurrent: tuple[Path, Any]
) -> None:
    for prompt in ("Hello there", "x", "a prompt of several chunks " * 12):
        answer = ask(engine, prompt, draft_length=draft_length)
        assert answer.tokens == reference_greedy(recurrent[1], answer.prompt, 16), prompt
        assert answer.stats.drafted == 0 and answer.stats.acceptance_rate is None
        check_stats(answer)


def chat(engine: Engine, messages: list[Message], model: Any) -> Answer:
    answer = ask(engine, messages, 12)
    assert answer.tokens == reference_greedy(model, answer.prompt, 12)
    return answer


def test_a_second_turn_goes_on_from_the_first_and_an_edited_one_starts_anew(
    engine: Engine, recurrent: tuple[Path, Any]
) -> None:
    first = [Message("user", "hi you")]
    answer = chat(engine, first, recurrent[1])
    rest = [Message("assistant", answer.text), Message("user", "and then?")]
    second = chat(engine, [*first, *rest], recurrent[1])
    assert second.stats.reused_tokens == len(answer.prompt) + len(answer.tokens) - 1
    edited = chat(engine, [Message("user", "hi me"), *rest], recurrent[1])
    assert edited.stats.reused_tokens == 0, "recurrent state cannot be shortened"


def test_layers_that_begin_anew_in_a_longer_pass_are_given_single_tokens(tmp_path: Path) -> None:
    """As transformers' own of jamba do, whose conversations would forget all but the last message."""
    mamba = {"mamba_d_state": 8, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1}
    experts = {"num_experts": 8, "intermediate_size": 128, "expert_layer_period": 1, "expert_layer_offset": 0}
    model = tiny_model("jamba", **mamba, **experts)
    with load_with_slots(write_model(tmp_path / "jamba", model), 6) as engine:
        messages = [Message("user", "hi you")]
        for question in ("and then?", "why?"):
            answer = chat(engine, messages, model)
            messages += [Message("assistant", answer.text), Message("user", question)]
        assert chat(engine, messages, model).stats.reused_tokens > 0
        chat(engine, [Message("user", "a prompt of several chunks " * 12)], model)


def test_after_a_closed_answer_the_next_one_is_right(engine: Engine, recurrent: tuple[Path, Any]) -> None:
    stream = engine.stream(GenerationRequest(prompt="left early", max_new_tokens=16))
    next(stream), next(stream)
    stream.close()
    answer = ask(engine, "left late")
    assert answer.tokens == reference_greedy(recurrent[1], answer.prompt, 16)


def test_after_a_first_pass_that_failed_the_next_answer_is_right(
    engine: Engine, recurrent: tuple[Path, Any]
) -> None:
    """Where it failed no layer that counts tokens had run, but a recurrent one had."""
    watch_link(memory_of(engine), failing=range(1))
    with pytest.raises(TransferError, match="was made to fail"):
        ask(engine, "all of this is forgotten")
    watch_link(memory_of(engine))
    answer = ask(engine, "left late")
    assert answer.tokens == reference_greedy(recurrent[1], answer.prompt, 16)


def test_device_memory_counts_every_tensor_of_the_state(engine: Engine) -> None:
    ask(engine, "hello")
    tensors: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict | list | tuple):
            for inner in value.values() if isinstance(value, dict) else value:
                collect(inner)

    for layer in runner_of(engine).sequence.layers:
        collect(vars(layer))
    assert engine.device_memory()["kv"] == sum(t.numel() * t.element_size() for t in tensors)


def test_a_checkpoint_with_vision_and_further_heads_answers_by_its_text_part(tmp_path: Path) -> None:
    """As Qwen3.5-35B-A3B is published: named by language_model, beside what localmoe has no use for."""
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
        "num_position_embeddings": 16,
    }  # fmt: skip
    text = tiny_config("qwen3_5_moe_text").to_dict()
    config = transformers.AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.08)
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0.0
    folder = write_model(tmp_path / "published", model)
    file = folder / "model.safetensors"
    stored = load_file(file)
    assert any(name.startswith("model.visual.") for name in stored)
    stored["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(8, 256, 128)
    save_file(stored, file, metadata={"format": "pt"})
    with load_with_slots(folder, 10) as loaded:
        answer = ask(loaded, "hello there", 12)
        assert answer.tokens == reference_greedy(model, answer.prompt, 12)
