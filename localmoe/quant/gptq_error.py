"""How far quantised experts change their matrix's output, and which of GPTQ's experts are worth keeping.
Decides nothing about the tokens it is measured on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localmoe.kernels.codes import CodeMatrix, dequantize, quantize_rtn
from localmoe.quant.gptq import QuantizedExperts
from localmoe.quant.gptq_precision import exact_float32


@dataclass(frozen=True, slots=True)
class BetterOfTwo:
    """Experts as chosen, and what the choice was made by.

    Attributes:
        gptq_errors, nearest_errors: float64 (E,) on the CPU, relative output errors.
    """

    experts: QuantizedExperts
    gptq_errors: Tensor
    nearest_errors: Tensor


def output_error(weight: Tensor, matrix: CodeMatrix, hessian: Tensor) -> Tensor:
    """float64 scalar: tr((W - Q) H (W - Q)^T) / tr(W H W^T), the squared error of the output x Q^T relative
    to x W^T over the tokens of H; 0 where those give no output.

    Args:
        weight: W (N, K).
        hessian: H (K, K).
    """
    weight = weight.detach().float()
    hessian = hessian.to(weight.device, torch.float32)
    with exact_float32():
        error, size = (
            _quadratic(dequantize(matrix, torch.float32).sub_(weight), hessian),
            _quadratic(weight, hessian),
        )
    return torch.where(size > 0, error / size, 0)


def output_errors(weight: Tensor, experts: QuantizedExperts, hessian: Tensor) -> Tensor:
    """float64 (E,) on the CPU, for weights (E, N, K) and Hessians (E, K, K) or (1, K, K)."""
    shared = hessian.shape[0] == 1
    found = [
        output_error(weight[expert], experts.matrix(expert), hessian[0 if shared else expert])
        for expert in range(experts.num_experts)
    ]
    return torch.stack(found).cpu()


def keep_better(weight: Tensor, found: QuantizedExperts, hessian: Tensor) -> BetterOfTwo:
    """GPTQ's codes where their output error is lower than that of rounding to nearest, else the nearest ones.

    Args:
        weight: (E, N, K).
        found: GPTQ's codes for it.
        hessian: (E, K, K) or (1, K, K) of tokens that GPTQ did not see; an expert without any is rounded to
            nearest.

    Raises:
        ValueError: see quantize_rtn.
    """
    shared = hessian.shape[0] == 1
    gptq_errors = output_errors(weight, found, hessian)
    codes, scales = found.codes.clone(), found.scales.clone()
    nearest_errors = torch.empty_like(gptq_errors)
    rounded = []
    for expert in range(found.num_experts):
        nearest = quantize_rtn(weight[expert], found.bits, found.group_size)
        nearest_errors[expert] = output_error(weight[expert], nearest, hessian[0 if shared else expert])
        if not bool(gptq_errors[expert] < nearest_errors[expert]):
            codes[expert], scales[expert] = nearest.codes, nearest.scales
            rounded.append(expert)
    chosen = replace(found, codes=codes, scales=scales, rounded=tuple(rounded))
    return BetterOfTwo(chosen, gptq_errors, nearest_errors)


def _quadratic(matrix: Tensor, hessian: Tensor) -> Tensor:
    """float64 tr(M H M^T)."""
    by_row: Tensor = torch.linalg.vecdot(matrix @ hessian, matrix)
    return by_row.sum(dtype=torch.float64)
