"""Sees that the values in a results file are such as tables reckon with: people edit such files, and disks
damage them. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from typing import Any

from localmoe.tables.cells import Subject

_MOST = 1e18  # no figure is as large, and an integer may be larger than any float
_TEXTS = frozenset({"policy", "tokens_sha256", "refused", "shape"})  # among figures
_SHARING = (  # table 2's
    "shared_experts", "other", "kv", "workspace", "target_experts", "draft_experts", "draft_all_experts",
)  # fmt: skip
_MEMORY = ("shared", "kv", "draft", "slots", "context")  # that tables show
_FROM_1 = frozenset({"num_layers", "num_experts", "experts_per_token", "slot_bytes"})  # divided by


def wrong_run(run: Mapping[str, Any]) -> str | None:
    """What is wrong with a run, as a part of a sentence; None: nothing."""
    if not isinstance(run["load"], str):
        return "'load' is no text"
    wrong = _wrong_subject(run["subject"])
    if wrong is not None:
        return wrong
    memory = run["memory"]
    for name in _MEMORY if memory else ():
        if not _is_whole(memory.get(name)):
            return f"'{name}' of its memory is no whole number"
    for key, figures in run["cells"].items():
        wrong = _wrong_figure(figures)
        if wrong is not None:
            return f"{wrong} in '{key}'"
    return None


def wrong_sharing(figures: Mapping[str, Any]) -> str | None:
    """What is wrong with table 2's figures, likewise."""
    for name in _SHARING if figures else ():
        if not _is_whole(figures.get(name), 1 if name == "target_experts" else 0):
            return f"'{name}' is no whole number"
    return _wrong_figure(figures)


def _wrong_subject(subject: Mapping[str, Any]) -> str | None:
    for field in fields(Subject):
        value = subject[field.name]
        if field.type == "int":
            least = int(field.name in _FROM_1)
            if not _is_whole(value, least):
                return f"'{field.name}' is no whole number from {least} on"
        elif field.type == "bool":
            if not isinstance(value, bool):
                return f"'{field.name}' is neither true nor false"
        elif field.name == "datasets":
            if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
                return "'datasets' is no list of texts"
        elif not isinstance(value, str):
            return f"'{field.name}' is no text"
    kinds = ("measured", "predicted")
    return None if subject["kind"] in kinds else f"'kind' is neither {kinds[0]} nor {kinds[1]}"


def _wrong_figure(figures: Mapping[str, Any]) -> str | None:
    for name, value in figures.items():
        if name in _TEXTS:
            if not isinstance(value, str):
                return f"'{name}' is no text"
        elif not (value is None or _is_number(value) or (name == "draft_length" and value == "auto")):
            return f"'{name}' is no number"
    tpot_s = figures.get("tpot_s")
    return None if tpot_s is None or tpot_s > 0 else "'tpot_s' is no time"


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < _MOST and isfinite(value)


def _is_whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST
