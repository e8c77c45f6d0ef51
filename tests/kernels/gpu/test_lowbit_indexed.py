"""Low-bit experts whose input features lie in an order of each expert's own; natively with CUDA, else through
Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lowbit_cases import (
    BIG,
    DEVICE,
    SILU,
    assert_close,
    poisoned_empty,
    random_experts,
    random_inputs,
    reference,
    tile_of,
)

from localmoe.kernels.gpu.lowbit_experts import Tile, lowbit_moe


@pytest.fixture(autouse=True)
def fresh_memory_is_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.mark.parametrize(
    ("bits", "group_size", "hidden", "tile"),
    [(2, 32, 96, BIG), (3, 64, 200, BIG), (4, 128, 256, tile_of(32, 32, 1)), (8, 32, 100, tile_of(32, 8, 2))],
)
def test_each_expert_reads_its_inputs_in_its_own_order(
    bits: int, group_size: int, hidden: int, tile: Tile | None
) -> None:
    experts = random_experts((2, hidden, 16), bits, group_size, seed=bits, indexed=True)
    x, _, weights = random_inputs(1, 2, experts, torch.float32, seed=bits)
    index = torch.tensor([[1, 0]], device=DEVICE)
    got = lowbit_moe(x, experts, index, weights, activation=SILU, gate_up_tile=tile, down_tile=BIG)
    assert_close(got, reference(x, experts, index, weights, SILU))


def test_an_index_that_is_in_order_changes_no_bit() -> None:
    experts = random_experts((2, 96, 16), 4, 32, seed=4, indexed=True)
    x, index, weights = random_inputs(1, 2, experts, torch.float32, seed=4)
    index[0, 0] = 1
    assert experts.gate_up.columns is not None
    experts.gate_up.columns.copy_(torch.arange(96, device=DEVICE))
    plain = replace(experts, gate_up=replace(experts.gate_up, columns=None))
    tiles = {"gate_up_tile": BIG, "down_tile": BIG}
    indexed, straight = (
        lowbit_moe(x, made, index, weights, activation=SILU, **tiles) for made in (experts, plain)
    )
    assert torch.equal(indexed, straight) and indexed.norm() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_real_shapes_with_an_order_for_each_expert(bits: int, tokens: int) -> None:
    experts = random_experts((60, 2048, 1408), bits, 128, seed=bits, indexed=True)
    x, index, weights = random_inputs(tokens, 4, experts, torch.bfloat16, seed=tokens)
    index[:, 0] = torch.arange(tokens, device=DEVICE) % 60
    got = lowbit_moe(x, experts, index, weights, activation=SILU)
    assert_close(got, reference(x, experts, index, weights, SILU))
