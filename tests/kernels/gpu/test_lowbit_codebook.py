"""Low-bit experts whose codes stand for the values of a table; natively with CUDA, else through Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lowbit_cases import (
    BIG,
    DEVICE,
    OAI,
    SILU,
    assert_close,
    poisoned_empty,
    random_experts,
    random_inputs,
    reference,
    tile_of,
)

from localmoe.kernels.codes import quantize_rtn
from localmoe.kernels.gpu.lowbit_experts import lowbit_moe
from localmoe.kernels.lowbit import LowBitExperts


@pytest.fixture(autouse=True)
def fresh_memory_is_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.mark.parametrize(
    ("sizes", "group_size", "top_k", "dtype", "biased", "indexed"),
    [
        ((4, 256, 96), 64, 4, torch.bfloat16, False, False),
        ((3, 200, 40), 64, 1, torch.float32, True, True),  # columns beyond a row's end
        ((4, 160, 96), 32, 6, torch.float16, True, False),
    ],
)
def test_every_expert_reads_its_own_table(
    sizes: tuple[int, int, int], group_size: int, top_k: int, dtype: torch.dtype, biased: bool, indexed: bool
) -> None:
    experts = random_experts(sizes, 4, group_size, 1, biased=biased, indexed=indexed, codebook=True)
    x, index, weights = random_inputs(2, top_k, experts, dtype, seed=top_k)
    index[0, 0], index[1, 0] = 1, sizes[0] - 1
    if top_k > 1:
        index[1, 1] = 1 << 40  # no expert: its table lies nowhere
    activation = OAI if biased else SILU
    got = lowbit_moe(x, experts, index, weights, activation=activation, gate_up_tile=BIG, down_tile=BIG)
    assert_close(got, reference(x, experts, index, weights, activation))


@given(
    st.integers(1, 30), st.integers(1, 20), st.integers(1, 8), st.sampled_from([2, 8]), st.integers(1, 3),
    st.booleans(), st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=4)
def test_any_shape_and_tile_gives_the_same_result(
    width: int, inner: int, top_k: int, vectors: int, depth: int, indexed: bool, seed: int
) -> None:
    sizes = (4, 5 * width, 3 * inner)
    experts = random_experts(sizes, 4, 64, seed, biased=seed % 2 == 0, indexed=indexed, codebook=True)
    x, index, weights = random_inputs(1, top_k, experts, torch.float32, seed)
    tile = tile_of(64, vectors, depth)
    got = lowbit_moe(x, experts, index, weights, activation=SILU, gate_up_tile=tile, down_tile=tile)
    assert_close(got, reference(x, experts, index, weights, SILU))


def test_integers_in_a_tables_memory_give_the_products_of_integers() -> None:
    sizes, made = (2, 256, 128), []
    for codebook, group_size in ((False, 128), (True, 64)):
        experts = LowBitExperts.empty(*sizes, 4, group_size, DEVICE, codebook=codebook)
        generator = torch.Generator().manual_seed(1)
        for expert in range(2):
            up, down = torch.randn(256, 256, generator=generator), torch.randn(256, 128, generator=generator)
            experts.set_expert(expert, quantize_rtn(up, 4, 128), quantize_rtn(down, 4, 128))
        made.append(experts)
    x, _, weights = random_inputs(1, 2, made[0], torch.float32, seed=3)
    index = torch.tensor([[1, 0]], device=DEVICE)
    wanted = reference(x, made[0], index, weights, SILU)
    for experts in made:
        got = lowbit_moe(x, experts, index, weights, activation=SILU, gate_up_tile=BIG, down_tile=BIG)
        assert_close(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 32])
@pytest.mark.parametrize(
    ("sizes", "top_k", "biased"),
    [((60, 2048, 1408), 4, False), ((128, 2048, 768), 8, False), ((32, 2880, 2880), 4, True)],
)
def test_real_shapes_in_a_graph_are_right_and_repeatable(
    sizes: tuple[int, int, int], top_k: int, biased: bool, tokens: int
) -> None:
    activation = OAI if biased else SILU
    experts = random_experts(sizes, 4, 64, seed=4, biased=biased, codebook=True)
    x, index, weights = random_inputs(tokens, top_k, experts, torch.bfloat16, seed=tokens)
    index[:, 0] = torch.arange(tokens, device=DEVICE) % sizes[0]
    eager = lowbit_moe(x, experts, index, weights, activation=activation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lowbit_moe(x, experts, index, weights, activation=activation)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)
    assert_close(eager, reference(x, experts, index, weights, activation))
