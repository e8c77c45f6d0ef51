"""Codes that stand for the values of a table instead of integers: NF4's table, and integers put as a table.
Quantises nothing and knows no file format."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from localmoe.kernels.codes import CodeMatrix

# 4-bit NormalFloat: quantiles of a normal distribution scaled to [-1, 1], one of them 0 (Dettmers et al.
# 2023, "QLoRA", appendix E)
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def nf4_codebook() -> Tensor:
    """float32 (16,)."""
    return torch.tensor(NF4_VALUES, dtype=torch.float32)


def cut_groups(matrix: CodeMatrix, group_size: int) -> CodeMatrix:
    """The same weights in groups of `group_size`: the matrix's own are multiples of it, or one whole row."""
    columns, half = matrix.in_features, 1 << matrix.bits - 1
    groups = -(-columns // group_size)
    per_stored = -(-matrix.group_size // group_size)
    scales = matrix.scales.repeat_interleave(per_stored, dim=1)[:, :groups].contiguous()
    codes = functional.pad(matrix.codes[:, :columns], (0, groups * group_size - columns), value=half)
    return replace(matrix, codes=codes, scales=scales, group_size=group_size)


def with_codebook(matrix: CodeMatrix, group_size: int) -> CodeMatrix:
    """The same weights, exactly, as codes of a table in groups of `group_size`, which divides the matrix's
    own: 4-bit integers become the table of -8 .. 7. One that has a table already is returned as it is."""
    if matrix.codebook is not None:
        return matrix
    assert matrix.bits == 4 and matrix.group_size % group_size == 0
    matrix = cut_groups(matrix, group_size)
    integers = torch.arange(-8.0, 8.0, device=matrix.codes.device)
    return replace(matrix, scales=matrix.scales.float(), codebook=integers)


def as_bytes(codebook: Tensor) -> tuple[Tensor, float]:
    """uint8 (16,) codes of 8 bits and the scale at which they come nearest to a table of 16 values: value =
    scale * (code - 128), within half a scale, 1/254 of the table's largest."""
    scale = float(codebook.abs().max()) / 127 or 1.0
    return (codebook / scale).round().add(128).to(torch.uint8), scale
