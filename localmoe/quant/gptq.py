"""Quantises one matrix of many experts with GPTQ, all experts at once. Knows no model, no file and no
calibration text, and does not decide whether rounding to nearest would have been better.

Source: Frantar et al. 2022, "GPTQ", with scales searched for least squared error, columns by falling diagonal
of the Hessian ("act-order") and groups fixed from the original weights beforehand, so that codes stay in the
order of the input features. Used on a draft's experts as in MoE-SpeQ, section 4.1.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from localmoe.kernels.codes import CodeMatrix, check_bits, check_group_size, search_scales
from localmoe.quant.gptq_columns import round_columns
from localmoe.quant.gptq_factor import DAMPING, SHRINKAGE, Factors, factorise

ScaleSearch = Literal["mse", "absmax", "weighted-mse"]
BLOCK = 128  # columns


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """One matrix (N, K) of each of E experts in codes; see CodeMatrix for their values.

    Attributes:
        codes: uint8 (E, N, K_padded), in the order of the input features.
        scales: float16 (E, N, K_padded / group_size).
        in_features: K.
        damping: by expert, the share of the Hessian's mean diagonal that was added to it.
        rounded: experts whose codes are the nearest ones, since their Hessian was of no use or GPTQ no
            better.
    """

    codes: Tensor
    scales: Tensor
    in_features: int
    group_size: int
    bits: int
    damping: tuple[float, ...]
    rounded: tuple[int, ...] = ()

    @property
    def num_experts(self) -> int:
        """E."""
        return self.codes.shape[0]

    def matrix(self, expert: int) -> CodeMatrix:
        """One expert's matrix, in the same memory."""
        codes, scales = self.codes[expert], self.scales[expert]
        return CodeMatrix(codes, scales, self.in_features, self.group_size, self.bits)


def gptq_quantize(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    group_size: int,
    *,
    act_order: bool = True,
    damping: float = DAMPING,
    shrinkage: float = SHRINKAGE,
    scale_search: ScaleSearch = "weighted-mse",
    block: int = BLOCK,
) -> QuantizedExperts:
    """Codes and scales of least output error under each expert's Hessian, as far as GPTQ finds them.

    Scales are rounded to float16 before codes are chosen with them. Deterministic; works on the device of
    `weight`, and waits for it a few times an expert, never in the loop over columns.

    Args:
        weight: (E, N, K), any float dtype.
        hessian: (E, K, K), or (1, K, K) for all experts; symmetric, of any positive factor.
        act_order: round columns of large diagonal first.
        damping: share of the Hessian's mean diagonal that is added to it, and raised where that is too
            little.
        shrinkage: share of each diagonal element that is added to it, against correlations by chance.
        scale_search: least squared error of the weights ("mse"), the same weighted by what an error at a
            column costs ("weighted-mse"), or from the largest weight ("absmax").
        block: columns whose feedback is summed at once; changes results by float32's rounding only.

    Raises:
        ValueError: a weight is NaN or infinite or too large for a float16 scale, or there are no codes of
            these bits and group size.
    """
    check_bits(bits)
    check_group_size(group_size)
    experts, rows, features = weight.shape
    assert weight.is_floating_point() and block > 0
    assert hessian.shape in ((experts, features, features), (1, features, features))
    hessian = hessian.to(weight.device, torch.float32)
    if hessian.shape[0] < experts:  # one problem with more rows
        together = gptq_quantize(
            weight.reshape(1, experts * rows, features), hessian, bits, group_size,
            act_order=act_order, damping=damping, shrinkage=shrinkage, scale_search=scale_search, block=block,
        )  # fmt: skip
        return _split(together, experts)
    factors = factorise(hessian, damping, shrinkage, act_order=act_order)
    scales = _expert_scales(weight, bits, group_size, scale_search, factors)
    codes = _codes(weight, factors, scales, bits, group_size, block)
    return QuantizedExperts(codes, scales, features, group_size, bits, factors.damping, factors.rounded)


def _codes(
    weight: Tensor, factors: Factors, scales: Tensor, bits: int, group_size: int, block: int
) -> Tensor:
    """uint8 (E, N, K_padded) in the order of the input features."""
    experts, rows, features = weight.shape
    ordered = torch.empty((experts, features, rows), dtype=torch.float32, device=weight.device)
    for expert in range(experts):
        ordered[expert] = weight[expert].detach().index_select(1, factors.order[expert]).T
    by_group = scales.transpose(1, 2).float().contiguous()
    found = round_columns(ordered, factors.feedback, by_group, factors.order // group_size, bits, block)
    del ordered
    padded = scales.shape[2] * group_size
    codes = torch.full((experts, rows, padded), 1 << bits - 1, dtype=torch.uint8, device=weight.device)
    for expert in range(experts):
        codes[expert].index_copy_(1, factors.order[expert], found[expert].T)
    return codes


def _expert_scales(
    weight: Tensor, bits: int, group_size: int, search: ScaleSearch, factors: Factors
) -> Tensor:
    """float16 (E, N, groups), an expert at a time."""
    experts, rows, features = weight.shape
    num_groups = -(-features // group_size)
    found = torch.empty((experts, rows, num_groups), dtype=torch.float16, device=weight.device)
    padding = (0, -features % group_size)
    for expert in range(experts):
        groups = functional.pad(weight[expert].detach(), padding).reshape(-1, group_size)
        importance = None
        if search == "weighted-mse":
            importance = torch.zeros_like(factors.importance[expert])
            importance[factors.order[expert]] = factors.importance[expert]
            importance = functional.pad(importance, padding).view(num_groups, group_size).repeat(rows, 1)
        scales = (
            _absmax_scales(groups, bits) if search == "absmax" else search_scales(groups, bits, importance)
        )
        found[expert] = scales.view(rows, num_groups)
    return found


def _absmax_scales(groups: Tensor, bits: int) -> Tensor:
    """float16 (groups,): the largest weight lies half a step within the outermost codes.

    Raises:
        ValueError: a weight is not finite or too large.
    """
    largest = groups.abs().amax(-1).float()
    scales = (largest / ((1 << bits - 1) - 0.5)).half()
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(
            f"the matrix has a weight of {float(largest.max()):.3g}, which no float16 scale holds"
        )
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _split(together: QuantizedExperts, experts: int) -> QuantizedExperts:
    """E experts of one problem whose rows are those of all experts in turn."""
    codes = together.codes.view(experts, -1, together.codes.shape[2])
    scales = together.scales.view(experts, -1, together.scales.shape[2])
    rounded = tuple(range(experts)) if together.rounded else ()
    return QuantizedExperts(
        codes,
        scales,
        together.in_features,
        together.group_size,
        together.bits,
        together.damping * experts,
        rounded,
    )
