"""Products with a matrix of low-bit codes, for drafts that run layer by layer. Knows no file format and
quantises nothing; whole passes on a GPU have kernels of their own (kernels.gpu.lowbit_experts)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from localmoe.kernels.codebook import as_bytes
from localmoe.kernels.codes import CodeMatrix, dequantize

# torch's fused INT4 kernel for CPUs
_FUSED_GROUP_SIZES = (32, 64, 128, 256)
_FUSED_ROWS = 16  # it wants a multiple of this many output features
_FUSED_HALF = 8  # its value is scale * (code - 8) + zero


class LowBitLinear:
    """y = x W^T with W kept in codes on one device.

    On CPU it uses torch's fused INT4 kernel where the shape allows: activations and scales are bfloat16 there
    (with float32 activations that kernel takes a path about 50 times slower). Codes of 2 and 3 bits are INT4
    codes of the same values; 8 bits are two INT4 matrices side by side, of the high and the low nibbles,
    that multiply x twice and sum in the kernel. Codes of a table run there too, as the 8-bit numbers next to
    its values (off by at most 1/254 of a group's largest weight). Elsewhere it dequantises W at every call
    and multiplies in x's dtype. A draft's results need not be exact, so both will do.
    """

    def __init__(self, matrix: CodeMatrix, device: torch.device | str = "cpu", *, fused: bool = True) -> None:
        """fused: use the fused kernel where the shape allows."""
        device = torch.device(device)
        self.in_features = matrix.in_features
        self.out_features = matrix.out_features
        self._padding = matrix.padded_features - matrix.in_features
        self._group_size = matrix.group_size
        self._matrix: CodeMatrix | None = None
        self._columns: Tensor | None = None
        self._packed = self._scales_and_zeros = torch.empty(0, dtype=torch.float32)
        self._copies = 1  # of x
        if fused and device.type == "cpu" and _fits_fused_kernel(matrix):
            matrix = matrix.to(device)
            self._columns = matrix.columns
            codes, scales, bits = _as_integers(matrix)
            codes, self._scales_and_zeros = _as_int4(codes, scales, bits)
            self._copies = 2 if bits == 8 else 1
            self._packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        else:
            self._matrix = matrix.to(device)

    @property
    def fused(self) -> bool:
        """Whether the fused kernel runs."""
        return self._matrix is None

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device."""
        if self._matrix is not None:
            return self._matrix.num_bytes
        order = 0 if self._columns is None else self._columns.nbytes
        return self._packed.nbytes + self._scales_and_zeros.nbytes + order

    def __call__(self, x: Tensor) -> Tensor:
        """(T, N) in x's dtype of x (T, K), float32 or bfloat16."""
        if self._matrix is not None:
            return functional.linear(x, dequantize(self._matrix, x.dtype))
        stored = x if self._columns is None else x.index_select(1, self._columns)
        activations = functional.pad(stored.bfloat16(), (0, self._padding)).repeat(1, self._copies)
        product = torch._weight_int4pack_mm_for_cpu(
            activations, self._packed, self._group_size, self._scales_and_zeros
        )
        return product.to(x.dtype)


def _fits_fused_kernel(matrix: CodeMatrix) -> bool:
    return matrix.group_size in _FUSED_GROUP_SIZES and matrix.out_features % _FUSED_ROWS == 0


def _as_integers(matrix: CodeMatrix) -> tuple[Tensor, Tensor, int]:
    """Codes that are integers, scales and bits: the matrix's own, or 8 bits close to its table's values."""
    if matrix.codebook is None:
        return matrix.codes, matrix.scales, matrix.bits
    codes, scale = as_bytes(matrix.codebook)
    return codes[matrix.codes.int()], matrix.scales * scale, 8


def _as_int4(codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """INT4 codes (N, columns) of the same values, and the bfloat16 (groups, N, 2) scales and zeros for them;
    with 8 bits twice as many columns and groups."""
    scales = scales.t().bfloat16()
    zeros = torch.zeros_like(scales)
    if bits < 8:
        codes = codes + (_FUSED_HALF - (1 << bits - 1))
        return codes, torch.stack((scales, zeros), dim=-1).contiguous()
    # code - 128 = 16 (high - 8) + (low - 8) + 8; powers of two times a bfloat16 scale are exact
    codes = torch.cat((codes >> 4, codes & 15), dim=1)
    high, low = torch.stack((16 * scales, zeros), dim=-1), torch.stack((scales, 8 * scales), dim=-1)
    return codes, torch.cat((high, low)).contiguous()
