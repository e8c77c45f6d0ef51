"""A matrix in low-bit codes with a scale a group: the type, round to nearest, and back. Knows no file format,
packs nothing, and does not decide which weights are quantised.

A weight is `scale * (code - 2^(bits - 1))` with codes 0..2^bits - 1. A scale may be negative: the codes
reach -2^(bits - 1) on one side and one less on the other, and the sign puts a group's largest weight on the
side that reaches further. With a codebook a weight is `scale * codebook[code]` instead (kernels.codebook).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

BITS = (2, 3, 4, 8)
DEFAULT_GROUP_SIZE = 128
# Candidate ratios largest weight / scale of the search, by bits. Below 2^(bits - 1) - 1 the outer codes go
# unused; above 2^(bits - 1) the largest weights are clipped, which pays as long as the many small ones gain.
SCALE_RATIOS = {
    2: (1.0, 1.5, 1.8, 2.1, 2.5, 2.9, 3.4, 4.2),
    3: (3.0, 3.4, 3.8, 4.2, 4.7, 5.3, 6.0, 7.0),
    4: (7.0, 7.5, 8.1, 8.7, 9.4, 10.3, 11.4, 12.8),
    8: (112.0, 116.0, 119.5, 122.5, 124.5, 126.0, 127.0, 128.2),
}
_CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32: a chunk's temporaries stay in a processor's cache
_DEVICE_CHUNK_ELEMENTS = 1 << 22  # 16 MiB of float32: few kernels, each long enough to fill a GPU
_TINY = 1e-30  # far below any scale that float16 can store; 1 / _TINY is still finite


@dataclass(frozen=True, slots=True)
class CodeMatrix:
    """One matrix W of N output and K input features: W = scale * (code - 2^(bits - 1)), or, with a codebook,
    W = scale * codebook[code].

    K is padded to whole groups by columns of value 0.

    Attributes:
        codes: uint8 (N, K_padded), one code an element.
        scales: float16 (N, K_padded / group_size); float32 with a codebook.
        in_features: K without padding.
        group_size: stored columns that share a scale.
        bits: one of BITS.
        columns: int64 (K,): stored column j multiplies input feature columns[j] (files whose groups follow
            the order of activations); None where they are in order.
        codebook: float32 (16,), the values of 4-bit codes at scale 1; None where codes are integers.
    """

    codes: Tensor
    scales: Tensor
    in_features: int
    group_size: int
    bits: int
    columns: Tensor | None = None
    codebook: Tensor | None = None

    def __post_init__(self) -> None:
        groups = -(-self.in_features // self.group_size)
        assert self.bits in BITS
        assert self.codes.dtype == torch.uint8
        assert self.scales.dtype == (torch.float16 if self.codebook is None else torch.float32)
        assert self.codes.shape == (self.scales.shape[0], groups * self.group_size)
        assert self.scales.shape[1] == groups
        assert self.columns is None or self.columns.dtype == torch.int64
        assert self.columns is None or self.columns.shape == (self.in_features,)
        if self.codebook is not None:
            assert self.bits == 4 and self.codebook.shape == (16,) and self.codebook.dtype == torch.float32

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def padded_features(self) -> int:
        """K rounded up to whole groups."""
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds in memory: a whole one for each code."""
        order = 0 if self.columns is None else self.columns.nbytes
        values = 0 if self.codebook is None else self.codebook.nbytes
        return self.codes.nbytes + self.scales.nbytes + order + values

    def to(self, device: torch.device | str) -> CodeMatrix:
        """The same matrix on another device."""
        columns = None if self.columns is None else self.columns.to(device)
        codebook = None if self.codebook is None else self.codebook.to(device)
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            columns=columns,
            codebook=codebook,
        )


def check_group_size(group_size: int) -> None:
    """A group is a positive, even number of columns.

    Raises:
        ValueError: otherwise.
    """
    if group_size < 2 or group_size % 2:
        raise ValueError(f"group size {group_size} is not a positive even number")


def check_bits(bits: int) -> None:
    """A code has one of the widths in BITS.

    Raises:
        ValueError: otherwise.
    """
    if bits not in BITS:
        raise ValueError(f"{bits} bits are none of {', '.join(map(str, BITS))}")


