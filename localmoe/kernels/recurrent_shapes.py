"""Dimensions of layers whose state goes on from token to token, and what one of them keeps on a GPU. Computes
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["delta", "sum"]
_FLOAT_BYTES = 4
_LEAST_DIM, _MOST_DIM = 16, 256  # of a head, which one program holds a row of
_MOST_TAPS = 8
_GRANULE = 16  # channels of a short convolution are a multiple of it: one program has some of them


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Heads and dimensions of a layer that is convolved and then goes through a matrix a head.

    Attributes:
        key_heads: of queries and keys alike; each serves as many value heads that follow each other.
        value_heads, key_dim, value_dim: of the state, (value_heads, value_dim, key_dim) float32.
        taps: positions that the convolution before it looks at.
        rule: "delta" corrects what a key finds in the state (kernels.delta_rule), "sum" adds to it
            (kernels.state_space).
        by_channel: whether each channel of a key decays by itself, else all of a head alike.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    rule: Rule = "delta"
    by_channel: bool = False

    @property
    def fits(self) -> bool:
        """Whether the kernels can run it."""
        heads = self.key_heads > 0 and self.value_heads % self.key_heads == 0
        dims = all(
            _LEAST_DIM <= size <= _MOST_DIM and size & (size - 1) == 0
            for size in (self.key_dim, self.value_dim)
        )
        return heads and dims and 2 <= self.taps <= _MOST_TAPS

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
    def decays(self) -> int:
        """Rates at which the state of a value head decays."""
        return self.key_dim if self.by_channel else 1

    @property
    def rates(self) -> int:
        """That a log keeps of each row: of each value head its decays, and behind all of these how much is
        corrected or added."""
        return self.value_heads * (self.decays + 1)

    @property
    def state_elements(self) -> int:
        """Of one layer's state."""
        return self.value_heads * self.value_dim * self.key_dim

    def row_bytes(self, element_bytes: int) -> int:
        """What a layer needs at once for a row of a prompt, beside the row itself: its projections (to what
        is convolved, to gates, to rates), what is convolved, norms and rates, and what comes out."""
        elements = 2 * self.channels + 2 * self.values + 2 * self.value_heads
        if self.by_channel:  # channels are projected apart and joined, and decays through a narrow product
            elements += self.channels + (self.value_heads + 2) * self.key_dim
        return elements * element_bytes + (self.norms + self.rates) * _FLOAT_BYTES

    def layer_bytes(self, rows: int, element_bytes: int) -> int:
        """What a layer keeps so that any of a window's `rows` tokens can be dropped, for a draft that goes
        ahead, and to begin again before an answer: three states, twice the window's rows, and for the
        convolution the rows before."""
        rates = 2 * rows * (self.norms + self.rates)
        floats = 3 * self.state_elements + rates
        mixed = 2 * rows * self.channels * element_bytes
        return _convolution_bytes(self, rows, element_bytes) + mixed + floats * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class ConvShape:
    """A layer that is but a short convolution (kernels.short_conv): `channels`, each of which looks at `taps`
    positions."""

    channels: int
    taps: int

    @property
    def fits(self) -> bool:
        """Whether the kernel can run it."""
        return self.channels % _GRANULE == 0 and 2 <= self.taps <= _MOST_TAPS

    def row_bytes(self, element_bytes: int) -> int:
        """As of ScanShape: three projections, and what comes out."""
        return 4 * self.channels * element_bytes

    def layer_bytes(self, rows: int, element_bytes: int) -> int:
        """As of ScanShape."""
        return _convolution_bytes(self, rows, element_bytes)


RecurrentShape = ScanShape | ConvShape


def _convolution_bytes(shape: RecurrentShape, rows: int, element_bytes: int) -> int:
    """The rows before in both halves of the log, for a draft and to begin again, and the log's own rows."""
    return (4 * (shape.taps - 1) + 2 * rows) * shape.channels * element_bytes
