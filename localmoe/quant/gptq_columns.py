"""GPTQ's loop over columns, for a batch of experts at once. Chooses no scales and no order.

Column after column is rounded at its weight plus what earlier rounding errors feed back (gptq_factor). The
feedback of finished blocks comes as one product a block (lazy batch updates, Frantar et al. 2022, section
3.3), that inside a block likewise in strips of a few columns, so only a strip is updated column by column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.quant.gptq_precision import exact_float32

STRIP = 16  # columns


def round_columns(
    weight: Tensor, feedback: Tensor, scales: Tensor, groups: Tensor, bits: int, block: int
) -> Tensor:
    """uint8 codes (E, K, N), positions in the layout of `feedback`.

    Launches a fixed sequence of kernels and never waits for the device.

    Args:
        weight: float32 (E, K, N), columns of W as rows; becomes the errors W - Q.
        feedback: float32 (E, K, K), unit lower triangular (gptq_factor.Factors).
        scales: float32 (E, groups, N), values that float16 holds.
        groups: int64 (E, K), group of each position.
        block: columns whose feedback from finished blocks is summed at once.
    """
    experts, features, rows = weight.shape
    codes = torch.empty((experts, features, rows), dtype=torch.uint8, device=weight.device)
    work = torch.empty((4, experts, min(block, features), rows), dtype=torch.float32, device=weight.device)
    half = 1 << bits - 1
    with exact_float32():
        for end in range(features, 0, -block):
            start = max(0, end - block)
            target, scale, inverse, rounded = work[:, :, : end - start]
            _gather_groups(scales, groups[:, start:end], out=scale)
            torch.reciprocal(scale, out=inverse)
            _add_feedback(weight, feedback, slice(start, end), target)
            _round_block(
                target, weight[:, start:end], feedback[:, start:end, start:end], scale, inverse, rounded, half
            )
            codes[:, start:end] = rounded.add_(half)
    return codes


def _gather_groups(scales: Tensor, groups: Tensor, out: Tensor) -> None:
    """out (E, C, N): the row of `scales` (E, groups, N) of each column's group (E, C)."""
    torch.gather(scales, 1, groups[:, :, None].expand(out.shape), out=out)


def _add_feedback(weight: Tensor, feedback: Tensor, block: slice, out: Tensor) -> None:
    """out (E, C, N): the block's weights plus the feedback of all errors after it."""
    coefficients = feedback[:, block.stop :, block].transpose(1, 2)
    out.copy_(weight[:, block])
    out.baddbmm_(coefficients, weight[:, block.stop :])


def _round_block(
    target: Tensor,
    weight: Tensor,
    feedback: Tensor,
    scale: Tensor,
    inverse: Tensor,
    rounded: Tensor,
    half: int,
) -> None:
    """Round a block's columns (E, C, N) from the last to the first.

    Args:
        target: weights plus feedback from outside; overwritten.
        weight: the weights; becomes the errors.
        feedback: (E, C, C), the block's own.
        scale, inverse: of each column and row, and 1 / scale.
        rounded: receives whole numbers -half..half - 1.
    """
    for end in range(target.shape[1], 0, -STRIP):
        start = max(0, end - STRIP)
        if end < target.shape[1]:
            target[:, start:end].baddbmm_(feedback[:, end:, start:end].transpose(1, 2), weight[:, end:])
        for column in range(end - 1, start - 1, -1):
            code, error = rounded[:, column], weight[:, column]
            torch.mul(target[:, column], inverse[:, column], out=code).round_().clamp_(-half, half - 1)
            error.addcmul_(code, scale[:, column], value=-1)
            if column > start:
                share = feedback[:, column, start:column, None]
                target[:, start:column].addcmul_(share, error[:, None])
