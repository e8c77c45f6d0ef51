"""Factors an expert's Hessian into the coefficients by which GPTQ feeds rounding errors back. Decides the
damping, and which experts have no usable Hessian; rounds nothing.

GPTQ (Frantar et al. 2022, section 3.3) rounds a column, then moves the columns to come by the row U_j of the
upper Cholesky factor of H^-1. The same codes come from H itself (Chee et al. 2023, "QuIP", section 4): with H
= (I + F) D (I + F)^T, F strictly upper, column j is rounded at w_j + sum over earlier i of (w_i - q_i) F_ij.
That takes one Cholesky factorisation and no inverse, so it is faster and keeps more digits. Columns are laid
out in the reverse of their order of rounding: then I + F is the lower Cholesky factor of H so laid out, its
columns scaled to a diagonal of 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01  # of the mean diagonal, as in the paper
# Of each diagonal element itself. It shrinks correlations, which few tokens exaggerate (Ledoit, Wolf 2004);
# unlike damping it suits features of any size.
SHRINKAGE = 0.1
_RAISE = 10.0  # times the damping before, where a factorisation fails
_TRIES = 4  # with 0.01: up to 10 mean diagonals


@dataclass(frozen=True, slots=True)
class Factors:
    """Feedback of each of E experts; positions 0..K-1 are columns in the reverse of their order of rounding.

    Attributes:
        feedback: float32 (E, K, K), unit lower triangular: row i, column j is F of the earlier i on j.
        importance: float32 (E, K), D: what a squared rounding error at a position costs. Ones where
            `rounded`.
        order: int64 (E, K), the input feature at each position.
        damping: share of the mean diagonal that was added to each expert's diagonal.
        rounded: experts without a usable Hessian; their feedback is none, so they are rounded to nearest.
    """

    feedback: Tensor
    importance: Tensor
    order: Tensor
    damping: tuple[float, ...]
    rounded: tuple[int, ...]


def factorise(hessian: Tensor, damping: float, shrinkage: float, *, act_order: bool) -> Factors:
    """Factor each of (E, K, K) Hessians, float32, symmetric.

    An input that no token used has a zero row: damping makes it a column that nothing feeds back to. Where a
    factorisation fails, or is not finite, that expert's damping grows tenfold, a bounded number of times; a
    Hessian of zeros, or with a NaN, stays without a factor.

    Args:
        damping: share of the mean diagonal to add to the diagonal at first; positive.
        shrinkage: share of each diagonal element to add to it; not negative.
        act_order: round columns of large diagonal first (the "act-order" of GPTQ's code), else in order.
    """
    assert damping > 0 and shrinkage >= 0
    experts, features = hessian.shape[:2]
    feedback = torch.empty_like(hessian, memory_format=torch.contiguous_format)
    order = rounding_order(hessian, act_order=act_order)
    used = [damping] * experts
    failed = list(range(experts))
    for attempt in range(_TRIES):
        for expert in failed:
            used[expert] = damping * _RAISE**attempt
            _factorise_one(hessian[expert], order[expert], used[expert], shrinkage, feedback[expert])
        failed = _unusable(feedback)
        if not failed:
            break
    for expert in failed:
        feedback[expert] = torch.eye(features, dtype=torch.float32, device=hessian.device)
    diagonal = feedback.diagonal(dim1=1, dim2=2)
    importance = diagonal.square()
    for expert in range(experts):
        feedback[expert] /= diagonal[expert].clone()
    return Factors(feedback, importance, order, tuple(used), tuple(failed))


def rounding_order(hessian: Tensor, *, act_order: bool) -> Tensor:
    """int64 (E, K): input features, the last to be rounded first."""
    experts, features = hessian.shape[:2]
    if act_order:
        return torch.argsort(hessian.diagonal(dim1=1, dim2=2), dim=1, stable=True)
    return torch.arange(features - 1, -1, -1, device=hessian.device).expand(experts, -1)


def _factorise_one(hessian: Tensor, order: Tensor, damping: float, shrinkage: float, out: Tensor) -> None:
    """Write the lower Cholesky factor of the ordered (K, K) Hessian, of mean diagonal 1 and then shrunk and
    damped, into `out`; NaN where there is none. Waits for no device."""
    ordered = hessian.index_select(0, order).index_select(1, order)
    mean = ordered.diagonal().mean()  # 0 without any token: all becomes NaN
    ordered.div_(mean).diagonal().mul_(1 + shrinkage).add_(damping)
    factor, info = torch.linalg.cholesky_ex(ordered)
    out.copy_(factor)
    out.diagonal().masked_fill_(info > 0, torch.nan)


def _unusable(factors: Tensor) -> list[int]:
    """Experts whose factor is not finite; waits for the device once."""
    usable: list[bool] = torch.isfinite(factors.sum(dim=(1, 2))).tolist()
    return [expert for expert, good in enumerate(usable) if not good]
