"""Numbers as JSON has them: Python's reader takes NaN and Infinity too. Reads no objects."""

from __future__ import annotations

import math


def finite(text: str) -> float:
    """The number that a text says, for a reader's `parse_float` and `parse_constant`.

    Raises:
        ValueError: it is not finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value
