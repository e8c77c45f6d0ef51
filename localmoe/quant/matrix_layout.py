"""What a file format of quantised matrices must be able to do. Is no format itself: see gptq_layout and
nf4_layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from localmoe.kernels.codes import CodeMatrix

Part = tuple[torch.dtype, tuple[int, ...]]  # of one tensor of a matrix; a side of -1 may have any length


class MatrixLayout(Protocol):
    """How the matrices of a draft lie in its files."""

    @property
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def group_size(self) -> int:
        """Columns that share a scale in the matrices that are read."""

    @property
    def stored_group_size(self) -> int:
        """The same in the files; -1: all of a row."""

    @property
    def act_order(self) -> bool:
        """Whether columns may be in an order of their own."""

    @property
    def codebook(self) -> bool:
        """Whether codes stand for the values of a table."""

    @property
    def code_part(self) -> str:
        """The tensor that holds a matrix's codes, by its name after the module's."""

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint of routed experts only."""

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """The tensors of an (N, K) matrix, by their names after the module's."""

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of those tensors; raises ValueError where such a matrix does not fit the format."""

    def pack(self, matrix: CodeMatrix) -> dict[str, Tensor]:
        """The tensors of a matrix; raises ValueError where it does not fit the format."""

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> CodeMatrix:
        """The matrix of shape (N, K) of tensors whose dtypes and shapes are right; raises ValueError where
        they hold something else."""
