"""An expert's MLP against loops in float64, and the weighted sum's bits against transformers' loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from localmoe.kernels.experts import ExpertWeights, combine, expert_mlp
from localmoe.kernels.rows import measure_row_multiple

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def silu_gate(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def interleaved_gate(hidden: Tensor) -> Tensor:
    """As gpt-oss: gate and up alternate."""
    gate, up = hidden[..., ::2], hidden[..., 1::2]
    return torch.sigmoid(gate * 1.702) * gate * (up + 1)


def weights_of(h: int, i: int, *, transposed: bool, biases: bool, seed: int = 0) -> ExpertWeights:
    gate_up, down = normal(2 * i, h, seed=seed) / h**0.5, normal(h, i, seed=seed + 1) / i**0.5
    return ExpertWeights(
        gate_up=gate_up.T.contiguous() if transposed else gate_up,
        down=down.T.contiguous() if transposed else down,
        gate_up_bias=normal(2 * i, seed=seed + 2) if biases else None,
        down_bias=normal(h, seed=seed + 3) if biases else None,
        transposed=transposed,
    )


def naive_mlp(x: Tensor, w: ExpertWeights, gate: object) -> Tensor:
    gate_up, down = w.gate_up.double(), w.down.double()
    if w.transposed:
        gate_up, down = gate_up.T, down.T
    rows = []
    for row in x.double():
        hidden = torch.stack([(weight * row).sum() for weight in gate_up])
        hidden = hidden if w.gate_up_bias is None else hidden + w.gate_up_bias.double()
        inner = gate(hidden)  # type: ignore[operator]
        out = torch.stack([(weight * inner).sum() for weight in down])
        rows.append(out if w.down_bias is None else out + w.down_bias.double())
    return torch.stack(rows)


@given(
    st.integers(1, 9), st.sampled_from([4, 24]), st.sampled_from([2, 10]), st.booleans(), st.booleans(),
    st.sampled_from([silu_gate, interleaved_gate]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60)
def test_an_expert_is_two_products_with_a_gate_between_in_both_orientations(
    rows: int, h: int, i: int, transposed: bool, biases: bool, gate: object, seed: int
) -> None:
    weights = weights_of(h, i, transposed=transposed, biases=biases, seed=seed)
    x = normal(rows, h, seed=seed + 7)
    got = expert_mlp(x, weights, gate)  # type: ignore[arg-type]
    assert got.shape == (rows, h)
    assert got.dtype == x.dtype
    torch.testing.assert_close(got.double(), naive_mlp(x, weights, gate), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_result_does_not_depend_on_which_tokens_share_its_expert(
    transposed: bool, dtype: torch.dtype
) -> None:
    w = weights_of(128, 96, transposed=transposed, biases=True)
    w = ExpertWeights(
        w.gate_up.to(dtype), w.down.to(dtype), w.gate_up_bias.to(dtype), w.down_bias.to(dtype), transposed
    )  # type: ignore[union-attr]  # fmt: skip
    multiple = measure_row_multiple([w.gate_up, w.down], 17, transposed=transposed)
    if multiple is None:
        pytest.skip("no padding makes rows independent on this machine")
    x = normal(17, 128, seed=9).to(dtype)

    def padded(rows: Tensor) -> Tensor:
        filled = F.pad(rows, (0, 0, 0, -len(rows) % multiple))
        return expert_mlp(filled, w, silu_gate)[: len(rows)]

    whole = padded(x)
    for count in (1, 2, 3, 8, 9, 16):
        for first in (0, 17 - count):
            assert torch.equal(padded(x[first : first + count]), whole[first : first + count])


def eager_sum(expert_out: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """transformers' loop: expert by expert in ascending order, each contribution rounded and added."""
    tokens, _, hidden = expert_out.shape
    total = torch.zeros(tokens, hidden, dtype=dtype)
    for expert in sorted(set(index.flatten().tolist())):
        token, k = torch.where(index == expert)
        current = expert_out[token, k] * weights[token, k, None]
        total.index_add_(0, token, current.to(dtype))
    return total


@given(
    st.integers(1, 7), st.integers(1, 6), st.integers(1, 5), st.sampled_from(DTYPES), st.booleans(),
    st.integers(0, 9999),
)  # fmt: skip
@settings(max_examples=80)
def test_the_weighted_sum_has_the_bits_of_the_loop_over_experts(
    tokens: int, k: int, hidden: int, dtype: torch.dtype, wide_weights: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(8, generator=generator)[:k] for _ in range(tokens)])
    weights = torch.rand(tokens, k, generator=generator).to(torch.float32 if wide_weights else dtype)
    out = (normal(tokens, k, hidden, seed=seed) * 10).to(dtype)
    got = combine(out, index, weights, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, eager_sum(out, index, weights, dtype))


def test_the_order_of_the_sum_shows_in_bfloat16_so_the_test_above_can_fail() -> None:
    out = torch.tensor([[[1.0], [256.0], [1.0]]], dtype=torch.bfloat16)
    ones = torch.ones(1, 3, dtype=torch.bfloat16)
    large_first = combine(out, torch.tensor([[1, 0, 2]]), ones, torch.bfloat16)
    large_last = combine(out, torch.tensor([[0, 2, 1]]), ones, torch.bfloat16)
    assert (large_first.item(), large_last.item()) == (256.0, 258.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mlp_and_sum_together_have_the_bits_of_a_transformers_experts_module(dtype: torch.dtype) -> None:
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_local_experts=6, num_experts_per_tok=3, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    module = MixtralExperts(config).to(dtype).eval()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=i) / 6)
        x = normal(5, 32, seed=11).to(dtype)
        index = torch.stack(
            [torch.randperm(6, generator=torch.Generator().manual_seed(t))[:3] for t in range(5)]
        )
        weights = torch.softmax(normal(5, 3, seed=12), -1).to(dtype)
        expected = module(x, index, weights)
        out = torch.zeros(5, 3, 32, dtype=dtype)
        for expert in range(6):
            token, k = torch.where(index == expert)
            if len(token) == 0:
                continue
            w = ExpertWeights(module.gate_up_proj[expert], module.down_proj[expert], None, None, False)
            out[token, k] = expert_mlp(x[token], w, silu_gate)
        assert torch.equal(combine(out, index, weights, dtype), expected)
