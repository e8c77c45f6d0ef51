"""Random low-bit experts, what they should compute in float64, and memory that shows what was never
written."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.lowbit_experts import Tile
from localmoe.kernels.lowbit import LowBitExperts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SILU = Activation("silu")
OAI = Activation("swiglu_oai", 1.702, 7.0)


def tile_of(rows: int, vectors: int, depth: int) -> Tile | None:
    """A tile for the interpreter; on a GPU the built-in choice, as others may take minutes to compile."""
    return None if DEVICE.type == "cuda" else Tile(rows, vectors, depth)


BIG = tile_of(rows=32, vectors=32, depth=2)  # few programs: the interpreter pays by the program
# Relative to the norm of the result. Float32 sums hold a code beside a number of up to 2^12. Hidden values
# and the result are each rounded to the dtype; the interpreter cuts bfloat16 off where hardware rounds.
TOLERANCE = {torch.float32: 5e-4, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
_EMPTY = torch.empty  # tests replace torch.empty


def poisoned_empty(*args: object, **options: object) -> Tensor:
    made: Tensor = _EMPTY(*args, **options)  # type: ignore[call-overload]
    return made.fill_(math.nan) if made.is_floating_point() else made


def random_experts(
    sizes: tuple[int, int, int],
    bits: int,
    group_size: int,
    seed: int,
    biased: bool = False,
    indexed: bool = False,
    codebook: bool = False,
    gated: bool = True,
) -> LowBitExperts:
    """Experts of sizes (E, H, I) with random codes, padding included, and biases of a product's size;
    indexed: input features in a random order of each expert; codebook: a random table for each."""
    num_experts, hidden, inner = sizes
    generator = torch.Generator(DEVICE).manual_seed(seed)
    experts = LowBitExperts.empty(
        num_experts, hidden, inner, bits, group_size, DEVICE,
        gated=gated, gate_up_bias=torch.zeros(num_experts, (1 + gated) * inner) if biased else None,
        down_bias=torch.zeros(num_experts, hidden, dtype=torch.bfloat16) if biased else None,
        indexed=indexed, codebook=codebook,
    )  # fmt: skip
    if experts.gate_up.columns is not None:
        orders = torch.rand(num_experts, hidden, generator=generator, device=DEVICE).argsort(1)
        experts.gate_up.columns.copy_(orders)
    return experts.random_(generator)


def random_inputs(
    tokens: int, top_k: int, experts: LowBitExperts, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x, index with a few experts that do not exist, weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, experts.hidden_size, generator=generator).to(DEVICE, dtype)
    index = torch.stack(
        [torch.randperm(experts.num_experts + top_k, generator=generator)[:top_k] for _ in range(tokens)]
    )
    index[index == experts.num_experts + 1] = -1
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return x, index.to(DEVICE), weights.to(DEVICE)


def pairs_of(index: Tensor, experts: LowBitExperts) -> Iterator[tuple[int, int, int]]:
    """(token, k, expert), of experts that exist."""
    for token, chosen in enumerate(index.tolist()):
        for k, expert in enumerate(chosen):
            if 0 <= expert < experts.num_experts:
                yield token, k, expert


def reference(
    x: Tensor, experts: LowBitExperts, index: Tensor, weights: Tensor, activation: Activation
) -> Tensor:
    """(T, H) in float64, one pair after the other, hidden values rounded as between the two kernels."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, k, expert in pairs_of(index, experts):
        gate_up, down = (matrix.double() for matrix in experts.dequantize(expert))
        products = gate_up @ x[token].double()
        if experts.gate_up_bias is not None:
            products += experts.gate_up_bias[expert].double()
        both = products.chunk(2) if experts.gated else (products, products)
        hidden = activation.apply(*both).to(x.dtype).double()
        y = down @ hidden
        if experts.down_bias is not None:
            y += experts.down_bias[expert].double()
        out[token] += weights[token, k].double() * y
    return out


def magnitude(x: Tensor, experts: LowBitExperts, index: Tensor, weights: Tensor) -> Tensor:
    """(T, H) in float64: what roundings are relative to where sums cancel out, with silu. As `reference`,
    with the magnitudes of what is summed."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, k, expert in pairs_of(index, experts):
        gate_up, down = (matrix.double() for matrix in experts.dequantize(expert))
        terms = gate_up * x[token].double()
        if experts.gate_up_bias is not None:
            terms = torch.cat([terms, experts.gate_up_bias[expert].double()[:, None]], dim=1)
        (gate, up), (of_gate, of_up) = terms.sum(1).chunk(2), terms.abs().sum(1).chunk(2)
        hidden = 1.1 * up.abs() * of_gate + torch.nn.functional.silu(gate).abs() * of_up  # |silu'| <= 1.1
        y = down.abs() @ hidden
        if experts.down_bias is not None:
            y += experts.down_bias[expert].double().abs()
        out[token] += weights[token, k].double() * y
    return out


def assert_close(got: Tensor, wanted: Tensor, or_within: Tensor | None = None) -> None:
    """Every token within the tolerance of its norm, and exactly zero where that is. or_within: (T,), errors
    that sums which cancel out may have."""
    assert got.isfinite().all()
    error = (got.double() - wanted).norm(dim=1)
    close = error <= TOLERANCE[got.dtype] * wanted.norm(dim=1)
    if or_within is not None:
        close |= error <= or_within
    assert close.all(), (error / wanted.norm(dim=1)).tolist()
