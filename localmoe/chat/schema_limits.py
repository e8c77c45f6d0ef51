"""What of a JSON schema would take its grammar minutes and gigabytes to make, what that would leave out
without a word, and what says nothing to it. Makes none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from localmoe.core.errors import ConfigError

# multiples are told apart by remainders; decimal digits alone tell those of 2 and 5
_MOST_REMAINDERS = 100_000
_VALUES = frozenset(("const", "default", "enum", "examples"))  # no schemas, but where a reference leads there
_NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
# what texts can be held to; JSON Schema has any other format be a note for people, as "password" is
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_UNSPELT = re.compile("[\0-\7\x0b\x0e-\x1f\x7f]")  # what JSON has no short escape for


def check_texts(schema: Any) -> None:
    """See that texts that are wanted as they are can be written: characters that take a numbered escape are
    left out by grammars, so that the answer would be another text.

    Raises:
        ConfigError: they cannot.
    """
    waiting = [part.get(key) for part in _schemas(schema) for key in ("const", "enum")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value if isinstance(value, list) else value.values()
        elif isinstance(value, str) and (found := _UNSPELT.search(value)):
            raise ConfigError(
                "No answer can be held to this schema: a text of its const or enum holds "
                f"{found[0]!a}, which is not written: leave it out."
            )


def with_known_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy without the formats that nothing is known of, for which grammars refuse all of a schema."""
    copied: dict[str, Any] = json.loads(json.dumps(schema))
    if not _refers_to_values(copied):  # else values would be changed, which may look like schemas
        for part in _schemas(copied):
            if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
                del part["format"]
    return copied


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
    for part in _schemas(schema):
        number = part.get("multipleOf")
        if isinstance(number, int | float) and 0 < number < math.inf:
            yield number


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """All within a schema, and what may be taken for one."""
    into_values, waiting = _refers_to_values(schema), [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for key, value in part.items():
                if key in _NAMED and isinstance(value, dict):
                    waiting += value.values()  # whatever the names
                elif into_values or key not in _VALUES:
                    waiting.append(value)


def _refers_to_values(schema: Any) -> bool:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            if isinstance(to := part.get("$ref"), str) and not _VALUES.isdisjoint(to.split("/")):
                return True
    return False


def _remainders(number: int | float) -> int:
    """Of the least whole number with these digits, without its factors 2 and 5."""
    whole = (number if isinstance(number, int) else Decimal(str(number))).as_integer_ratio()[0]
    for factor in (2, 5):
        while whole % factor == 0:
            whole //= factor
    return whole
