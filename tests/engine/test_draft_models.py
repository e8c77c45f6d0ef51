"""Another model that drafts: its logits beside transformers' own, its place in an engine, and who may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import ask, budget_for_slots, load_with_slots
from support.mxfp4_models import write_mxfp4_model
from support.tiny_models import CONTEXT, VOCAB_SIZE, tied_model_storing, tiny_model, write_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from localmoe.cli.main import main
from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.errors import BudgetError, ConfigError, DraftError, LocalMoeError
from localmoe.core.types import Message
from localmoe.engine import Engine, plan_model
from localmoe.model.draft_model import DraftModel, DraftModelShape

CPU = torch.device("cpu")
PROMPTS = ("Once upon a time there was", "The answer to the question is")


def dense(folder: Path, *, vocab_size: int = VOCAB_SIZE, hidden: int = 64, layers: int = 2) -> Path:
    """A small model without experts that shares the tiny models' tokenizer."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=1,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return write_model(folder, Qwen2ForCausalLM(config).eval())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense(tmp_path_factory.mktemp("drafts") / "small")


@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1))))
@settings(max_examples=25)
def test_whatever_was_read_before_logits_are_those_of_the_whole_text(
    small: Path, edits: list[tuple[int, list[int]]]
) -> None:
    shape = DraftModelShape.read("small", small)
    model = DraftModel.load(shape, CPU, torch.float32, CONTEXT)
    assert shape.num_params == sum(p.numel() for p in model.model.parameters())
    text: list[int] = []
    for kept, new in edits:
        text = [*text[:kept], *new][:CONTEXT]
        with torch.inference_mode():
            whole = model.model(input_ids=torch.tensor([text])).logits[0, -1:]
        torch.testing.assert_close(model.next_logits(text), whole, rtol=1e-4, atol=1e-4)
    if edits:
        positions = model._cache.layers[0].capacity
        weights = 4 * shape.num_params + shape.buffer_bytes
        assert model.num_bytes == weights + shape.kv_elements_per_token * 4 * positions
    model.forget()
    assert model.next_logits([5, 6]).shape == (1, VOCAB_SIZE)
    model.release()
    assert model._cache.num_bytes == 0 and all(p.is_meta for p in model.model.parameters())


def test_two_tensors_that_its_config_calls_one_are_both_counted(tmp_path: Path) -> None:
    shape = DraftModelShape.read("own", tied_model_storing(tmp_path / "own", "two values"))
    model = DraftModel.load(shape, CPU, torch.float32, CONTEXT)
    assert shape.num_params == sum(p.numel() for p in model.model.parameters())


@pytest.mark.parametrize("policy", ["sp-moe", "moe-speq"])
def test_the_same_model_drafts_every_token_and_foretells_every_expert(
    policy: str, tiny: Callable[[str], tuple[Path, Any]]
) -> None:
    folder = str(tiny("qwen2_moe")[0])
    with load_with_slots(folder, 8) as engine:
        expected = [ask(engine, prompt, 24, draft_length=0).tokens for prompt in PROMPTS]
    drafted: dict[str, Any] = {"drafter": "model", "draft_model": folder}
    with load_with_slots(folder, 8, **drafted) as engine:  # copies so fast that each policy dares to prefetch
        assert engine.info().draft == "the model qwen2_moe"
        engine.live.record_timeline()
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            answer = ask(engine, prompt, 24, draft_length=3, policy=policy)
            assert answer.tokens == tokens
            assert answer.stats.acceptance_rate == 1.0 and answer.stats.steps == 6
            assert answer.stats.expert_match_rate == 1.0
        spans = [span for step in engine.live.timeline() for span in step.spans if span.lane == "draft"]
        assert sum(span.name.startswith("token") for span in spans) == 2 * answer.stats.drafted
        assert answer.stats.prefetched > 0 and answer.stats.hits > 0
        assert engine.peak_device_bytes() <= engine.plan.budget_bytes
        assert engine.device_memory()["draft"] <= engine.plan.draft_bytes


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("padding", [-1, 0, 7])
def test_a_small_dense_model_drafts_greedy_and_sampled_answers(
    padding: int, tmp_path: Path, tiny: Callable[[str], tuple[Path, Any]]
) -> None:
    folder = str(tiny("mixtral")[0])
    draft = str(dense(tmp_path / "draft", vocab_size=VOCAB_SIZE + padding))
    turns = [Message("user", "Hello there")]
    with load_with_slots(folder, 8) as engine:
        plain = ask(engine, turns, 16, draft_length=0).tokens
    with load_with_slots(folder, 8, drafter="model", draft_model=draft) as engine:
        assert "foretells no experts, as its hidden size is 64 and the target's 128" in engine.info().draft
        first = ask(engine, turns, 16, draft_length=4)
        assert first.tokens == plain
        assert first.stats.drafted > 0 and first.stats.expert_match_rate is None
        sampled = SamplingConfig(temperature=1.0, seed=5)
        turns += [Message("assistant", first.text), Message("user", "And then?")]
        answer = ask(engine, turns, 16, draft_length=2, sampling=sampled)
        assert len(answer.tokens) == 16 and answer.stats.reused_tokens > 0
        assert answer.tokens == ask(engine, turns, 16, draft_length=2, sampling=sampled).tokens
        engine.reset()
        assert ask(engine, turns[:1], 16).tokens == plain
        with pytest.raises(DraftError, match=r"the model draft.* drafts.* cannot answer alone"):
            ask(engine, turns[:1], 4, draft_only=True)


