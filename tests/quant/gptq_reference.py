"""Textbook GPTQ of one matrix in float64, correlated samples for it, and how codes are held against it."""

from __future__ import annotations

import torch
from torch import Tensor


def activations(experts: int, tokens: int, features: int, seed: int) -> Tensor:
    """float32 (E, T, K): correlated inputs, of widely different size by feature, other for each expert."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-1.5, 0.5, features)[torch.randperm(features, generator=generator)]
    mixing = torch.randn(experts, features, features, generator=generator) * size / features**0.5
    mixing += torch.diag(size)
    hidden = torch.randn(experts, tokens, features, generator=generator) * torch.logspace(0.3, -1, features)
    return hidden @ mixing


def second_moments(inputs: Tensor) -> Tensor:
    """(E, K, K): mean of x x^T."""
    return inputs.transpose(1, 2) @ inputs / inputs.shape[1]


def weights(experts: int, rows: int, features: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(experts, rows, features, generator=generator) * 0.02


def column_order(hessian: Tensor, *, act_order: bool) -> Tensor:
    """Input features as GPTQ rounds them; of equal diagonals the later feature first."""
    if not act_order:
        return torch.arange(hessian.shape[0])
    return torch.argsort(hessian.diagonal(), stable=True).flip(0)


def textbook_codes(
    weight: Tensor,
    hessian: Tensor,
    scales: Tensor,
    bits: int,
    group_size: int,
    order: Tensor,
    damping: float = 0.01,
    shrinkage: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """float64 codes and values before rounding, in codes, both (N, K) in column order `order`.

    The loop of the paper: quantise a column, divide its error by the diagonal of the upper Cholesky factor of
    the inverse Hessian, subtract that times the factor's row from the columns to come.
    """
    work, hessian = weight.double()[:, order], hessian.double()[order][:, order]
    diagonal = hessian.diagonal()
    hessian = hessian + torch.diag(damping * diagonal.mean() + shrinkage * diagonal)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    half = 2 ** (bits - 1)
    codes, values = torch.empty_like(work), torch.empty_like(work)
    for column, feature in enumerate(order.tolist()):
        scale = scales[:, feature // group_size].double()
        values[:, column] = work[:, column] / scale + half
        codes[:, column] = values[:, column].round().clamp(0, 2 * half - 1)
        error = (work[:, column] - (codes[:, column] - half) * scale) / factor[column, column]
        work[:, column:] -= error[:, None] * factor[column, column:]
    return codes, values


def rows_apart(codes: Tensor, expected: Tensor, values: Tensor, order: Tensor) -> int:
    """Rows whose codes (N, >= K, true column order) part from the expected ones (N, K, in `order`).

    They may part only where the value before rounding lies within 1e-3 of a boundary between two codes; what
    follows in that row is then fed by another error.
    """
    found = codes[:, order].double()
    apart = 0
    for row in (found != expected).any(1).nonzero().flatten().tolist():
        column = int((found[row] != expected[row]).nonzero()[0])
        value = float(values[row, column])
        assert abs(value - int(value // 1) - 0.5) < 1e-3, (row, column, value, float(found[row, column]))
        apart += 1
    return apart
