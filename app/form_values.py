"""What a form's controls send, as numbers and switches; what is none gets one sentence. Knows no setting."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from localmoe.core.errors import ConfigError

Known = TypeVar("Known", bound=str)


def integral(value: object) -> str:
    """As it is typed: 8 where a control sends 8.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def number(name: str, values: Mapping[str, object], default: float) -> float:
    """The value of this label; raises ConfigError: it is no finite number."""
    value = values.get(name.lower().replace("-", "_").replace(" ", "_"), default)
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} is empty or not a number: the usual value is {default:g}.") from None
    if not math.isfinite(found):
        raise ConfigError(f"{name} {found} is not a usable number: the usual value is {default:g}.")
    return found


def whole(name: str, value: object) -> int:
    """The number, also of a text; raises ConfigError: it is no whole one."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is not a whole number: '{'' if value is None else value}'.")
    return value


def one_of(known: Sequence[Known], text: str, refusal: str) -> Known:
    """The choice of this name; raises ConfigError: there is none, e.g. refusal="Lanes '{}' are not known"."""
    for choice in known:
        if choice == text.strip().lower():
            return choice
    raise ConfigError(f"{refusal.format(text)}: use one of {', '.join(known)}.")


def switch(name: str, text: str) -> bool:
    """Whether it is on; raises ConfigError: it is neither on nor off."""
    switched = text.strip().lower()
    if switched not in ("on", "off"):
        raise ConfigError(f"{name} '{text}' is no switch: use on or off.")
    return switched == "on"