def test_it_is_counted_in_the_budget(small: Path, tiny: Callable[[str], tuple[Path, Any]]) -> None:
    folder = str(tiny("mixtral")[0])
    config = {"drafter": "model", "draft_model": str(small), "draft_length": 4}
    footprint, plan = plan_model(folder, EngineConfig(**config, vram_budget_bytes=1 << 30))
    shape = DraftModelShape.read("small", small)
    assert plan.draft_bytes > 4 * shape.num_params
    least = budget_for_slots(folder, max(2, footprint.experts_per_token), **config)
    with pytest.raises(BudgetError, match="the draft model"):
        plan_model(folder, EngineConfig(**config, vram_budget_bytes=least - 1))
    config["draft_length"] = "auto"
    _, without = plan_model(folder, EngineConfig(**config, vram_budget_bytes=least - 1))
    assert not without.drafting and "the draft model needs" in without.drafting_reason


def test_who_may_not_draft(tmp_path: Path, small: Path, tiny: Callable[[str], tuple[Path, Any]]) -> None:
    folder = str(tiny("mixtral")[0])

    def refused(kind: type[LocalMoeError], words: str, draft: str, model: str | None = None) -> None:
        with pytest.raises(kind, match=words):
            plan_model(model or folder, EngineConfig(drafter="model", draft_model=draft))

    refused(DraftError, r"cannot draft for mixtral: [\d,]+ of [\d,]+ tokens mean something else", "demo")
    recurrent = write_model(tmp_path / "recurrent", tiny_model("qwen3_next"))
    refused(DraftError, "recurrent cannot draft: qwen3_next keeps more than keys and values", str(recurrent))
    packed = write_mxfp4_model(tmp_path / "packed", tiny_model("gpt_oss"))
    refused(DraftError, "packed cannot draft: its experts are stored in MXFP4", str(packed))
    refused(LocalMoeError, "neither a folder on this machine nor a repo id", str(tmp_path / "nowhere"))
    for config in ({"draft_model": str(small)}, {"drafter": "model"}):
        with pytest.raises(ConfigError, match="go together"):
            EngineConfig(**config)  # type: ignore[arg-type]
    damaged = tmp_path / "damaged"
    lost = Qwen2ForCausalLM.from_pretrained(small)
    state = {name: tensor for name, tensor in lost.state_dict().items() if "layers.1.mlp" not in name}
    write_model(damaged, lost)
    lost.save_pretrained(damaged, state_dict=state)
    with pytest.raises(LocalMoeError, match=r"3 weights of the draft model in .* are missing"):
        Engine.load(folder, EngineConfig(drafter="model", draft_model=str(damaged), draft_length=2))


def test_the_command_line_takes_one(
    small: Path, tiny: Callable[[str], tuple[Path, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(tiny("mixtral")[0]), "--prompt", "Hello", "--draft-model", str(small), "--json"]
    assert main([*argv, "--draft-length", "3", "--max-new-tokens", "6"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["new_tokens"] == 6 and stats["drafted"] > 0
    assert main([*argv, "--drafter", "prompt-lookup"]) == 1
    assert "exclude each other" in capsys.readouterr().err
