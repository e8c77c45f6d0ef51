"""What weights in codes are, without rounding."""

from __future__ import annotations

from torch import Tensor

from localmoe.kernels.nvfp4_tiles import GROUP, Nvfp4Matrix
from localmoe.quant.float8 import values
from localmoe.quant.nvfp4 import unpack


def exact_nvfp4(matrix: Nvfp4Matrix) -> Tensor:
    """float64 (R, C)."""
    codes, scales, factors = matrix.take()
    numbers = values()[unpack(codes.reshape(-1)).long()].double().view(matrix.rows, -1)
    each = values()[scales.long()].double().repeat_interleave(GROUP, 1)
    return numbers * each * factors.double()[:, None]
