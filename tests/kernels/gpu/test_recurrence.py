"""Recurrent layers against PyTorch's operations, through windows of which any number of tokens is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DTYPES, normal
from recurrent_layers import ConvLayer, DeltaLayer, Layer, SpaceLayer

from localmoe.kernels.delta_rule import DecayGate, reference_gated_norm
from localmoe.kernels.gpu.gated_norms import gated_norm, group_norm
from localmoe.kernels.gpu.state_places import DRAFT, PROMPT, WINDOW, go_back, keep_before
from localmoe.kernels.recurrent_shapes import ConvShape, ScanShape
from localmoe.kernels.state_space import reference_group_norm

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

WIDE, SMALL, SHORT = ScanShape(2, 4, 32, 16, 4), ScanShape(1, 1, 16, 32, 3), ScanShape(1, 2, 16, 16, 2)
CHANNELS = ScanShape(3, 3, 16, 32, 4, by_channel=True)
SUMS = ScanShape(2, 4, 32, 16, 4, "sum"), ScanShape(1, 3, 16, 32, 2, "sum")
LAYERS: dict[str, Callable[[torch.dtype], Layer]] = {
    "delta": lambda dtype: DeltaLayer(WIDE, dtype),
    "delta, grouped": lambda dtype: DeltaLayer(WIDE, dtype, grouped=True),
    "delta, one head": lambda dtype: DeltaLayer(SMALL, dtype),
    "delta, one head, grouped": lambda dtype: DeltaLayer(SMALL, dtype, grouped=True),
    "delta, two taps": lambda dtype: DeltaLayer(SHORT, dtype, grouped=True),
    "delta, by channel": lambda dtype: DeltaLayer(CHANNELS, dtype),
    "delta, bounded": lambda dtype: DeltaLayer(CHANNELS, dtype, gate=DecayGate(-5.0)),
    "delta, bounded and rounded": lambda dtype: DeltaLayer(CHANNELS, dtype, gate=DecayGate(-5.0, True)),
    "state space": lambda dtype: SpaceLayer(SUMS[0], dtype, biased=True),
    "state space, three heads": lambda dtype: SpaceLayer(SUMS[1], dtype, biased=False),
    "convolution": lambda dtype: ConvLayer(ConvShape(48, 3), dtype, biased=False),
    "convolution, biased": lambda dtype: ConvLayer(ConvShape(32, 4), dtype, biased=True),
}
CUT = ("delta", "delta, one head", "delta, by channel", "delta, two taps", "state space", "convolution")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_prompt_and_a_window_agree_with_the_rule(kind: str, dtype: torch.dtype) -> None:
    layer = LAYERS[kind](dtype)
    rows = layer.rows(9)
    got = torch.cat((layer.run(rows[:5], 0, 5, PROMPT), layer.run(rows[5:], 5, 4, WINDOW)))
    wanted = layer.reference(rows)
    assert got.dtype == dtype
    error = (got.float().cpu() - wanted).norm() / wanted.norm()
    assert error < 3 * torch.finfo(dtype).eps, error


@cache
def _token_by_token(kind: str) -> tuple[Tensor, Tensor]:
    """Ten rows, and what comes out of each in a window of its own."""
    layer = LAYERS[kind](DTYPES[0])
    rows = layer.rows(10)
    return rows, torch.cat([layer.run(rows[i : i + 1], i, 1, WINDOW) for i in range(10)])


@settings(max_examples=10)
@given(st.integers(0, 9999))
def test_bits_do_not_depend_on_how_a_text_was_cut_and_what_was_dropped(seed: int) -> None:
    """Windows with padding rows, of which some tokens are kept, drafts before them, and prompts; and the text
    goes back to where the state was kept aside."""
    chance = Random(seed)
    kind = chance.choice(CUT)
    (rows, wanted), layer = _token_by_token(kind), LAYERS[kind](DTYPES[0])
    length, taps = len(rows), layer.taps.shape[1]
    at, aside, turns = 0, 0, 0
    while at < length:
        left = length - at
        if aside and turns < 3 and chance.random() < 0.3:
            layer.memory.restore()
            go_back(layer.places, aside)
            at, turns = aside, turns + 1
            continue
        keeps = chance.random() < 0.4
        if left >= taps and chance.random() < 0.3:
            kept = chance.randint(taps, left)
            if keeps:
                aside = at + chance.randint(taps - 1, kept - 1)
                keep_before(layer.places, aside - at)
            got = layer.run(rows[at : at + kept], at, kept, PROMPT)
        else:
            for draft in range(chance.randint(0, 2)):
                layer.run(layer.rows(1, seed=90 + draft), at + draft, 1, DRAFT)
            kept = chance.randint(0 if at else 1, min(left, 4))
            rejected = layer.rows(chance.randint(0 if kept else 1, 3), seed=70)
            padding = layer.rows(chance.randint(0, 2), seed=80)
            if keeps and at:
                aside = at
                keep_before(layer.places, 0)
            live = kept + len(rejected)
            got = layer.run(torch.cat((rows[at : at + kept], rejected, padding)), at, live, WINDOW)
            assert not got[live:].any(), "padding"
        for row in range(kept):
            assert torch.equal(got[row], wanted[at + row]), (at, row)
        at += kept


@pytest.mark.parametrize("kind", CUT)
def test_drafts_go_on_from_each_other_and_leave_the_targets_state_alone(kind: str) -> None:
    layer, plain = LAYERS[kind](DTYPES[0]), LAYERS[kind](DTYPES[0])
    rows = layer.rows(12)
    for one in (layer, plain):
        one.run(rows[:4], 0, 4, PROMPT)
        one.run(rows[4:8], 4, 4, WINDOW)  # of which two are kept
    drafted = [layer.run(rows[i : i + 1], i, 1, DRAFT)[0] for i in (6, 7, 8)]
    drafted += [layer.run(rows[i : i + 1], i, 1, DRAFT)[0] for i in (7, 8)]  # of a step behind 7
    verified = layer.run(rows[6:11], 6, 5, WINDOW)
    assert torch.equal(verified, plain.run(rows[6:11], 6, 5, WINDOW))
    for got, row in zip(drafted, (0, 1, 2, 1, 2), strict=True):
        assert (got.float() - verified[row].float()).norm() <= 0.02 * verified[row].float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_gated_norm(sigmoid: bool, dtype: torch.dtype) -> None:
    x, weight = normal(5, 4, 32, dtype=dtype, scale=3), normal(32, dtype=dtype, seed=1)
    gate = normal(5, 300, dtype=dtype, seed=2, scale=2)[:, 7:]
    got = gated_norm(x, gate, (3, 70), 2, weight, 1e-6, sigmoid=sigmoid)
    at = torch.tensor([3 + h // 2 * 70 + h % 2 * 32 for h in range(4)])[:, None] + torch.arange(32)
    gates = gate.cpu()[:, at]
    wanted = reference_gated_norm(x.cpu(), gates, weight.cpu(), 1e-6, sigmoid=sigmoid).flatten(1)
    assert got.shape == (5, 128)
    assert (got.cpu().float() - wanted.float()).norm() <= 2 * torch.finfo(dtype).eps * wanted.float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups, size", [(1, 1536), (8, 512), (2, 24)])
def test_the_norm_of_a_group_of_channels(groups: int, size: int, dtype: torch.dtype) -> None:
    x, weight = normal(5, groups * size, dtype=dtype, scale=3), normal(groups * size, dtype=dtype, seed=1)
    gate = normal(5, groups * size + 9, dtype=dtype, seed=2, scale=2)[:, 9:]
    got = group_norm(x, gate, weight, groups, 1e-5)
    wanted = reference_group_norm(x.cpu(), gate.cpu(), weight.cpu(), groups, 1e-5).float()
    assert got.dtype == dtype and got.shape == wanted.shape
    assert (got.cpu().float() - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()
    one = group_norm(x[2:3], gate[2:3], weight, groups, 1e-5)
    assert torch.equal(one[0], got[2]), "a row's bits do not depend on the others"
