"""Low-bit expert kernels against float64 sums over the dequantised matrices; natively with CUDA, else through
Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lowbit_cases import (
    BIG,
    DEVICE,
    OAI,
    SILU,
    assert_close,
    magnitude,
    poisoned_empty,
    random_experts,
    random_inputs,
    reference,
    tile_of,
)

from localmoe.kernels.activations import Activation, ActivationKind
from localmoe.kernels.gpu.lowbit_experts import choose_down_tile, choose_gate_up_tile, lowbit_moe
from localmoe.kernels.lowbit import LowBitExperts

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.fixture(autouse=True)
def fresh_memory_is_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty)


UNGATED = Activation("relu", gated=False)
CASES = [
    # (E, H, I), bits, group, T, K, dtype, biased, activation, gate_up tile, down tile
    ((5, 256, 96), 4, 128, 2, 4, torch.bfloat16, False, SILU, BIG, BIG),
    ((3, 2880, 40), 4, 128, 1, 4, torch.float32, True, OAI, tile_of(8, 32, 3), tile_of(128, 8, 1)),
    ((4, 64, 1408), 4, 128, 1, 2, torch.float32, False, SILU, tile_of(128, 32, 1), tile_of(16, 16, 3)),
    ((4, 160, 96), 4, 32, 3, 6, torch.float16, True, OAI, BIG, tile_of(64, 16, 1)),
    ((6, 200, 88), 4, 64, 1, 8, torch.float32, False, Activation("gelu_tanh"), BIG, tile_of(32, 4, 2)),
    (
        (3, 320, 100),
        4,
        256,
        2,
        1,
        torch.float32,
        True,
        Activation("relu"),
        tile_of(64, 64, 1),
        tile_of(64, 32, 1),
    ),
    ((4, 120, 50), 4, 32, 2, 2, torch.float32, False, SILU, tile_of(64, 4, 1), tile_of(128, 2, 1)),
    ((4, 200, 88), 3, 64, 1, 3, torch.float32, True, OAI, BIG, BIG),
    ((4, 544, 48), 3, 32, 1, 2, torch.bfloat16, False, SILU, BIG, tile_of(128, 16, 1)),
    ((3, 300, 72), 3, 128, 1, 2, torch.float32, False, Activation("gelu"), BIG, tile_of(64, 16, 2)),
    ((4, 96, 70), 2, 32, 3, 2, torch.float32, True, SILU, BIG, BIG),
    ((3, 700, 64), 2, 128, 1, 4, torch.float16, False, OAI, BIG, tile_of(128, 8, 1)),
    ((3, 300, 40), 8, 128, 1, 3, torch.float32, False, SILU, tile_of(16, 32, 3), BIG),
    ((4, 160, 96), 8, 32, 2, 2, torch.bfloat16, True, OAI, BIG, tile_of(64, 16, 2)),
    ((4, 168, 96), 4, 128, 2, 6, torch.float16, True, UNGATED, BIG, tile_of(64, 16, 1)),
    ((3, 72, 46), 3, 32, 2, 2, torch.float32, False, UNGATED, None, None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]}bit-g{c[2]}-H{c[0][1]}-I{c[0][2]}-K{c[4]}")
def test_result_is_the_weighted_sum_of_the_dequantised_experts(case: tuple) -> None:
    sizes, bits, group_size, tokens, top_k, dtype, biased, activation, up_tile, down_tile = case
    seed = sum(sizes)
    experts = random_experts(sizes, bits, group_size, seed, biased=biased, gated=activation.gated)
    x, index, weights = random_inputs(tokens, top_k, experts, dtype, seed=bits + top_k)
    index[:, 0] = torch.arange(tokens) % sizes[0]  # at least one that exists
    got = lowbit_moe(
        x, experts, index, weights, activation=activation, gate_up_tile=up_tile, down_tile=down_tile
    )
    assert got.dtype == dtype
    assert_close(got, reference(x, experts, index, weights, activation))


@given(
    st.sampled_from([2, 3, 4, 8]), st.sampled_from([32, 64, 96, 128]), st.integers(1, 30), st.integers(1, 20),
    st.integers(1, 8), st.sampled_from([2, 8]), st.integers(1, 3), st.booleans(), st.integers(0, 999),
)  # fmt: skip
@example(4, 96, 28, 2, 3, 2, 1, False, 431)  # few hidden values, which cancel out
@settings(max_examples=8)
def test_any_shape_and_tile_gives_the_same_result(
    bits: int,
    group: int,
    width: int,
    inner: int,
    top_k: int,
    vectors: int,
    depth: int,
    indexed: bool,
    seed: int,
) -> None:
    sizes = (4, 5 * width, 3 * inner)
    experts = random_experts(sizes, bits, group, seed, biased=seed % 2 == 0, indexed=indexed)
    x, index, weights = random_inputs(1, top_k, experts, torch.float32, seed)
    tile = tile_of(64, vectors, depth)
    got = lowbit_moe(x, experts, index, weights, activation=SILU, gate_up_tile=tile, down_tile=tile)
    # of 1,100 random cases the worst is off by 1.5e-5 of the magnitudes
    cancelled = 5e-5 * magnitude(x, experts, index, weights).norm(dim=1)
    assert_close(got, reference(x, experts, index, weights, SILU), cancelled)


def test_the_built_in_tiles_cover_all_rows_and_columns() -> None:
    experts = random_experts((3, 72, 46), 4, 32, seed=1)
    x, index, weights = random_inputs(1, 4, experts, torch.float32, seed=2)
    index[0, 2] = 0
    assert_close(
        lowbit_moe(x, experts, index, weights, activation=SILU), reference(x, experts, index, weights, SILU)
    )


KINDS: list[tuple[ActivationKind, float]] = [
    ("silu", math.inf), ("silu", 1.0), ("gelu", math.inf), ("gelu_tanh", math.inf), ("relu", 0.5),
    ("swiglu_oai", 0.7), ("swiglu_oai", math.inf),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "limit"), KINDS)
def test_the_activation_is_the_torch_one(kind: ActivationKind, limit: float) -> None:
    activation = Activation(kind, 1.3, limit, interleaved=True)  # of the module's rows, not of these
    experts = random_experts((1, 64, 48), 8, 32, seed=3)
    x, _, _ = random_inputs(1, 1, experts, torch.float32, seed=4)
    index, weights = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    got = lowbit_moe(x * 3, experts, index, weights, activation=activation, gate_up_tile=BIG, down_tile=BIG)
    assert_close(got, reference(x * 3, experts, index, weights, activation))


def test_experts_that_do_not_exist_contribute_nothing() -> None:
    experts = random_experts((3, 64, 32), 4, 32, seed=5, biased=True)
    x, _, weights = random_inputs(3, 2, experts, torch.float32, seed=6)
    index = torch.tensor([[3, 1 << 40], [0, -1], [3, 2]], device=DEVICE)
    weights[0], weights[1, 1] = math.nan, math.nan
    got = lowbit_moe(x, experts, index, weights, activation=OAI, gate_up_tile=BIG, down_tile=BIG)
    assert got[0].eq(0).all()
    wanted = reference(x, experts, index, weights, OAI)
    assert_close(got[1:], wanted[1:])


def test_a_token_does_not_see_its_neighbours() -> None:
    experts = random_experts((4, 96, 40), 4, 32, seed=7)
    x, index, weights = random_inputs(3, 2, experts, torch.float16, seed=8)
    x[1] = math.nan
    tiles = {"gate_up_tile": BIG, "down_tile": BIG}
    together = lowbit_moe(x, experts, index, weights, activation=SILU, **tiles)
    alone = lowbit_moe(x[2:], experts, index[2:], weights[2:], activation=SILU, **tiles)
    assert torch.equal(alone, together[2:]) and alone.norm() > 0


def test_inputs_may_be_views_and_weights_of_the_dtype_of_x() -> None:
    experts = random_experts((4, 96, 40), 4, 32, seed=9)
    x, index, weights = random_inputs(2, 3, experts, torch.float16, seed=10)
    wide = torch.stack((x, x * 0 + math.nan), dim=1).flatten(1)
    args = (wide[:, :96], experts, index.t().contiguous().t(), weights.half().t().contiguous().t())
    got = lowbit_moe(*args, activation=SILU, gate_up_tile=BIG, down_tile=BIG)
    assert_close(got, reference(x, experts, index, weights.half(), SILU))


@pytest.mark.parametrize(
    ("hidden", "inner", "top_k", "bits"),
    [
        (2048, 1408, 4, 4),
        (2048, 768, 8, 4),
        (4096, 6400, 2, 3),
        (2880, 2880, 4, 8),
        (2048, 1408, 6, 2),
        (64, 32, 5, 4),
    ],
)
def test_built_in_tiles_keep_all_lanes_busy(hidden: int, inner: int, top_k: int, bits: int) -> None:
    with torch.device("meta"):
        experts = LowBitExperts.empty(4, hidden, inner, bits, 128 if hidden > 64 else 32, "meta")
    for tile, side, packed in (
        (choose_gate_up_tile(experts), 1, experts.gate_up),
        (choose_down_tile(experts, top_k), math.gcd(top_k, 8), experts.down),
    ):
        assert tile.vectors * side % 32 == 0, "a thread must read one vector a step"
        words = tile.vectors * 4 * tile.depth
        covered = -(-packed.words.shape[2] // words) * words
        assert covered <= max(tile.vectors * 4, packed.words.shape[2] * 1.4)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 32])
@pytest.mark.parametrize(
    ("sizes", "top_k", "bits", "biased"),
    [
        ((60, 2048, 1408), 4, 4, False),
        ((128, 2048, 768), 8, 4, False),
        ((16, 4096, 6400), 2, 4, False),
        ((32, 2880, 2880), 4, 4, True),
        ((64, 2048, 1408), 6, 3, False),
        ((60, 2048, 1408), 4, 2, False),
        ((60, 2048, 1408), 4, 8, False),
    ],
)
def test_real_shapes_in_a_graph_are_right_and_repeatable(
    sizes: tuple[int, int, int], top_k: int, bits: int, biased: bool, tokens: int
) -> None:
    activation = OAI if biased else SILU
    experts = random_experts(sizes, bits, 128, seed=bits, biased=biased)
    x, index, weights = random_inputs(tokens, top_k, experts, torch.bfloat16, seed=tokens)
    index[:, 0] = torch.arange(tokens, device=DEVICE) % sizes[0]
    eager = lowbit_moe(x, experts, index, weights, activation=activation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lowbit_moe(x, experts, index, weights, activation=activation)
    for _ in range(3):
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, eager)
    assert_close(eager, reference(x, experts, index, weights, activation))
