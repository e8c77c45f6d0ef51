"""The GPTQ tensors of one matrix in 2, 3, 4 or 8 bits: packs and unpacks them. Reads and writes no file and
chooses no codes.

`qweight` int32 (K b / 32, N): each output column is a stream of its codes, input row after input row.
`qzeros` int32 (groups, N b / 32): each group is such a stream of zero points, output column after output
column; format v1 stores the zero point minus 1, v2 the zero point itself. `scales` float16 (groups, N).
`g_idx` int32 (K): group of each input row. w = scale * (code - zero point).

K is the true number of input features, also where it is no multiple of the group size g (2880 and 128, for
example): the last group is then shorter and there are ceil(K/g) groups. g_idx is k // g, or, in files that
were quantised in the order of activations, any order in which every group has as many rows as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from localmoe.kernels.codes import CodeMatrix, check_bits, check_group_size
from localmoe.quant.words import codes_multiple, pack_codes, unpack_codes

GptqVersion = Literal[1, 2]
GPTQ_DTYPES = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32}


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


def check_packable(out_features: int, in_features: int, bits: int = 4) -> None:
    """Codes fill whole words, so both sides must be multiples of 16, 32, 8 or 4 for 2, 3, 4 or 8 bits.

    Raises:
        ValueError: one is not.
    """
    multiple = codes_multiple(bits)
    if out_features % multiple or in_features % multiple:
        raise ValueError(
            f"a {out_features} x {in_features} matrix does not fit the GPTQ format, whose sides are "
            f"multiples of {multiple} with {bits} bits"
        )


def gptq_shapes(
    out_features: int, in_features: int, group_size: int, bits: int = 4
) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of an (N, K) matrix."""
    groups = -(-in_features // group_size)
    return {
        "qweight": (in_features * bits // 32, out_features),
        "qzeros": (groups, out_features * bits // 32),
        "scales": (groups, out_features),
        "g_idx": (in_features,),
    }


def gptq_num_bytes(out_features: int, in_features: int, group_size: int, bits: int = 4) -> int:
    """Bytes of the tensors of an (N, K) matrix, without file headers."""
    total = 0
    for name, shape in gptq_shapes(out_features, in_features, group_size, bits).items():
        total += torch.Size(shape).numel() * GPTQ_DTYPES[name].itemsize
    return total


def pack_matrix(matrix: CodeMatrix, version: GptqVersion = 1) -> GptqTensors:
    """The file's tensors of a matrix, in storage of their own, rows of input features in their true order.

    Raises:
        ValueError: a side does not fill whole words.
    """
    rows, columns, bits = matrix.out_features, matrix.in_features, matrix.bits
    check_packable(rows, columns, bits)
    codes = matrix.codes[:, :columns]
    g_idx = torch.arange(columns, dtype=torch.int32, device=codes.device) // matrix.group_size
    if matrix.columns is not None:  # stored column j is input row columns[j]
        codes = torch.empty_like(codes).index_copy_(1, matrix.columns, codes)
        g_idx = torch.empty_like(g_idx).index_copy_(0, matrix.columns, g_idx)
    zero = (1 << bits - 1) - (2 - version)
    zeros = torch.full((matrix.scales.shape[1], rows), zero, dtype=torch.uint8, device=codes.device)
    return GptqTensors(
        qweight=_transposed(pack_codes(codes, bits)),
        qzeros=pack_codes(zeros, bits),
        scales=_transposed(matrix.scales),
        g_idx=g_idx,
    )


def unpack_matrix(
    tensors: GptqTensors, group_size: int, version: GptqVersion = 1, bits: int = 4
) -> CodeMatrix:
    """The matrix of a file's tensors, in storage of its own; shapes are the caller's to check.

    A g_idx out of order gives a matrix with `columns`: its stored columns are the input rows sorted by group,
    those of a group in their order.

    Raises:
        ValueError: a zero point is not 2^(bits - 1), a group has another number of rows than it should, a
            scale is not finite, or a side does not fit the format.
    """
    check_group_size(group_size)
    check_bits(bits)
    rows, in_features = tensors.qweight.shape[1], tensors.g_idx.shape[0]
    check_packable(rows, in_features, bits)
    _check_zeros(unpack_codes(tensors.qzeros.contiguous(), bits), bits, version)
    if not bool(torch.isfinite(tensors.scales).all()):
        raise ValueError("a scale is not finite")
    columns = _stored_order(tensors.g_idx, group_size)
    codes = unpack_codes(_transposed(tensors.qweight), bits)
    if columns is not None:
        codes = codes[:, columns]
    codes = functional.pad(codes, (0, -in_features % group_size), value=1 << bits - 1)
    return CodeMatrix(codes, _transposed(tensors.scales), in_features, group_size, bits, columns)


def _check_zeros(zeros: Tensor, bits: int, version: GptqVersion) -> None:
    """Hold the stored zero points against the middle of the codes.

    Raises:
        ValueError: with the first that differs.
    """
    expected = (1 << bits - 1) - (2 - version)
    wrong = zeros[zeros != expected]
    if wrong.numel():
        found = (int(wrong[0]) + 2 - version) % (1 << bits)
        raise ValueError(f"it is not symmetric (a zero point is {found} and should be {1 << bits - 1})")


def _stored_order(g_idx: Tensor, group_size: int) -> Tensor | None:
    """int64 (K,): input rows sorted by group; None if they are already.

    Raises:
        ValueError: a group has not exactly group_size rows (the last: what is left).
    """
    expected = torch.arange(g_idx.shape[0], dtype=torch.int64, device=g_idx.device) // group_size
    if torch.equal(g_idx.long(), expected):
        return None
    order = torch.argsort(g_idx, stable=True)
    ordered = g_idx[order].long()
    wrong = (ordered != expected).nonzero()
    if wrong.numel():
        group = int(torch.minimum(ordered, expected)[wrong[0, 0]])
        count, wanted = int((g_idx == group).sum()), int((expected == group).sum())
        raise ValueError(f"its group {group} (g_idx) has {count} rows and should have {wanted}")
    return order


def _transposed(tensor: Tensor) -> Tensor:
    """A row-major copy, also where one side is 1 and a view would do."""
    return tensor.t().clone(memory_format=torch.contiguous_format)