def quantize_rtn(weight: Tensor, bits: int = 4, group_size: int = DEFAULT_GROUP_SIZE) -> CodeMatrix:
    """Round to nearest with the scales of `search_scales`. A group depends on its own weights alone.

    Args:
        weight: (N, K), any float dtype.

    Raises:
        ValueError: a weight is NaN or infinite or too large for a float16 scale, the group size is odd, or
            there are no codes of that many bits.
    """
    check_group_size(group_size)
    check_bits(bits)
    assert weight.dim() == 2 and weight.is_floating_point()
    rows, in_features = weight.shape
    padded = functional.pad(weight.detach(), (0, -in_features % group_size))
    groups = padded.reshape(-1, group_size)
    codes = torch.empty(groups.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(groups.shape[0], dtype=torch.float16, device=weight.device)
    for part in _chunks(groups):
        chunk = groups[part].float()
        scales[part] = _search_chunk(chunk, bits, None)
        codes[part] = round_to_codes(chunk, scales[part, None], bits)
    return CodeMatrix(codes.view(rows, -1), scales.view(rows, -1), in_features, group_size, bits)


def search_scales(groups: Tensor, bits: int, weights: Tensor | None = None) -> Tensor:
    """float16 (groups,): the scale of least squared error of each group of (groups, group_size) weights.

    For each ratio of a small grid the group is rounded with scale = largest weight / ratio, and the best
    scale for those codes follows in closed form; the ratio with the least error wins. A group whose scale
    would vanish in float16 (largest weight below about 2e-7) gets scale 1, and its weights round to zeros.

    Args:
        weights: importance of each weight's squared error, broadcastable to `groups`, not negative; a group
            whose importances are all 0 counts each weight alike. None: all alike.

    Raises:
        ValueError: a weight is NaN or infinite or too large for a float16 scale.
    """
    check_bits(bits)
    importance = None if weights is None else weights.expand(groups.shape)
    found = torch.empty(groups.shape[0], dtype=torch.float16, device=groups.device)
    for part in _chunks(groups):
        found[part] = _search_chunk(
            groups[part].float(), bits, None if importance is None else importance[part]
        )
    return found


def _chunks(groups: Tensor) -> Iterator[slice]:
    """Slices of rows whose temporaries suit the device."""
    elements = _CHUNK_ELEMENTS if groups.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    step = max(1, elements // groups.shape[1])
    for start in range(0, groups.shape[0], step):
        yield slice(start, start + step)


def _search_chunk(groups: Tensor, bits: int, weights: Tensor | None) -> Tensor:
    """`search_scales` of float32 groups at once."""
    low, high = torch.aminmax(groups, dim=-1)
    largest = torch.where(high > -low, high, low)  # with its sign
    if not bool((torch.isfinite(largest) & torch.isfinite(low)).all()):
        kind = "NaN" if bool(torch.isnan(groups).any()) else "infinite"
        raise ValueError(f"the matrix has a weight that is {kind}")
    unit = groups * torch.where(largest.abs() < _TINY, 0, -1 / largest)[:, None]  # the largest is now -1
    importance = None if weights is None else _of_mean_one(weights.float())
    target = unit if importance is None else unit * importance
    half = 1 << bits - 1
    rounded = torch.empty_like(unit)
    best_gain = torch.full_like(largest, -1)
    best_scale = torch.zeros_like(largest)
    for ratio in SCALE_RATIOS[bits]:
        torch.mul(unit, ratio, out=rounded).round_().clamp_(-half, half - 1)
        # squared error of s * rounded = |unit|^2 - gain, at its least where s = <rounded, unit> / |rounded|^2
        product = torch.linalg.vecdot(rounded, target)
        other = rounded if importance is None else rounded * importance
        scale = product / torch.linalg.vecdot(rounded, other).clamp_min_(_TINY)
        gain = product * scale
        best_scale = torch.where(gain > best_gain, scale, best_scale)
        best_gain = torch.maximum(gain, best_gain)
    return stored_scales(best_scale * -largest, lambda: float(largest.abs().max()))


def stored_scales(scales: Tensor, largest: Callable[[], float]) -> Tensor:
    """Scales as float16, 1 where one vanishes. largest: of all weights.

    Raises:
        ValueError: one is too large.
    """
    stored = scales.half()
    if not bool(torch.isfinite(stored).all()):
        raise ValueError(f"the matrix has a weight of {largest():.3g}, too large for a float16 scale")
    return torch.where(stored == 0, torch.ones_like(stored), stored)


def _of_mean_one(weights: Tensor) -> Tensor:
    """Each row divided by its mean; ones where that is 0."""
    mean = weights.mean(-1, keepdim=True)
    return torch.where(mean > 0, weights / mean.clamp_min(_TINY), torch.ones_like(weights))


def round_to_codes(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """uint8 codes of float32 weights, nearest with float16 scales that broadcast to them."""
    half = 1 << bits - 1
    return (weight * (1 / scales.float())).round_().clamp_(-half, half - 1).add_(half).to(torch.uint8)


def dequantize(matrix: CodeMatrix, dtype: torch.dtype) -> Tensor:
    """W (N, K), input features in their true order, computed in float32 and rounded once to `dtype`."""
    if matrix.codebook is None:
        values = matrix.codes.float().sub_(1 << matrix.bits - 1)
    else:
        values = matrix.codebook[matrix.codes.int()]
    grouped = values.view(matrix.out_features, -1, matrix.group_size)
    grouped.mul_(matrix.scales.float().unsqueeze(-1))
    values = values[:, : matrix.in_features].to(dtype)
    if matrix.columns is None:
        return values
    return torch.empty_like(values).index_copy_(1, matrix.columns, values)
