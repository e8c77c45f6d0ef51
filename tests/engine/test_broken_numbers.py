"""Weights that are no numbers: the answer that meets them ends with one sentence, and no other one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import ROOMY, ask
from support.gptq_checkpoints import Model
from support.shapes import ask_ids
from support.tiny_models import tiny_model, write_model
from torch import Tensor

from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.errors import CheckpointError
from localmoe.engine import Engine
from localmoe.kernels.codebook import nf4_codebook
from localmoe.kernels.codes import CodeMatrix
from localmoe.quant.nf4_layout import Nf4Layout

BROKEN_TOKEN = 100
BAD, GOOD = (7, 8, 9, BROKEN_TOKEN, 11), ((7, 8, 9), (7, 8), (30, 31, 32, 33, 34, 35))


def broken(folder: Path, architecture: str) -> Path:
    """A model whose embedding of one token is none."""
    write_model(folder, tiny_model(architecture, tie_word_embeddings=False))
    tensors = load_file(folder / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[name][BROKEN_TOKEN] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("budget", [ROOMY, None], ids=["slots", "in place"])
@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v2", "qwen3_next"])
def test_an_answer_that_meets_them_leaves_none_behind(
    architecture: str, budget: int | None, tmp_path: Path
) -> None:
    """Keys and values of theirs lie in the cache, behind where the next text ends."""
    config = EngineConfig(device="cpu", draft_length=0, vram_budget_bytes=budget)
    with Engine.load(str(broken(tmp_path / "m", architecture)), config) as engine:
        expected = [ask_ids(engine, ids, 3).tokens for ids in GOOD]
        for _ in range(2):
            with pytest.raises(CheckpointError, match="no numbers"):
                ask_ids(engine, BAD, 3)
            assert [ask_ids(engine, ids, 3).tokens for ids in GOOD] == expected


def nearest_nf4(weight: Tensor) -> CodeMatrix:
    blocks = weight.float().view(weight.shape[0], -1, 64)
    scales, table = blocks.abs().amax(-1), nf4_codebook()
    codes = (blocks / scales[..., None])[..., None].sub(table).abs().argmin(-1)
    return CodeMatrix(codes.to(torch.uint8).flatten(1), scales, weight.shape[1], 64, 4, codebook=table)


def nf4_draft(folder: Path, model: Model, damage: float) -> Path:
    """A draft as others make it. damage: a factor on the scales of experts that no check looks at."""
    layout, tensors, experts = Nf4Layout(), dict[str, Tensor](), model.base.experts
    for layer in range(experts.num_layers):
        for expert in range(experts.num_experts):
            for name, weight in zip(("gate", "up", "down"), experts.matrices(layer, expert), strict=True):
                matrix = nearest_nf4(weight)
                matrix.scales.mul_(damage if 0 < expert < experts.num_experts - 1 else 1.0)
                module = model.naming.module(experts.decoder_layer(layer), expert, name)  # type: ignore[arg-type]
                tensors |= {f"{module}.{part}": tensor for part, tensor in layout.pack(matrix).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {**model.source.checkpoint.config, "quantization_config": layout.config()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=1.0, seed=3)])
def test_a_draft_that_computes_none_is_told_of_and_ends_no_answer(
    sampling: SamplingConfig, tiny: Callable[[str], tuple[Path, Any]], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Scales that are finite, whose products are not."""
    folder, _ = tiny("qwen3_moe")
    draft = nf4_draft(tmp_path / "draft", Model.load(folder), damage=1e30)
    config = EngineConfig(device="cpu", vram_budget_bytes=ROOMY, draft_dir=draft)
    with Engine.load(str(folder), config) as engine:
        plain = ask(engine, "tell me", 60, draft_length=0, sampling=sampling).tokens
        for draft_length in (20, "auto"):
            caplog.clear()
            answer = ask(engine, "tell me", 60, draft_length=draft_length, sampling=sampling)
            assert len(answer.tokens) == 60 and (answer.tokens == plain or not sampling.greedy)
            told = [record.getMessage() for record in caplog.records if "no numbers" in record.getMessage()]
            assert len(told) == 1 and "without it" in told[0]
        assert ask(engine, "tell me", 60, draft_length=0, sampling=sampling).tokens == plain
