"""Shared experts that run beside routed ones: the block's own sums, in another order of issue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from localmoe.model.device_shared_experts import SharedBeside, has_plain_shared_experts

GIVEN = 8


class Side:
    """Notes what begins, ends and is waited for."""

    def __init__(self, story: list[str]) -> None:
        self.story = story

    def __enter__(self) -> Side:
        self.story.append("aside")
        return self

    def __exit__(self, *error: object) -> None:
        self.story.append("back")

    def join(self) -> None:
        self.story.append("join")


class Told(nn.Module):
    def __init__(self, name: str, factor: float, story: list[str]) -> None:
        super().__init__()
        self.name, self.factor, self.story = name, factor, story

    def forward(self, x: Tensor) -> Tensor:
        self.story.append(self.name)
        return x * self.factor


class Block(nn.Module):
    """As DeepSeek's; `other`: the shared experts get a copy."""

    def __init__(self, other: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.story: list[str] = []
        self.gate = Told("gate", 1.0, self.story)
        self.experts = Told("experts", 3.0, self.story)
        self.shared_experts = Told("shared", 0.25, self.story)
        self.other, self.breaks = other, breaks

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        residuals = hidden_states
        hidden_states = self.experts(self.gate(hidden_states))
        if self.breaks:
            raise RuntimeError("the experts broke")
        shared: Tensor = self.shared_experts(residuals.clone() if self.other else residuals)
        return hidden_states + shared if input_ids is None else hidden_states * input_ids + shared


def beside(block: Block) -> Block:
    SharedBeside(block, Side(block.story))  # type: ignore[arg-type]
    return block


@pytest.mark.parametrize(
    ("other", "rows", "story"),
    [
        (False, 1, ["aside", "shared", "back", "gate", "experts", "join"]),
        (False, 128, ["aside", "shared", "back", "gate", "experts", "join"]),
        (False, 129, ["gate", "experts", "shared"]),
        (True, 1, ["aside", "shared", "back", "gate", "experts", "shared", "join"]),
    ],
)
def test_they_begin_first_and_are_waited_for_where_they_are_added(
    other: bool, rows: int, story: list[str]
) -> None:
    x = torch.randn(1, rows, GIVEN, generator=torch.Generator().manual_seed(0))
    wanted, block = Block(other)(x), beside(Block(other))
    for _ in range(2):
        block.story.clear()
        assert torch.equal(block(x), wanted)
        assert block.story == story


@pytest.mark.parametrize("rows", [2, 129])
def test_a_block_may_be_given_more_than_what_is_between_layers(rows: int) -> None:
    """As DeepSeek-V4's, whose first layers choose experts by the token itself."""
    x, tokens = torch.ones(1, rows, GIVEN), torch.full((1, rows, 1), 5)
    assert torch.equal(beside(Block())(x, input_ids=tokens), 15.25 * x)


def test_a_block_that_breaks_leaves_nothing_behind() -> None:
    x, block = torch.ones(1, 2, GIVEN), beside(Block(breaks=True))
    with pytest.raises(RuntimeError, match="broke"):
        block(x)
    assert block.story == ["aside", "shared", "back", "gate", "experts", "join"]
    block.story.clear()
    block.breaks = False
    assert torch.equal(block(x), 3.25 * x)
    assert block.shared_experts(x).eq(0.25).all(), "asked by somebody else, they answer"


def test_deepseeks_blocks_are_known_and_others_are_not(tiny: Callable[[str], tuple[Path, Any]]) -> None:
    known = {
        family: {type(m).__name__ for m in tiny(family)[1].modules() if has_plain_shared_experts(m)}
        for family in ("deepseek_v2", "qwen2_moe", "mixtral")
    }
    assert known == {"deepseek_v2": {"DeepseekV2Moe"}, "qwen2_moe": set(), "mixtral": set()}
    assert has_plain_shared_experts(Block())
