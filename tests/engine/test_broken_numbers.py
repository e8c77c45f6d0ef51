"""Weights that are no numbers: the answer that meets them ends with one sentence, and no other one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.engines import ROOMY
from support.shapes import ask_ids
from support.tiny_models import tiny_model, write_model

from localmoe.core.config import EngineConfig
from localmoe.core.errors import CheckpointError
from localmoe.engine import Engine

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
