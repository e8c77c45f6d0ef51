"""What weights in codes are, without rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.kernels.int4_tiles import Int4Matrix
from localmoe.kernels.nvfp4_tiles import GROUP, Nvfp4Matrix
from localmoe.quant.float8 import values
from localmoe.quant.nvfp4 import unpack


def exact_nvfp4(matrix: Nvfp4Matrix) -> Tensor:
    """float64 (R, C)."""
    codes, scales, factors = matrix.take()
    numbers = values()[unpack(codes.reshape(-1)).long()].double().view(matrix.rows, -1)
    each = values()[scales.long()].double().repeat_interleave(GROUP, 1)
    return numbers * each * factors.double()[:, None]


def exact_int4(matrix: Int4Matrix) -> Tensor:
    """float64 (R, C)."""
    codes, scales, zeros = matrix.take()
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).double()
    each, less = (
        beside.double().repeat_interleave(matrix.span, 1)[:, : matrix.columns] for beside in (scales, zeros)
    )
    return (numbers - less) * each


def fill_int4(matrix: Int4Matrix, chance: torch.Generator, size: float = 1.0) -> None:
    """Any codes and zero points, and scales of about `size` on either side of zero."""
    codes = torch.randint(0, 256, (matrix.rows, matrix.columns // 2), generator=chance).byte()
    shape = matrix.rows, matrix.words.shape[1]
    scales = torch.randn(*shape, generator=chance).mul_(size).to(torch.bfloat16).float()
    assert matrix.put(0, codes, scales, torch.randint(0, 17, shape, generator=chance).byte())
