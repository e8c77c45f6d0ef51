"""The GPTQ tensors of one 4-bit matrix: packs and unpacks them. Reads and writes no file and chooses no
codes.

`qweight` int32 (K/8, N): nibble j of word r is input row 8r+j. `qzeros` int32 (groups, N/8): nibble j of
word c is output column 8c+j; format v1 stores the zero point minus 1, v2 the zero point itself. `scales`
float16 (groups, N). `g_idx` int32 (K): group of each input row. w = scale * (code - zero point).

K is the true number of input features, also where it is no multiple of the group size g (2880 and 128, for
example): the last group is then shorter, there are ceil(K/g) groups, and g_idx is k // g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from localmoe.kernels.int4 import ZERO_BYTE, ZERO_POINT, QuantizedMatrix, check_group_size

GptqVersion = Literal[1, 2]
CODES_PER_WORD = 8
# eight nibbles of zero point 8: stored as 7 (v1) or 8 (v2), as signed 32-bit words
_ZERO_WORDS: dict[GptqVersion, int] = {1: 0x77777777, 2: 0x88888888 - (1 << 32)}


@dataclass(frozen=True, slots=True)
class GptqTensors:
    """One matrix as it lies in a file."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Tensors by their names in a checkpoint."""
        return {f"{prefix}.{name}": getattr(self, name) for name in GPTQ_DTYPES}


GPTQ_DTYPES = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32}


def check_packable(out_features: int, in_features: int) -> None:
    """Eight codes share a word, so both sides must be multiples of 8.

    Raises:
        ValueError: one is not.
    """
    if out_features % CODES_PER_WORD or in_features % CODES_PER_WORD:
        raise ValueError(
            f"a {out_features} x {in_features} matrix does not fit the GPTQ format, whose sides are "
            f"multiples of {CODES_PER_WORD}"
        )


def gptq_shapes(out_features: int, in_features: int, group_size: int) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of an (N, K) matrix."""
    groups = -(-in_features // group_size)
    return {
        "qweight": (in_features // CODES_PER_WORD, out_features),
        "qzeros": (groups, out_features // CODES_PER_WORD),
        "scales": (groups, out_features),
        "g_idx": (in_features,),
    }


def gptq_num_bytes(out_features: int, in_features: int, group_size: int) -> int:
    """Bytes of the tensors of an (N, K) matrix, without file headers."""
    total = 0
    for name, shape in gptq_shapes(out_features, in_features, group_size).items():
        total += torch.Size(shape).numel() * GPTQ_DTYPES[name].itemsize
    return total


def pack_matrix(matrix: QuantizedMatrix, version: GptqVersion = 1) -> GptqTensors:
    """The file's tensors of a matrix, in storage of their own.

    Raises:
        ValueError: a side is no multiple of 8.
    """
    check_packable(matrix.out_features, matrix.in_features)
    shapes = gptq_shapes(matrix.out_features, matrix.in_features, matrix.group_size)
    # four bytes of codes, low nibble first, are one little-endian word of eight input rows
    words = matrix.codes[:, : matrix.in_features // 2].clone(memory_format=torch.contiguous_format)
    return GptqTensors(
        qweight=_transposed(words.view(torch.int32)),
        qzeros=torch.full(shapes["qzeros"], _ZERO_WORDS[version], dtype=torch.int32),
        scales=_transposed(matrix.scales),
        g_idx=torch.arange(matrix.in_features, dtype=torch.int32) // matrix.group_size,
    )


def unpack_matrix(tensors: GptqTensors, group_size: int, version: GptqVersion = 1) -> QuantizedMatrix:
    """The matrix of a file's tensors, in storage of its own; shapes are the caller's to check.

    Raises:
        ValueError: the zero point is not 8, rows are not grouped in order, a scale is not finite, or a
            side does not fit the format.
    """
    check_group_size(group_size)
    out_features, in_features = tensors.qweight.shape[1], tensors.g_idx.shape[0]
    check_packable(out_features, in_features)
    if bool((tensors.qzeros != _ZERO_WORDS[version]).any()):
        raise ValueError(f"it is not symmetric (a zero point is not {ZERO_POINT})")
    if not torch.equal(tensors.g_idx.int(), torch.arange(in_features, dtype=torch.int32) // group_size):
        raise ValueError("its rows are not grouped in order (g_idx)")
    if not bool(torch.isfinite(tensors.scales).all()):
        raise ValueError("a scale is not finite")
    codes = _transposed(tensors.qweight).view(torch.uint8)
    padding = -in_features % group_size // 2
    if padding:
        codes = functional.pad(codes, (0, padding), value=ZERO_BYTE)
    return QuantizedMatrix(codes, _transposed(tensors.scales), in_features, group_size)


def _transposed(tensor: Tensor) -> Tensor:
    """A row-major copy, also where one side is 1 and a view would do."""
    return tensor.t().clone(memory_format=torch.contiguous_format)
