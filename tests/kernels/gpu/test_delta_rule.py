"""The gated delta rule against PyTorch's operations, through windows of which any number of tokens is
kept."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE, DTYPES, normal

from localmoe.kernels.delta_rule import (
    DeltaShape,
    reference_delta_inputs,
    reference_delta_rule,
    reference_gated_norm,
)
from localmoe.kernels.gpu.delta_inputs import Projected, delta_inputs
from localmoe.kernels.gpu.delta_memory import DeltaMemory
from localmoe.kernels.gpu.delta_places import (
    DRAFT,
    PROMPT,
    WINDOW,
    begin_pass,
    go_back,
    keep_before,
    new_places,
)
from localmoe.kernels.gpu.delta_rule import delta_rule, gated_norm

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

SHAPES = (DeltaShape(2, 4, 32, 16, 4), DeltaShape(1, 1, 16, 32, 3), DeltaShape(1, 2, 16, 16, 2))
WIDEST = 12


class Layer:
    """One layer's state and what runs over it."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, *, grouped: bool = False) -> None:
        self.shape, self.dtype = shape, dtype
        heads = shape.value_heads
        self.weight = normal(shape.channels, shape.taps, dtype=dtype, scale=0.5)
        self.a_log = torch.linspace(-2, 1, heads).to(DEVICE, dtype)
        self.dt_bias = torch.linspace(-1, 1, heads).to(DEVICE, dtype)
        device = torch.device(DEVICE)
        self.memory = DeltaMemory.empty(shape, 1, WIDEST, dtype, device).of_layer(0)
        for tensor in (self.memory.state, self.memory.draft_state, self.memory.kept_state):
            tensor.fill_(float("nan"))
        self.places = new_places(device)
        self.order = _grouped(shape) if grouped else torch.arange(shape.channels)
        self.grouped = grouped

    def run(self, x: Tensor, ab: Tensor, at: int, live: int, kind: int) -> Tensor:
        shape, heads = self.shape, self.shape.value_heads
        place = torch.tensor([at], device=DEVICE), torch.tensor([live], device=DEVICE)
        begin_pass(self.places, *place, kind, WIDEST)
        lie = torch.empty_like(x)
        lie[:, self.order.to(DEVICE)] = x
        dk, dv, keys, group = shape.key_dim, shape.value_dim, shape.key_heads * shape.key_dim, shape.group
        if self.grouped:
            stride = 2 * dk + group * dv
            places = (0, stride), (dk, stride), (2 * dk, stride)
        else:
            places = (0, dk), (keys, dk), (2 * keys, group * dv)
        projected = Projected(lie, ab[:, :heads], ab[:, heads:], *places, group)
        rates = self.a_log, self.dt_bias
        inputs = delta_inputs(projected, self.weight, *rates, shape, self.memory, self.places, kind)
        return delta_rule(inputs, shape, self.memory, self.places, place[1], len(x), kind)

    def reference(self, x: Tensor, ab: Tensor) -> Tensor:
        """float32, from the beginning."""
        shape, heads = self.shape, self.shape.value_heads
        x, ab, weight = x.cpu(), ab.cpu(), self.weight.cpu()
        before = torch.zeros(shape.taps - 1, shape.channels, dtype=x.dtype)
        inputs = reference_delta_inputs(
            x, before, weight, ab[:, :heads], ab[:, heads:], self.a_log.cpu(), self.dt_bias.cpu()
        )
        state = torch.zeros(heads, shape.value_dim, shape.key_dim)
        return reference_delta_rule(inputs, state, shape)[0].float()


