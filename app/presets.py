"""Named system prompts and named sampling settings, kept in one JSON file. Applies none."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from app.files import left_aside, newer_schema, refused, set_aside, unknown_fields, write_json
from app.settings import SAMPLING_NUMBERS, AnswerSettings, check_answers
from localmoe.core.errors import ConfigError, LocalMoeError

SCHEMA = 1
MAX_NAME = 60  # characters
MAX_PRESETS = 200  # of a kind
Kind = Literal["prompt", "sampling"]
FIELDS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "prompt": ("system_prompt",),
        "sampling": SAMPLING_NUMBERS,
    }
)
_Values = dict[str, Any]  # setting -> value


class Presets:
    """What the user named, by kind and name; `report` is a sentence if the file could not be read. Any
    thread may ask."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saving = threading.Lock()  # two windows may save at once
        self._kept: dict[Kind, dict[str, _Values]] = {kind: {} for kind in FIELDS}
        self.report = ""
        self._schema = SCHEMA
        self._others: dict[str, object] = {}  # a newer version's kinds
        self._unknown: dict[tuple[Kind, str], dict[str, object]] = {}  # and fields, by kind and name
        if path.exists():
            self._read()
        elif (kept := left_aside(path)) is not None:
            self._say_unread(kept)

    def _read(self) -> None:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            self._kept = {
                kind: {_name(name): _checked(kind, values) for name, values in data[kind].items()}
                for kind in FIELDS
            }
            self._schema = newer_schema(data, SCHEMA)
            self._others = unknown_fields(data, ("schema", *FIELDS))
            for kind, known in FIELDS.items():
                for name, values in data[kind].items():
                    if unknown := unknown_fields(values, known):
                        self._unknown[kind, _name(name)] = unknown
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, LocalMoeError):
            self._say_unread(set_aside(self._path))

    def _say_unread(self, kept: Path) -> None:
        self.report = f"The presets could not be read and were kept as {kept.name} in {kept.parent}."

    def names(self, kind: Kind) -> list[str]:
        """In the order of the alphabet."""
        return sorted(self._kept[kind], key=str.casefold)

    def values(self, kind: Kind, name: str) -> _Values | None:
        """Setting -> value; None where there is no such preset."""
        found = self._kept[kind].get(" ".join(name.split()))
        return None if found is None else dict(found)

    def save(self, kind: Kind, name: str, answers: AnswerSettings) -> str:
        """Keep these settings under the name, in the place of what had it; the name as it is kept.

        Raises:
            ConfigError: there is no name, or there are too many.
        """
        name = _name(name)
        with self._saving:
            others = {key: values for key, values in self._kept[kind].items() if key != name}
            if len(others) >= MAX_PRESETS:
                raise ConfigError(f"There are {MAX_PRESETS} presets already: delete one first.")
            self._keep(kind, {**others, name: {field: getattr(answers, field) for field in FIELDS[kind]}})
        return name

    def delete(self, kind: Kind, name: str) -> None:
        """Forget a preset.

        Raises:
            ConfigError: there is none of that name.
        """
        name = " ".join(name.split())
        with self._saving:
            if name not in self._kept[kind]:
                raise ConfigError("There is no preset of this name: choose one first.")
            self._keep(kind, {key: values for key, values in self._kept[kind].items() if key != name})
            self._unknown.pop((kind, name), None)

    def _keep(self, kind: Kind, presets: dict[str, _Values]) -> None:
        kept = {**self._kept, kind: presets}
        written = {
            str(kind): {
                name: {**values, **self._unknown.get((kind, name), {})} for name, values in found.items()
            }
            for kind, found in kept.items()
        }
        try:
            write_json(self._path, {"schema": self._schema, **written, **self._others})
        except OSError as error:
            what = "The presets could not be saved"  # also without the one that was to be deleted
            raise ConfigError(refused(what, self._path.parent, error)) from error
        self._kept = kept


def _name(text: str) -> str:
    name = " ".join("".join(char if char.isprintable() else " " for char in text).split())[:MAX_NAME].strip()
    if not name:
        raise ConfigError("Type a name for the preset first.")
    return name


def _checked(kind: Kind, values: Mapping[str, object]) -> _Values:
    answers = check_answers({field: values[field] for field in FIELDS[kind]})
    return {field: getattr(answers, field) for field in FIELDS[kind]}
