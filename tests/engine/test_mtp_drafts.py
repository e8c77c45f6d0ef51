"""An engine whose model drafts by its own MTP layer, on a CPU: no token changes, and who cannot is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import ROOMY, ask, load_with_slots
from support.mtp_models import BEHIND, mtp_model
from support.tiny_models import tiny_model, write_model

from localmoe.cli.main import main
from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.errors import BudgetError, CheckpointError, DraftError, DraftingRefusedError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import Message, Progress
from localmoe.engine import Engine, plan_model
from localmoe.model.shapes import find_shape

PROMPTS = ("Once upon a time there was", "The answer to the question is " * 3)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", BEHIND)
@pytest.mark.parametrize("agrees", [True, False])
def test_drafts_change_no_token(architecture: str, agrees: bool, tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", architecture, agrees=agrees)
    with load_with_slots(folder, 8, draft_length=0) as engine:
        plain = [ask(engine, prompt, 24).tokens for prompt in PROMPTS]
    with load_with_slots(folder, 8, drafter="mtp") as engine:
        assert engine.info().draft.startswith("its MTP layer, in INT4; foretells no experts")
        assert engine.device_memory()["draft"] <= engine.plan.draft_bytes
        for prompt, tokens in zip(PROMPTS, plain, strict=True):
            for length in (3, "auto"):
                answer = ask(engine, prompt, 24, draft_length=length)
                assert answer.tokens == tokens
            if agrees:
                answer = ask(engine, prompt, 24, draft_length=3)
                assert answer.stats.acceptance_rate == 1.0 and answer.stats.steps == 6
        with pytest.raises(DraftError, match=r"its MTP layer.* drafts.* cannot answer alone"):
            ask(engine, PROMPTS[0], 4, draft_only=True)


def test_a_chat_goes_on_with_it_and_samples_by_its_seed(tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", "glm4_moe", agrees=True)
    with load_with_slots(folder, 8, drafter="mtp") as engine:
        turns = [Message("user", "Hello there")]
        for _ in range(2):
            answer = ask(engine, turns, 16, draft_length=4)
            assert answer.stats.acceptance_rate == 1.0
            turns += [Message("assistant", answer.text), Message("user", "And then?")]
        assert answer.stats.reused_tokens > 0
        sampled = SamplingConfig(temperature=1.0, seed=5)
        drawn = [ask(engine, turns, 12, draft_length=2, sampling=sampled).tokens for _ in range(2)]
        assert drawn[0] == drawn[1] and len(drawn[0]) == 12
        engine.reset()
        assert ask(engine, turns[:1], 16, draft_length=4).stats.acceptance_rate == 1.0


@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseek_v3"])
def test_it_drafts_where_experts_and_linear_layers_are_computed_in_16_bits_where_they_lie(
    architecture: str, tmp_path: Path
) -> None:
    folder = str(mtp_model(tmp_path / "m", architecture, dtype=torch.bfloat16, agrees=True))
    with Engine.load(folder, EngineConfig(device="cpu", draft_length=0, context=256)) as engine:
        assert engine.plan.in_place
        plain = ask(engine, PROMPTS[0], 24).tokens
    with Engine.load(folder, EngineConfig(device="cpu", drafter="mtp", context=256)) as engine:
        answer = ask(engine, PROMPTS[0], 24, draft_length=3)
        assert answer.tokens == plain and answer.stats.acceptance_rate == 1.0


def test_models_without_one_and_those_that_cannot_roll_back_are_refused(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", tiny_model("qwen3_moe"))
    with pytest.raises(DraftError, match=r"plain have no layer .*\(MTP\)"):
        Engine.load(str(plain), EngineConfig(drafter="mtp", vram_budget_bytes=ROOMY))
    recurrent = mtp_model(tmp_path / "recurrent", "qwen3_next")
    with pytest.raises(DraftingRefusedError, match="more than keys and values"):
        Engine.load(str(recurrent), EngineConfig(drafter="mtp", draft_length=2, vram_budget_bytes=ROOMY))
    config = EngineConfig(drafter="mtp", draft_length=0, vram_budget_bytes=ROOMY)
    with Engine.load(str(plain), config) as engine:  # nothing is to be drafted
        assert engine.info().draft.startswith("off")


def test_loading_tells_of_the_layer_apart_from_the_model(tmp_path: Path) -> None:
    folder = str(mtp_model(tmp_path / "m", "glm4_moe"))
    told: list[Progress] = []
    with Engine.load(folder, EngineConfig(device="cpu", drafter="mtp"), progress=told.append):
        pass
    stages = list(dict.fromkeys(report.stage for report in told))
    assert stages == ["Loading the MTP layer", "Loading weights"]
    for stage in stages:  # each bar fills once
        done = [report.done for report in told if report.stage == stage]
        assert done == sorted(done) and done[-1] == told[[r.stage for r in told].index(stage)].total


def test_a_damaged_layer_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", "glm4_moe")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if name.endswith("3.mlp.experts.5.up_proj.weight"))
    config = EngineConfig(drafter="mtp", vram_budget_bytes=ROOMY)
    kept = tensors.pop(gone)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights are missing .*layers\.0\.mlp.experts"):
        Engine.load(str(folder), config)
    save_file({**tensors, gone: torch.full_like(kept, float("nan"))}, file, metadata={"format": "pt"})
    with pytest.raises(DraftError, match="expert 5"):
        Engine.load(str(folder), config)
    with load_with_slots(folder, 8, draft_length=0) as engine:  # the model itself is whole
        assert len(ask(engine, PROMPTS[0], 4).tokens) == 4


def test_memory_that_runs_out_while_it_is_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*given: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("localmoe.engine.draft_models.load_mtp", no_room)
    folder = str(mtp_model(tmp_path / "m", "glm4_moe"))
    with pytest.raises(BudgetError, match="memory ran out while loading"):
        Engine.load(folder, EngineConfig(drafter="mtp", vram_budget_bytes=ROOMY))


def test_it_counts_in_the_plan_and_a_budget_without_room_for_it_is_refused(tmp_path: Path) -> None:
    folder = str(mtp_model(tmp_path / "m", "glm4_moe"))
    _, with_layer = plan_model(folder, EngineConfig(drafter="mtp", vram_budget_bytes=ROOMY, draft_length=2))
    _, without = plan_model(folder, EngineConfig(draft_length=0, vram_budget_bytes=ROOMY))
    assert with_layer.draft_bytes > 0 and with_layer.shared_bytes == without.shared_bytes
    tight = without.total_bytes - without.slot_bytes * without.num_slots
    with pytest.raises(BudgetError):
        plan_model(folder, EngineConfig(drafter="mtp", draft_length=2, vram_budget_bytes=tight + 4096))


def test_random_weights_have_one_where_the_real_model_has() -> None:
    shape = find_shape("glm-4.7-flash")
    assert shape.has_mtp and not find_shape("qwen3-30b-a3b").has_mtp
    with pytest.raises(DraftError, match=r"qwen3-30b-a3b \(synthetic weights\) have no layer"):
        Engine.load_shape(find_shape("qwen3-30b-a3b"), EngineConfig(drafter="mtp"), SyntheticSettings())


def test_the_command_line_drafts_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(mtp_model(tmp_path / "m", "glm4_moe", agrees=True))
    arguments = ["--drafter", "mtp", "--draft-length", "3", "--max-new-tokens", "12", "--json"]
    assert main(["generate", folder, "--prompt", "Once", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["stats"]["acceptance_rate"] == 1.0 and answer["stats"]["drafted"] > 0
    assert main(["plan", folder, "--drafter", "mtp"]) == 0
    assert "MTP layer" in capsys.readouterr().out
    assert main(["generate", "demo", "--prompt", "Once", *arguments]) == 1
    assert "no layer" in capsys.readouterr().err
