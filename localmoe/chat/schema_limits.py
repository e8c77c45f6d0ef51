"""What of a JSON schema would take its grammar minutes and gigabytes to make. Makes none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from localmoe.core.errors import ConfigError

# multiples are told apart by remainders; decimal digits alone tell those of 2 and 5
_MOST_REMAINDERS = 100_000
_VALUES = frozenset(("const", "default", "enum", "examples"))  # no schemas


def check_multiples(schema: Any) -> None:
    """See that numbers can be held to what they are to be multiples of.

    Raises:
        ConfigError: they cannot.
    """
    remainders = 1
    for value in _multiples(schema):
        remainders = math.lcm(remainders, _remainders(value))
        if remainders > _MOST_REMAINDERS:
            raise ConfigError(
                f"No answer can be held to this schema: multipleOf {str(value)[:30]} takes more than the "
                f"{_MOST_REMAINDERS} remainders that can be told apart: use a rounder number."
            )


def _multiples(schema: Any) -> Iterator[int | float]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += [value for key, value in part.items() if key not in _VALUES]
            number = part.get("multipleOf")
            if isinstance(number, int | float) and 0 < number < math.inf:
                yield number


def _remainders(number: int | float) -> int:
    """Of the least whole number with these digits, without its factors 2 and 5."""
    whole = (number if isinstance(number, int) else Decimal(str(number))).as_integer_ratio()[0]
    for factor in (2, 5):
        while whole % factor == 0:
            whole //= factor
    return whole
