"""Consumer graphics cards by their published specifications, for predictions about machines that are not
here. Measures nothing.

Sources: the vendor's product pages (memory, memory bandwidth, PCIe generation and lanes). Of a PCIe link's
signalling rate (after 128b/130b coding) copies from pinned memory reach about 0.8: 25 GB/s on 4.0 x16. An
H200's 5.0 x16 reached 0.88 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from localmoe.core.errors import ConfigError
from localmoe.hardware.limits import Rates

_LANE_BYTES_PER_S = MappingProxyType({3: 0.985e9, 4: 1.969e9, 5: 3.938e9})  # by PCIe generation, one way
_COPY_SHARE = 0.8
_USABLE_SHARE = 0.95  # of the memory; the rest is the driver's and the display's
_LEAST_RESERVE = 512 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """One card.

    Attributes:
        memory_bytes: of VRAM.
        memory_bytes_per_s: published bandwidth.
        pcie_generation, pcie_lanes: what the card supports, in a slot that does too.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    pcie_generation: int
    pcie_lanes: int

    @property
    def rates(self) -> Rates:
        """Reading the card's memory, and copying to it."""
        link = _LANE_BYTES_PER_S[self.pcie_generation] * self.pcie_lanes * _COPY_SHARE
        return Rates(self.memory_bytes_per_s, link)

    @property
    def budget_bytes(self) -> int:
        """What an engine may use of its memory."""
        return self.memory_bytes - max(_LEAST_RESERVE, int(self.memory_bytes * (1 - _USABLE_SHARE)))

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.memory_bytes >> 30} GiB at {self.memory_bytes_per_s / 1e9:.0f} GB/s, "
            f"PCIe {self.pcie_generation}.0 x{self.pcie_lanes}"
        )


_ALL = (
    Card("rtx-4060", 8 << 30, 272e9, 4, 8),
    Card("rtx-3060", 12 << 30, 360e9, 4, 16),
    Card("rtx-4070-ti", 12 << 30, 504e9, 4, 16),
    Card("rtx-4060-ti-16gb", 16 << 30, 288e9, 4, 8),
    Card("rtx-5060-ti-16gb", 16 << 30, 448e9, 5, 8),
    Card("rtx-4080", 16 << 30, 717e9, 4, 16),
    Card("rtx-5070-ti", 16 << 30, 896e9, 5, 16),
    Card("rtx-3090", 24 << 30, 936e9, 4, 16),
    Card("rtx-4090", 24 << 30, 1008e9, 4, 16),
    Card("rtx-5090", 32 << 30, 1792e9, 5, 16),
)
CARDS: Mapping[str, Card] = MappingProxyType({card.name: card for card in _ALL})


def find_card(name: str) -> Card:
    """The card of that name.

    Raises:
        ConfigError: there is none; names those that there are.
    """
    if name not in CARDS:
        raise ConfigError(f"Card '{name}' is unknown: use one of {', '.join(CARDS)}.")
    return CARDS[name]
