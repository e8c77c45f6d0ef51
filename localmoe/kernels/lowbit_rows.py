"""Rows of low-bit codes, stacked over experts, laid out for the GPU kernels: packing and unpacking.

torch only. Knows no file format, quantises nothing, and launches no kernel.

Layout. A row of K weights is padded to whole groups of G columns. int32 words hold C codes each (8, 16, 4
for 4, 2, 8 bits), code j in the j-th lowest bits. Word w of a group's G / C words holds the columns
w, w + G/C, w + 2G/C, ... of that group: a thread that reads four words in a row then needs four activations
in a row for each j, and all codes of a word share a scale. 3 bits are the 2 low bits so packed, and the
top bits of a word's 16 codes in an int16 of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.kernels.codebook import with_codebook
from localmoe.kernels.codes import CodeMatrix

_CHUNK_CODES = 1 << 22  # codes that are packed at once: at most about 12 MiB of temporaries


def codes_per_word(bits: int) -> int:
    """Codes in one int32 word; with 3 bits, the codes whose low bits it holds."""
    return {2: 16, 3: 16, 4: 8, 8: 4}[bits]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """One matrix (N, K) of each of E experts.

    Attributes:
        words: int32 (E, N, K_padded / codes_per_word).
        top_bits: int16 of the same shape with 3 bits, else empty.
        scales: float16 (E, N, K_padded / group_size); float32 with codebooks.
        in_features: K.
        columns: int32 (E, K): stored column j of expert e multiplies input feature columns[e, j]; None where
            all are in order.
        codebooks: float32 (E, 16), the values of an expert's 4-bit codes; None where codes are integers.
    """

    words: Tensor
    top_bits: Tensor
    scales: Tensor
    in_features: int
    group_size: int
    bits: int
    columns: Tensor | None = None
    codebooks: Tensor | None = None

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int],
        bits: int,
        group_size: int,
        device: torch.device | str,
        *,
        indexed: bool = False,
        codebook: bool = False,
    ) -> PackedRows:
        """Uninitialised, for shape (E, N, K). indexed: experts may have columns in an order of their own.
        codebook: codes of 4 bits stand for the values of a table."""
        assert bits == 4 or not codebook
        experts, rows, columns = shape
        groups = -(-columns // group_size)
        words = (experts, rows, groups * (group_size // codes_per_word(bits)))
        return cls(
            torch.empty(words, dtype=torch.int32, device=device),
            torch.empty(words if bits == 3 else 0, dtype=torch.int16, device=device),
            torch.empty(
                (experts, rows, groups), dtype=torch.float32 if codebook else torch.float16, device=device
            ),
            columns,
            group_size,
            bits,
            torch.empty((experts, columns), dtype=torch.int32, device=device) if indexed else None,
            torch.empty((experts, 16), dtype=torch.float32, device=device) if codebook else None,
        )

    @property
    def out_features(self) -> int:
        """N."""
        return self.words.shape[1]

    def tensors(self) -> list[Tensor]:
        """Codes, scales, columns and codebooks, as far as there are any."""
        parts = (self.words, self.top_bits, self.scales, self.columns, self.codebooks)
        return [part for part in parts if part is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all that."""
        return sum(part.nbytes for part in self.tensors())

    def set_expert(self, expert: int, matrix: CodeMatrix) -> None:
        """Pack one expert's matrix, which may be on any device, a few rows at a time. Rows with codebooks
        also take a matrix of 4-bit integers whose groups are multiples of their own.

        Raises:
            ValueError: its columns are not in the order of the input features, and there is no room for
            theirs.
        """
        if self.codebooks is not None:
            matrix = with_codebook(matrix, self.group_size)
        assert (matrix.codebook is None) == (self.codebooks is None), "matrix of another kind"
        found = (matrix.bits, matrix.group_size, matrix.in_features)
        assert found == (self.bits, self.group_size, self.in_features), "matrix of another format"
        assert matrix.scales.shape == self.scales.shape[1:], "matrix of another shape"
        device = self.words.device
        if self.columns is not None:
            in_order = torch.arange(self.in_features, device=device)
            self.columns[expert].copy_(in_order if matrix.columns is None else matrix.columns)
        elif matrix.columns is not None:
            raise ValueError(
                "the matrix has its columns in the order of activations, and these rows keep no order"
            )
        self.scales[expert].copy_(matrix.scales)
        if self.codebooks is not None and matrix.codebook is not None:
            self.codebooks[expert].copy_(matrix.codebook)
        step = max(1, _CHUNK_CODES // (self.scales.shape[2] * self.group_size))
        for start in range(0, self.out_features, step):
            rows = slice(start, start + step)
            self._pack(matrix.codes[rows].to(device), expert, rows)

    def _pack(self, codes: Tensor, expert: int, rows: slice) -> None:
        # (rows, groups, C, G / C): [..., j, w] is code j of word w
        codes = codes.view(codes.shape[0], self.scales.shape[2], codes_per_word(self.bits), -1)
        if self.bits == 3:
            self.top_bits[expert, rows].copy_(_joined(codes >> 2, 1).view(torch.int16).flatten(1))
            codes = codes & 3
        width = 2 if self.bits == 3 else self.bits
        self.words[expert, rows].copy_(_joined(codes, width).view(torch.int32).flatten(1))

    def of(self, experts: Tensor) -> PackedRows:
        """A copy of these experts' rows, int64 (n,) on the same device; nothing waits for the device."""
        return PackedRows(
            self.words.index_select(0, experts),
            self.top_bits.index_select(0, experts) if self.bits == 3 else self.top_bits,
            self.scales.index_select(0, experts),
            self.in_features,
            self.group_size,
            self.bits,
            None if self.columns is None else self.columns.index_select(0, experts),
            None if self.codebooks is None else self.codebooks.index_select(0, experts),
        )

    def codes(self, expert: int) -> Tensor:
        """uint8 (N, K_padded), one code an element, in column order."""
        per_word = codes_per_word(self.bits)
        width = 2 if self.bits == 3 else self.bits
        shifts = torch.arange(per_word, device=self.words.device)[:, None]
        groups = self.scales.shape[2]
        words = self.words[expert].view(self.out_features, groups, 1, -1)
        codes = words >> width * shifts & (1 << width) - 1  # (N, groups, C, G / C)
        if self.bits == 3:
            top = self.top_bits[expert].int().view(self.out_features, groups, 1, -1)
            codes |= (top >> shifts & 1) << width
        return codes.to(torch.uint8).view(self.out_features, -1)

    def dequantize(self, expert: int) -> Tensor:
        """W (N, K) in float32, input features in their true order."""
        if self.codebooks is None:
            values = self.codes(expert).float() - (1 << self.bits - 1)
        else:
            values = self.codebooks[expert][self.codes(expert).int()]
        values = values.view(self.out_features, -1, self.group_size) * self.scales[expert].float()[..., None]
        values = values.view(self.out_features, -1)[:, : self.in_features]
        if self.columns is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.columns[expert].long(), values)


def _joined(codes: Tensor, width: int) -> Tensor:
    """The bytes of little-endian words, uint8 (rows, groups, words, bytes of a word), of codes (rows, groups,
    C, words) of `width` bits, a word's first in its lowest. Few operations on whole tensors: on a GPU it is
    issuing them that takes the time."""
    units = codes.unflatten(2, (-1, 8 // width))  # (rows, groups, bytes of a word, codes of a byte, words)
    joined: Tensor = units[:, :, :, 0]
    for i in range(1, 8 // width):
        joined = joined | units[:, :, :, i] << width * i
    return joined.transpose(2, 3).contiguous()
