"""Pictures in whole passes, in Triton's interpreter: no captured pass has one, drafts behind them change no
token, and what the kernels compute is what transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engines import ask, device_runner_of
from support.mtp_models import add_mtp_layer
from support.tiny_models import tiny_model
from support.vision_models import (
    READING_ARCHITECTURES,
    picture,
    reference_answer,
    shown,
    vision_model,
    write_vision_model,
)

pytest.importorskip("triton")

from localmoe.core.config import EngineConfig
from localmoe.core.types import Message
from localmoe.engine import Engine, planning
from localmoe.engine.settings import ComputeSettings
from localmoe.kernels.gpu import lowbit_experts
from localmoe.kernels.lowbit_reference import one_by_one
from localmoe.model import device_experts, device_prompt_passes
from localmoe.model.device_runner import DeviceRunner

pytestmark = [
    pytest.mark.interpreted, pytest.mark.filterwarnings("ignore:overflow encountered in exp")
]  # fmt: skip
FIRST, SECOND = picture(41, 64, 64), picture(8, 96, 32)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = ComputeSettings(torch.device("cpu"), torch.float16)
    monkeypatch.setattr(planning, "choose_compute", lambda *asked: compute)
    monkeypatch.setattr(planning, "why_not_on_device", lambda *asked: "")
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.choice.prepare(torch.zeros(1, 256)))
    for module in (lowbit_experts, device_experts):  # where layers of their own and whole drafts find it
        monkeypatch.setattr(module, "lowbit_moe", one_by_one)  # which takes long to interpret
    monkeypatch.setattr(device_prompt_passes, "WINDOW", 8)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3_vl_moe"))
        for name in READING_ARCHITECTURES
    ],
)
def test_answers_are_those_of_transformers_whatever_is_drafted(architecture: str, tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2}
    if architecture == "qwen3_5_moe":
        changes |= {"layer_types": ["linear_attention", "full_attention"]}
    elif architecture == "gemma4":
        changes |= {"layer_types": ["sliding_attention", "full_attention"]}
    model = vision_model(architecture, dtype=torch.float16, **changes)
    folder = write_vision_model(tmp_path / "m", model)
    config = EngineConfig(device="cpu", context=256, draft_length=2)
    with Engine.load(str(folder), config) as engine:
        runner = device_runner_of(engine)
        assert runner.images is not None
        told = [shown("one", (1, FIRST))]
        answer = ask(engine, told, 5)
        wanted = reference_answer(model.float(), folder, answer.prompt, [FIRST], 5)
        assert answer.tokens == wanted
        # a turn later, a short picture among few tokens
        told += [Message("assistant", answer.text), shown("two", (3, SECOND))]
        later = ask(engine, told, 4)
        if architecture != "qwen3_5_moe":  # whose prompt's end is too near to go back to
            assert later.stats.reused_tokens >= len(answer.prompt)
        assert later.tokens == reference_answer(model, folder, later.prompt, [FIRST, SECOND], 4)
        # and a text without any
        plain = ask(engine, [shown("none")], 4)
        assert plain.tokens == ask(engine, [shown("none")], 4, draft_length=0).tokens


@pytest.mark.slow
def test_a_layer_of_the_models_own_drafts_behind_pictures(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = vision_model("qwen3_5_moe", dtype=torch.float16, **changes)
    folder = write_vision_model(tmp_path / "m", model)
    donor = tiny_model(
        "qwen3_5_moe_text", seed=7, dtype=torch.float16, max_position_embeddings=1024, **changes
    )
    add_mtp_layer(folder, donor, "qwen3_5_moe_text")
    with Engine.load(str(folder), EngineConfig(device="cpu", context=160, drafter="mtp")) as engine:
        assert engine.info().drafter == "mtp"
        told = [shown("one", (1, FIRST), (2, SECOND))]
        drafted = ask(engine, told, 5, draft_length=2)
        assert drafted.stats.drafted > 0
        assert ask(engine, told, 5, draft_length=0).tokens == drafted.tokens
        told += [Message("assistant", drafted.text), shown("two", (3, SECOND))]
        assert ask(engine, told, 4, draft_length=2).tokens == ask(engine, told, 4, draft_length=0).tokens
