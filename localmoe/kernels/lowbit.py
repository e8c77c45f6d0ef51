"""All experts of one layer in 2, 3, 4 or 8 bits on one device, and their values as the reference.

torch only. Knows no file format, quantises nothing, and launches no kernel; the layout is lowbit_rows'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import DraftError
from localmoe.kernels.codes import BITS, CodeMatrix
from localmoe.kernels.lowbit_rows import PackedRows

GROUP_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class LowBitExperts:
    """All experts of one layer on one device.

    Attributes:
        gate_up: (2I, H) an expert, rows always [gate; up], whatever order the model's own file has; without a
            gate (I, H).
        down: (H, I) an expert, columns in order: an order of their own is one of gate_up's rows.
        gate_up_bias, down_bias: (E, 2I) in the same row order and (E, H), or None.
    """

    gate_up: PackedRows
    down: PackedRows
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __post_init__(self) -> None:
        experts, rows, hidden = self.num_experts, self.gate_up.out_features, self.gate_up.in_features
        assert self.down.scales.shape[:2] == (experts, hidden)
        assert rows in (2 * self.down.in_features, self.down.in_features) and self.down.bits == self.bits
        assert self.down.columns is None
        assert (self.down.codebooks is None) == (self.gate_up.codebooks is None)
        assert self.gate_up_bias is None or self.gate_up_bias.shape == (experts, rows)
        assert self.down_bias is None or self.down_bias.shape == (experts, hidden)

    @classmethod
    def empty(
        cls,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bits: int,
        group_size: int,
        device: torch.device | str,
        *,
        gated: bool = True,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        indexed: bool = False,
        codebook: bool = False,
    ) -> LowBitExperts:
        """Uninitialised codes and scales, to be filled expert by expert with `set_expert`.

        Args:
            indexed: gate_up may have its columns in an order of its own, at the cost of an index that the
                kernels read.
            codebook: codes, of 4 bits, stand for the values of a table, as NF4's do.

        Raises:
            DraftError: the kernels have no code of that many bits, or no groups of that size.
        """
        if bits not in BITS or group_size % GROUP_MULTIPLE or not 32 <= group_size <= 256:
            raise DraftError(
                f"A draft of {bits} bits in groups of {group_size} has no GPU kernel: build one of "
                f"{', '.join(map(str, BITS))} bits in groups of 32, 64, 128 or 256."
            )
        gate_up = (num_experts, (2 if gated else 1) * intermediate_size, hidden_size)
        down = (num_experts, hidden_size, intermediate_size)
        return cls(
            PackedRows.empty(gate_up, bits, group_size, device, indexed=indexed, codebook=codebook),
            PackedRows.empty(down, bits, group_size, device, codebook=codebook),
            None if gate_up_bias is None else gate_up_bias.to(device).contiguous(),
            None if down_bias is None else down_bias.to(device).contiguous(),
        )

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.words.shape[0]

    @property
    def gated(self) -> bool:
        """Whether there is a gate beside up."""
        return self.gate_up.out_features == 2 * self.intermediate_size

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.gate_up.in_features

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.down.in_features

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.gate_up.bits

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.gate_up.group_size

    def tensors(self) -> list[Tensor]:
        """Codes, scales, codebooks and biases."""
        biases = [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]
        return [*self.gate_up.tensors(), *self.down.tensors(), *biases]

    @property
    def num_bytes(self) -> int:
        """Bytes of all that."""
        return sum(part.nbytes for part in self.tensors())

    def takes(self, draft: DraftForm) -> bool:
        """Whether `set_expert` takes matrices of this form: those of its own, and, with codebooks, 4-bit
        integers whose groups are multiples of its own."""
        same = (draft.bits, draft.group_size) == (self.bits, self.group_size)
        if self.gate_up.codebooks is None:
            return same and not draft.codebook
        return same or (draft.bits == 4 and not draft.codebook and draft.group_size % self.group_size == 0)

    def set_expert(self, expert: int, gate_up: CodeMatrix, down: CodeMatrix) -> None:
        """Fill one expert: gate_up (2I, H) with rows [gate; up], down (H, I), on any device; see `takes`.

        Raises:
            ValueError: a matrix's columns are not in the order of the input features.
        """
        self.gate_up.set_expert(expert, gate_up)
        self.down.set_expert(expert, down)

    def dequantize(self, expert: int) -> tuple[Tensor, Tensor]:
        """gate_up (2I, H) and down (H, I) of one expert in float32."""
        return self.gate_up.dequantize(expert), self.down.dequantize(expert)

    def random_(self, generator: torch.Generator | None = None) -> LowBitExperts:
        """Fill with random codes, padding included, and scales that keep a product's size near its input's.

        For measurements of speed. The generator must be of the same device.
        """
        for packed in (self.gate_up, self.down):
            packed.words.view(torch.uint8).random_(0, 256, generator=generator)
            packed.top_bits.view(torch.uint8).random_(0, 256, generator=generator)
            spread = packed.in_features**0.5  # of a sum of K codes
            if packed.codebooks is None:
                spread *= (1 << self.bits) / 12**0.5
            else:
                packed.codebooks.normal_(0, 1, generator=generator)
            packed.scales.normal_(0, 1 / spread, generator=generator)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.normal_(0, 1, generator=generator)
        return self


def pack_experts(
    gate_up: Sequence[CodeMatrix],
    down: Sequence[CodeMatrix],
    device: torch.device | str,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> LowBitExperts:
    """All experts of a layer at once: E of (2I, H) with rows [gate; up], or of (I, H), and E of (H, I).

    Raises:
        DraftError: see LowBitExperts.empty.
        ValueError: see LowBitExperts.set_expert.
    """
    assert len(gate_up) == len(down) > 0
    experts = LowBitExperts.empty(
        len(gate_up), gate_up[0].in_features, down[0].in_features, gate_up[0].bits, gate_up[0].group_size,
        device, gated=gate_up[0].out_features == 2 * down[0].in_features,
        gate_up_bias=gate_up_bias, down_bias=down_bias, codebook=gate_up[0].codebook is not None,
    )  # fmt: skip
    for expert, (up_matrix, down_matrix) in enumerate(zip(gate_up, down, strict=True)):
        experts.set_expert(expert, up_matrix, down_matrix)
    return experts
