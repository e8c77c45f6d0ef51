"""Dimensions of layers whose state goes on from token to token, and what one of them keeps on a GPU. Computes
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["delta", "sum"]
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Heads and dimensions of a layer that is convolved and then goes through a matrix a head.

    Attributes:
        key_heads: of queries and keys alike; each serves as many value heads that follow each other.
        value_heads, key_dim, value_dim: of the state, (value_heads, value_dim, key_dim) float32.
        taps: positions that the convolution before it looks at.
        rule: "delta" corrects what a key finds in the state (kernels.delta_rule), "sum" adds to it
            (kernels.state_space).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    rule: Rule = "delta"

    @property
    def group(self) -> int:
        """Value heads a key head."""
        return self.value_heads // self.key_heads

    @property
    def values(self) -> int:
        """Elements of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C, what is convolved: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def norms(self) -> int:
        """Lengths that a log keeps of each row."""
        return 2 * self.key_heads if self.rule == "delta" else 0

    @property
    def state_elements(self) -> int:
        """Of one layer's state."""
        return self.value_heads * self.value_dim * self.key_dim

    def layer_bytes(self, rows: int, element_bytes: int) -> int:
        """What a layer keeps so that any of a window's `rows` tokens can be dropped, for a draft that goes
        ahead, and to begin again before an answer: three states, twice the window's rows, and for the
        convolution the rows before."""
        rates = 2 * rows * (self.norms + 2 * self.value_heads)
        floats = 3 * self.state_elements + rates
        mixed = 2 * rows * self.channels * element_bytes
        return _convolution_bytes(self, rows, element_bytes) + mixed + floats * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class ConvShape:
    """A layer that is but a short convolution (kernels.short_conv): `channels`, each of which looks at `taps`
    positions."""

    channels: int
    taps: int

    def layer_bytes(self, rows: int, element_bytes: int) -> int:
        """As of ScanShape."""
        return _convolution_bytes(self, rows, element_bytes)


RecurrentShape = ScanShape | ConvShape


def _convolution_bytes(shape: RecurrentShape, rows: int, element_bytes: int) -> int:
    """The rows before in both halves of the log, for a draft and to begin again, and the log's own rows."""
    return (4 * (shape.taps - 1) + 2 * rows) * shape.channels * element_bytes
