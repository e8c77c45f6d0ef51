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
from localmoe.model import row_check, shallow
from localmoe.model.row_check import measure_row_padding
from localmoe.model.shallow import decoder_layers, fill_alike
from localmoe.model.skeleton import Skeleton, skeleton_from_config

CPU = torch.device("cpu")
DEEP = {"num_hidden_layers": 5}


@pytest.fixture(autouse=True)
def weights_that_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as trained ones: what layers add is not rounded away."""
    monkeypatch.setattr(shallow, "SPREAD", 0.2)
    torch.manual_seed(5)


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


@pytest.mark.slow(but=1)
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


def test_what_else_has_numbered_layers_is_left_alone() -> None:
    skeleton = filled("qwen3_moe")
    tower = nn.ModuleList([nn.Linear(4, 4) for _ in range(7)])
    skeleton.model._modules = {"tower": tower, **skeleton.model._modules}
    with counted(skeleton) as runs:
        assert measure_row_padding(skeleton, CPU, RowPadding(1, 80)) is not None
    assert min(runs[:2]) > 0 and not any(runs[2:]) and len(tower) == 7


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


class Wide(nn.Module):
    """Gives one row in ten other last bits where 32 or more rows ride along, as some sigmoids do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(x)
        rare = (x.flatten(0, -2).abs().sum(-1, keepdim=True) * 1e4).remainder(10) < 1
        wide = x.flatten(0, -2).shape[0] >= 32
        return torch.where(rare.view(*x.shape[:-1], 1) & wide, torch.nextafter(out, out + 1), out)


def test_what_is_wrong_for_few_rows_of_wide_passes_is_seen() -> None:
    skeleton = filled("olmoe")
    layers_of(skeleton)[1].post_attention_layernorm = Wide()  # type: ignore[union-attr]
    found = measure_row_padding(skeleton, CPU, RowPadding(1, 80))
    assert found is not None and found.max_rows < 32
    narrow = measure_row_padding(skeleton, CPU, RowPadding(1, 16))
    assert narrow is not None and narrow.max_rows == 16, "wider ones are of no use"


def test_products_of_the_layers_are_tried_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits a model's own texts may miss that a few rows alone are summed in another order."""
    skeleton = skeleton_from_config(tiny_config("olmoe"), torch.bfloat16, "the model")
    fill_alike(skeleton, CPU)
    plain = nn.functional.linear
    square = layers_of(skeleton)[0].self_attn.q_proj.weight.shape  # type: ignore[union-attr]

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.shape != square or x.flatten(0, -2).shape[0] >= 8 or x.dtype != torch.bfloat16:
            return plain(x, weight, bias)
        return plain(x.flip(-1), weight.flip(-1), bias)

    monkeypatch.setattr(row_check, "_same_bits_up_to", lambda passes, texts, multiple, most: most)
    found = measure_row_padding(skeleton, CPU, RowPadding(1, 80), own_attention=True)
    monkeypatch.setattr(nn.functional, "linear", linear)
    other = measure_row_padding(skeleton, CPU, RowPadding(1, 80), own_attention=True)
    assert found is not None and other is not None and other.multiple == max(8, found.multiple)


def test_an_error_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = filled("olmoe")
    whole = list(layers_of(skeleton))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(row_check._Passes, "run", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_row_padding(skeleton, CPU, RowPadding(1, 80))
    assert list(layers_of(skeleton)) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_prints_are_of_all_bits_of_a_row_and_of_no_other(dtype: torch.dtype) -> None:
    rows = torch.randn(6, 5000).to(dtype)
    prints = row_check._prints(rows)
    assert torch.equal(row_check._prints(rows[2:4]), prints[2:4]) and len(set(prints.tolist())) == 6
    for column in (0, 1, 4095, 4096, 4999):
        other = rows.clone()
        other[3, column] = torch.nextafter(other[3, column], torch.tensor(9, dtype=dtype))
        assert (row_check._prints(other) == prints).tolist() == [True, True, True, False, True, True]
    swapped = rows[:, torch.arange(5000).roll(1)]
    assert not (row_check._prints(swapped) == prints).any()
    zeros = torch.zeros(2, 3, dtype=dtype)
    assert torch.equal(row_check._prints(-zeros), row_check._prints(zeros)), "as equal numbers"
