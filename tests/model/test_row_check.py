"""How wide passes may be is measured on the first layers of each kind, and comes out as on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.tiny_models import ARCHITECTURES, tiny_config
from torch import nn

from localmoe.kernels.rows import RowPadding
from localmoe.model import row_check
from localmoe.model.row_check import measure_row_padding
from localmoe.model.shallow import decoder_layers, fill_alike
from localmoe.model.skeleton import Skeleton, skeleton_from_config

CPU = torch.device("cpu")
DEEP = {"num_hidden_layers": 5}


def filled(architecture: str, **changes: Any) -> Skeleton:
    """With weights that lie alike in memory in every layer."""
    if architecture == "gpt_oss":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    made = skeleton_from_config(tiny_config(architecture, **DEEP, **changes), torch.float32, "the model")
    fill_alike(made, CPU)
    return made


def layers_of(skeleton: Skeleton) -> nn.ModuleList:
    owner, attribute = decoder_layers(skeleton)
    found: nn.ModuleList = getattr(owner, attribute)
    return found


@contextmanager
def counted(skeleton: Skeleton) -> Iterator[list[int]]:
    """How often each layer runs inside."""
    runs = [0] * len(layers_of(skeleton))

    def count(at: int) -> Any:
        def hook(*_: Any) -> None:
            runs[at] += 1

        return hook

    hooks = [layer.register_forward_hook(count(at)) for at, layer in enumerate(layers_of(skeleton))]
    try:
        yield runs
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_few_layers_say_what_all_would(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton, for_experts = filled(architecture), RowPadding(1, 80)
    whole = list(layers_of(skeleton))
    with counted(skeleton) as runs:
        found = measure_row_padding(skeleton, CPU, for_experts)
    assert list(layers_of(skeleton)) == whole, "the model is as it was"
    depth = 3 if architecture == "deepseek_v2" else 2  # its first layer is dense
    assert min(runs[:depth]) > 0 and not any(runs[depth:])
    monkeypatch.setattr(row_check, "layer_kinds", lambda skeleton: list(range(5)))
    with counted(skeleton) as runs:
        assert measure_row_padding(skeleton, CPU, for_experts) == found
    assert min(runs) > 0


def test_a_layer_whose_weights_lie_otherwise_is_tried_too() -> None:
    skeleton = filled("mixtral")
    weight = layers_of(skeleton)[3].self_attn.q_proj.weight  # type: ignore[union-attr]
    moved = torch.empty(weight.numel() + 1)[1:].view(weight.shape)
    weight.data = moved.copy_(weight.data)
    with counted(skeleton) as runs:
        measure_row_padding(skeleton, CPU, RowPadding(1, 80))
    assert min(runs[:4]) > 0 and not runs[4]


class Spread(nn.Module):
    """Lets rows see each other: no padding makes that right."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return x + x.mean(dim=-2, keepdim=True)


@pytest.mark.parametrize("at", [0, 4])
def test_rows_that_depend_on_each_other_are_seen_in_whatever_layer(at: int) -> None:
    skeleton = filled("qwen3_moe")
    layers_of(skeleton)[at].post_attention_layernorm = Spread()  # type: ignore[union-attr]
    assert measure_row_padding(skeleton, CPU, RowPadding(1, 80)) is None


def test_an_error_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = filled("olmoe")
    whole = list(layers_of(skeleton))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(row_check, "_run", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_row_padding(skeleton, CPU, RowPadding(1, 80))
    assert list(layers_of(skeleton)) == whole
