"""What earlier runs measured of a draft's worth, so that the first answer after a start need not find it out.
Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from localmoe.core.remembered import Remembered

FILE = Remembered(
    "draft-worth.json", "localmoe draft worth 1", "tokens_per_s", "what the draft is worth"
)  # fmt: skip
_MOST = 1e18  # an integer may be larger than any float


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second with the draft in VRAM, and with experts in its memory."""

    drafted_per_s: float
    plain_per_s: float


def recall(situation: str) -> Rates | None:
    """What was measured last in this situation."""
    pair = FILE.read().get(situation)
    return Rates(*pair) if isinstance(pair, list) and _makes_sense(pair) else None


def remember(situation: str, rates: Rates) -> None:
    """Keep it."""
    FILE.keep(situation, [rates.drafted_per_s, rates.plain_per_s])


def _makes_sense(pair: list[object]) -> bool:
    return len(pair) == 2 and all(
        isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < _MOST for rate in pair
    )