def _grouped(shape: DeltaShape) -> Tensor:
    """Where each channel lies when what belongs to a key head lies together."""
    dk, dv, keys = shape.key_dim, shape.value_dim, shape.key_heads * shape.key_dim
    stride = 2 * dk + shape.group * dv
    q = torch.arange(keys) // dk * stride + torch.arange(keys) % dk
    v = torch.arange(shape.value_heads * dv)
    return torch.cat((q, q + dk, v // (shape.group * dv) * stride + 2 * dk + v % (shape.group * dv)))


def given_rows(shape: DeltaShape, count: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(count, shape.channels, dtype=dtype, seed=seed)
    return x, normal(count, 2 * shape.value_heads, dtype=dtype, seed=seed + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_prompt_and_a_window_agree_with_the_rule(
    shape: DeltaShape, grouped: bool, dtype: torch.dtype
) -> None:
    layer = Layer(shape, dtype, grouped=grouped)
    x, ab = given_rows(shape, 9, dtype)
    got = torch.cat((layer.run(x[:5], ab[:5], 0, 5, PROMPT), layer.run(x[5:], ab[5:], 5, 4, WINDOW)))
    wanted = layer.reference(x, ab)
    assert got.dtype == dtype
    error = (got.float().cpu() - wanted).norm() / wanted.norm()
    assert error < 3 * torch.finfo(dtype).eps, error


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 9999))
def test_bits_do_not_depend_on_how_a_text_was_cut_and_what_was_dropped(seed: int) -> None:
    """Windows with padding rows, of which some tokens are kept, drafts before them, and prompts; and the text
    goes back to where the state was kept aside."""
    chance = Random(seed)
    shape, dtype, length = chance.choice(SHAPES), DTYPES[0], 10
    x, ab = given_rows(shape, length, dtype)
    whole = Layer(shape, dtype)
    wanted = [whole.run(x[i : i + 1], ab[i : i + 1], i, 1, WINDOW)[0] for i in range(length)]
    layer, at, aside, turns = Layer(shape, dtype), 0, 0, 0
    while at < length:
        left = length - at
        if aside and turns < 3 and chance.random() < 0.3:
            layer.memory.restore()
            go_back(layer.places, aside)
            at, turns = aside, turns + 1
            continue
        keeps = chance.random() < 0.4
        if left >= shape.taps and chance.random() < 0.3:
            kept = chance.randint(shape.taps, left)
            if keeps:
                aside = at + chance.randint(shape.taps - 1, kept - 1)
                keep_before(layer.places, aside - at)
            got = layer.run(x[at : at + kept], ab[at : at + kept], at, kept, PROMPT)
        else:
            for draft in range(chance.randint(0, 2)):
                layer.run(*given_rows(shape, 1, dtype, seed=90 + draft), at + draft, 1, DRAFT)
            kept = chance.randint(0 if at else 1, min(left, 4))
            rejected = given_rows(shape, chance.randint(0 if kept else 1, 3), dtype, seed=70)
            padding = given_rows(shape, chance.randint(0, 2), dtype, seed=80)
            if keeps and at:
                aside = at
                keep_before(layer.places, 0)
            right = x[at : at + kept], ab[at : at + kept]
            rows = [torch.cat(parts) for parts in zip(right, rejected, padding, strict=True)]
            got = layer.run(rows[0], rows[1], at, kept + len(rejected[0]), WINDOW)
            assert not got[kept + len(rejected[0]) :].any(), "padding"
        for row in range(kept):
            assert torch.equal(got[row], wanted[at + row]), (at, row)
        at += kept


def test_drafts_go_on_from_each_other_and_leave_the_targets_state_alone() -> None:
    shape, dtype = SHAPES[0], DTYPES[0]
    x, ab = given_rows(shape, 12, dtype)
    layer, plain = Layer(shape, dtype), Layer(shape, dtype)
    for one in (layer, plain):
        one.run(x[:4], ab[:4], 0, 4, PROMPT)
        one.run(x[4:8], ab[4:8], 4, 4, WINDOW)  # of which two are kept
    drafted = [layer.run(x[i : i + 1], ab[i : i + 1], i, 1, DRAFT)[0] for i in (6, 7, 8)]
    drafted += [layer.run(x[i : i + 1], ab[i : i + 1], i, 1, DRAFT)[0] for i in (7, 8)]  # of a step behind 7
    verified = layer.run(x[6:11], ab[6:11], 6, 5, WINDOW)
    assert torch.equal(verified, plain.run(x[6:11], ab[6:11], 6, 5, WINDOW))
    for got, row in zip(drafted, (0, 1, 2, 1, 2), strict=True):
        assert (got.float() - verified[row].float()).norm() <= 0.02 * verified[row].float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gated_norm(dtype: torch.dtype) -> None:
    x, weight = normal(5, 4, 32, dtype=dtype, scale=3), normal(32, dtype=dtype, seed=1)
    gate = normal(5, 300, dtype=dtype, seed=2, scale=2)[:, 7:]
    got = gated_norm(x, gate, (3, 70), 2, weight, 1e-6)
    at = torch.tensor([3 + h // 2 * 70 + h % 2 * 32 for h in range(4)])[:, None] + torch.arange(32)
    wanted = reference_gated_norm(x.cpu(), gate.cpu()[:, at], weight.cpu(), 1e-6).flatten(1)
    assert got.shape == (5, 128)
    assert (got.cpu().float() - wanted.float()).norm() <= 2 * torch.finfo(dtype).eps * wanted.float().norm()
