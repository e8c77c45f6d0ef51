"""Low-bit experts one by one against float64 products of the same numbers."""

from __future__ import annotations

import pytest
import torch

from localmoe.kernels.activations import Activation
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_reference import one_by_one


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["plain", "biased", "indexed", "codebook"])
def test_experts_one_by_one_are_the_sum_of_their_products(bits: int, kind: str) -> None:
    if kind == "codebook" and bits != 4:
        return
    generator = torch.Generator().manual_seed(bits)
    biases = (torch.zeros(5, 96), torch.zeros(5, 40)) if kind == "biased" else (None, None)
    experts = LowBitExperts.empty(
        5, 40, 48, bits, 32, "cpu", gate_up_bias=biases[0], down_bias=biases[1],
        indexed=kind == "indexed", codebook=kind == "codebook",
    )  # fmt: skip
    if experts.gate_up.columns is not None:
        experts.gate_up.columns.copy_(torch.rand(5, 40, generator=generator).argsort(1))
    experts.random_(generator)
    x, activation = torch.randn(3, 40, generator=generator), Activation("silu")
    index = torch.tensor([[0, 3], [4, -1], [5, 2]])  # -1 and 5 are no experts
    weights = torch.rand(3, 2, generator=generator)
    expected = torch.zeros(3, 40, dtype=torch.float64)
    for token, row in enumerate(index.tolist()):
        for k, expert in enumerate(row):
            if not 0 <= expert < 5:
                continue
            gate_up, down = (matrix.double() for matrix in experts.dequantize(expert))
            hidden = gate_up @ x[token].double()
            hidden += 0 if biases[0] is None else experts.gate_up_bias[expert].double()
            out = down @ activation.apply(*hidden.chunk(2))
            out += 0 if biases[1] is None else experts.down_bias[expert].double()
            expected[token] += weights[token, k].double() * out
    found = one_by_one(x, experts, index, weights, activation=activation)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
