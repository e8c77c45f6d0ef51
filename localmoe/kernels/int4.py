"""Torch reference of group-quantised INT4 matrices: quantise, dequantise, multiply. Knows no file format
and does not decide which weights are quantised.

A weight is `scale * (code - 8)` with codes 0..15, so the zero point is always 8. A scale may be negative:
the codes reach -8 on one side and +7 on the other, and the sign puts a group's largest weight on the side
that reaches further.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ZERO_POINT = 8
ZERO_BYTE = ZERO_POINT | ZERO_POINT << 4  # two columns of value 0
DEFAULT_GROUP_SIZE = 128
# Candidate ratios largest weight / scale of the search. Below 7 the outer codes go unused; above 8 the
# largest weights are clipped, which pays as long as the many small ones gain more.
_SCALE_RATIOS = (7.0, 7.5, 8.1, 8.7, 9.4, 10.3, 11.4, 12.8)
_CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32: a chunk's temporaries stay in the processor's cache
_TINY = 1e-30  # far below any scale that float16 can store; 1 / _TINY is still finite
# torch's fused CPU kernel
_FUSED_GROUP_SIZES = (32, 64, 128, 256)
_FUSED_ROWS = 16  # it wants a multiple of this many output features


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix W of N output and K input features in symmetric INT4.

    K is padded to whole groups by columns of value 0.

    Attributes:
        codes: uint8 (N, K_padded / 2); the low nibble is the even column, the high nibble the odd one.
        scales: float16 (N, K_padded / group_size).
        in_features: K without padding.
        group_size: columns that share a scale.
    """

    codes: Tensor
    scales: Tensor
    in_features: int
    group_size: int

    def __post_init__(self) -> None:
        groups = -(-self.in_features // self.group_size)
        assert self.codes.dtype == torch.uint8 and self.scales.dtype == torch.float16
        assert self.codes.shape == (self.scales.shape[0], groups * self.group_size // 2)
        assert self.scales.shape[1] == groups

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def padded_features(self) -> int:
        """K rounded up to whole groups."""
        return 2 * self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> QuantizedMatrix:
        """The same matrix on another device."""
        return QuantizedMatrix(
            self.codes.to(device), self.scales.to(device), self.in_features, self.group_size
        )


def check_group_size(group_size: int) -> None:
    """Two columns share a byte, so a group is a positive, even number of columns.

    Raises:
        ValueError: otherwise.
    """
    if group_size < 2 or group_size % 2:
        raise ValueError(f"group size {group_size} is not a positive even number")


def quantize_rtn(weight: Tensor, group_size: int = DEFAULT_GROUP_SIZE) -> QuantizedMatrix:
    """Round to nearest with the scale of least squared error, searched group by group.

    For each ratio of a small grid the group is rounded with scale = largest weight / ratio, and the best
    scale for those codes follows in closed form; the ratio with the least error wins, and the group is
    rounded once more with its float16 scale. A group depends on its own weights alone. A group whose scale
    would vanish in float16 (largest weight below about 2e-7) becomes zeros.

    Args:
        weight: (N, K), any float dtype.

    Raises:
        ValueError: a weight is NaN or infinite or too large for a float16 scale, or the group size is odd.
    """
    check_group_size(group_size)
    assert weight.dim() == 2 and weight.is_floating_point()
    rows, in_features = weight.shape
    padded = functional.pad(weight.detach(), (0, -in_features % group_size))
    groups = padded.reshape(-1, group_size)
    codes = torch.empty((groups.shape[0], group_size // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(groups.shape[0], dtype=torch.float16, device=weight.device)
    step = max(1, _CHUNK_ELEMENTS // group_size)
    for start in range(0, groups.shape[0], step):
        chunk = groups[start : start + step].float()
        scale = _search_scales(chunk)
        scales[start : start + step] = scale
        codes[start : start + step] = _round_to_codes(chunk, scale)
    return QuantizedMatrix(
        codes.view(rows, padded.shape[1] // 2), scales.view(rows, -1), in_features, group_size
    )


def _search_scales(groups: Tensor) -> Tensor:
    """float16 scale of each group of float32 weights (groups, group_size)."""
    low, high = torch.aminmax(groups, dim=-1)
    largest = torch.where(high > -low, high, low)  # with its sign
    if not bool(torch.isfinite(largest).all()) or not bool(torch.isfinite(low).all()):
        kind = "NaN" if bool(torch.isnan(groups).any()) else "infinite"
        raise ValueError(f"the matrix has a weight that is {kind}")
    unit = groups * torch.where(largest.abs() < _TINY, 0, -1 / largest)[:, None]  # the largest is now -1
    rounded = torch.empty_like(unit)
    best_gain = torch.full_like(largest, -1)
    best_scale = torch.zeros_like(largest)
    for ratio in _SCALE_RATIOS:
        torch.mul(unit, ratio, out=rounded).round_().clamp_(-8, 7)
        # squared error of s * rounded = |unit|^2 - gain, at its least where s = <rounded, unit> / |rounded|^2
        product = torch.linalg.vecdot(rounded, unit)
        scale = product / torch.linalg.vecdot(rounded, rounded).clamp_min_(1)
        gain = product * scale
        best_scale = torch.where(gain > best_gain, scale, best_scale)
        best_gain = torch.maximum(gain, best_gain)
    stored = (best_scale * -largest).half()
    if not bool(torch.isfinite(stored).all()):
        limit = float(largest.abs().max())
        raise ValueError(f"the matrix has a weight of {limit:.3g}, too large for a float16 scale")
    return torch.where(stored == 0, torch.ones_like(stored), stored)


def _round_to_codes(groups: Tensor, scales: Tensor) -> Tensor:
    """uint8 (groups, group_size / 2), two codes a byte, of float32 weights and float16 scales."""
    rounded = (groups * (1 / scales.float())[:, None]).round_().clamp_(-8, 7)
    pairs = rounded.add_(ZERO_POINT).to(torch.uint8).view(torch.int16)  # little-endian: odd column on top
    return (pairs | pairs >> 4).to(torch.uint8)


def unpack_codes(codes: Tensor) -> Tensor:
    """One code 0..15 an element: uint8 (N, K_padded) of uint8 (N, K_padded / 2)."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """W (N, K), computed in float32 and rounded once to `dtype`."""
    values = unpack_codes(matrix.codes).float().sub_(ZERO_POINT)
    grouped = values.view(matrix.out_features, -1, matrix.group_size)
    grouped.mul_(matrix.scales.float().unsqueeze(-1))
    return values[:, : matrix.in_features].to(dtype)


class Int4Linear:
    """y = x W^T with W kept in INT4 on one device.

    On CPU it uses torch's fused kernel where the shape allows: activations and scales are bfloat16 there
    (with float32 activations that kernel takes a path about 50 times slower). Elsewhere it dequantises W
    at every call and multiplies in x's dtype. A draft's results need not be exact, so both will do.
    """

    def __init__(self, matrix: QuantizedMatrix, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self.in_features = matrix.in_features
        self.out_features = matrix.out_features
        self._padding = matrix.padded_features - matrix.in_features
        self._group_size = matrix.group_size
        self._matrix: QuantizedMatrix | None = None
        self._packed = self._scales_and_zeros = torch.empty(0)
        if device.type == "cpu" and _fits_fused_kernel(matrix):
            matrix = matrix.to(device)
            self._packed = torch._convert_weight_to_int4pack_for_cpu(unpack_codes(matrix.codes).int(), 1)
            scales = matrix.scales.t().bfloat16()
            # (groups, N, 2): scale, and the value of code 8, which is 0
            self._scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()
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
        return self._packed.nbytes + self._scales_and_zeros.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """(T, N) in x's dtype of x (T, K), float32 or bfloat16."""
        if self._matrix is not None:
            return functional.linear(x, dequantize(self._matrix, x.dtype))
        activations = functional.pad(x.bfloat16(), (0, self._padding)).contiguous()
        product = torch._weight_int4pack_mm_for_cpu(
            activations, self._packed, self._group_size, self._scales_and_zeros
        )
        return product.to(x.dtype)


def _fits_fused_kernel(matrix: QuantizedMatrix) -> bool:
    return matrix.group_size in _FUSED_GROUP_SIZES and matrix.out_features % _FUSED_ROWS == 0
