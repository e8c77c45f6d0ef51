"""A token's logits have the same bits alone and in a window of tokens, also across blocks of the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import load_with_slots, runner_of
from support.tiny_models import ARCHITECTURES
from support.tokenizer import VOCAB_SIZE
from torch import Tensor

from localmoe.kernels.attention import KV_BLOCK
from localmoe.model.runner import ModelRunner

WINDOWS = (2, 3, 5, 9, 17)
TOKENS = 20
PREFIX = KV_BLOCK - TOKENS // 2  # so the compared tokens lie on both sides of a block's end
Tiny = Callable[[str], tuple[Path, Any]]


def logits_in_windows(runner: ModelRunner, tokens: list[int], window: int) -> Tensor:
    parts = [
        runner.run(tokens[start : start + window], "verify", last_only=False)
        for start in range(0, len(tokens), window)
    ]
    runner.sequence.truncate(PREFIX)
    return torch.cat(parts)


def check_windows(folder: Path, dtype: str) -> None:
    tokens = torch.randint(
        6, VOCAB_SIZE, (PREFIX + TOKENS,), generator=torch.Generator().manual_seed(7)
    ).tolist()
    with load_with_slots(folder, 5, dtype=dtype, draft_length=0, context=256) as engine:
        assert engine.info().exactness.startswith("exact"), (
            "no padding makes rows independent on this machine"
        )
        runner = runner_of(engine)
        runner.run(tokens[:PREFIX], "prefill", last_only=True)
        alone = logits_in_windows(runner, tokens[PREFIX:], 1)
        assert alone.isfinite().all() and alone.std() > 0.01
        usable = [
            window for window in WINDOWS if window <= runner.passes.rows.max_rows
        ]  # the engine uses no wider
        assert usable[-1] >= 9
        for window in usable:
            together = logits_in_windows(runner, tokens[PREFIX:], window)
            assert torch.equal(alone, together), f"window {window}: {(alone - together).abs().max()} apart"


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_a_window_have_the_bits_of_one_token_passes(
    architecture: str, dtype: str, tiny: Tiny
) -> None:
    check_windows(tiny(architecture)[0], dtype)


@pytest.mark.parametrize(("architecture", "dtype"), [("gpt_oss", "float32"), ("qwen2_moe", "bfloat16")])
def test_logits_of_a_window_have_the_bits_of_one_token_passes_with_two_threads(
    architecture: str, dtype: str, tiny: Tiny
) -> None:
    torch.set_num_threads(2)
    try:
        check_windows(tiny(architecture)[0], dtype)
    finally:
        torch.set_num_threads(1)
