"""How the makers of a model recommend to choose tokens, as its generation_config.json says. Chooses none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from localmoe.core.config import LEAST_TEMPERATURE, SamplingConfig
from localmoe.core.errors import ConfigError
from localmoe.engine.generation_config import read_generation_config
from localmoe.engine.log_lines import log_unusable_sampling

_HOW_TO_DRAW = ("temperature", "top_p", "top_k", "min_p")
_PENALTY = "repetition_penalty"


def read_own_sampling(folder: Path) -> SamplingConfig | None:
    """What the makers recommend, without a seed; None: nothing.

    Who gives a temperature or the like means it, also without the do_sample that transformers asks for;
    do_sample by itself is a temperature of 1, and an explicit false is greedy. What is not given is off: the
    top-k of 50 that transformers then takes is no recommendation of the makers. A penalty alone does not say
    how to choose. What cannot be used is left out, and the log says so.

    Raises:
        CheckpointError: the file cannot be read, or is no JSON object.
    """
    values = read_generation_config(folder)
    usable = {name: _usable(values, name) for name in (*_HOW_TO_DRAW, _PENALTY)}
    found = {name: value for name, value in usable.items() if value is not None}
    draws = values.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        log_unusable_sampling("do_sample")
        draws = None
    if draws is False:
        return SamplingConfig(repetition_penalty=found.get(_PENALTY, 1.0))
    if draws or any(name in found for name in _HOW_TO_DRAW):
        return replace(SamplingConfig(temperature=1.0), **found)
    return None


def _usable(values: Mapping[str, Any], name: str) -> Any:
    """The number, in SamplingConfig's range; None if there is none, or none that can be used."""
    value = values.get(name)
    if value is None or (name == "top_k" and value in (-1, 0)):  # off, in vLLM's words and in transformers'
        return None
    try:
        return _number(name, value)
    except (TypeError, ConfigError):
        log_unusable_sampling(name)
        return None


def _number(name: str, value: object) -> float | int:
    """
    Raises:
        TypeError: it is no number. ConfigError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(name)
    if name == "temperature" and 0 < value < LEAST_TEMPERATURE:
        value = 0.0  # who asks for a millionth means greedy
    if name == "top_k" and isinstance(value, float) and value.is_integer():
        value = int(value)
    checked: dict[str, Any] = {name: value}
    SamplingConfig(**checked)
    return value if name == "top_k" else float(value)
