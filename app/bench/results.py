"""Results on disk, one JSON file each, and as texts to share. Knows neither engine nor page."""

from __future__ import annotations

import csv
import io
import json
import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.files import refused, set_aside, write_json
from localmoe.core.errors import LocalMoeError

SCHEMA = 1
MAX_KEPT = 100  # the oldest go first
Result = dict[str, Any]
_ID = re.compile(r"[0-9a-f]{32}")
_KINDS = ("benchmark", "what-if")
_MOST = 1e18  # no figure is as large, and an integer may be larger than any float


class ResultError(LocalMoeError):
    """A result is not there, or the disk did not take it."""


class ResultStore:
    """`revision` grows with every change; `reports` are sentences on files that could not be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._results: dict[str, Result] = {}
        self.reports: list[str] = []
        self.revision = 0
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not _is_sound(found) or not _ID.fullmatch(path.stem):
                raise ValueError("not a result")
        except (OSError, ValueError, RecursionError):
            try:
                kept = set_aside(path).name
            except OSError:
                kept = path.name
            self.reports.append(f"A benchmark's result could not be read; it is kept as {kept}.")
        else:
            self._results[path.stem] = found

    def list(self) -> list[tuple[str, Result]]:
        """(id, result), newest first."""
        with self._lock:
            return sorted(self._results.items(), key=lambda item: item[1]["created"], reverse=True)

    def get(self, result_id: str) -> Result:
        """One result.

        Raises:
            ResultError: there is none of that id.
        """
        with self._lock:
            if result_id not in self._results:
                raise ResultError("This result is not there any more.")
            return self._results[result_id]

    def add(self, result: Result) -> str:
        """Keep it; its id.

        Raises:
            ResultError: the disk did not take it.
        """
        result_id = secrets.token_hex(16)
        whole = {"schema": SCHEMA, "created": time.time(), **result}
        assert _is_sound(whole)
        try:
            write_json(self._folder / f"{result_id}.json", whole)
        except OSError as error:
            raise ResultError(refused("The result could not be kept", self._folder, error)) from error
        with self._lock:
            self._results[result_id] = whole
            self.revision += 1
        for old, _ in self.list()[MAX_KEPT:]:
            with suppress(ResultError):  # the new one is kept all the same, and the next one tries again
                self.delete(old)
        return result_id

    def delete(self, result_id: str) -> None:
        """Forget a result.

        Raises:
            ResultError: it is not there, or the disk refuses.
        """
        self.get(result_id)
        try:
            (self._folder / f"{result_id}.json").unlink(missing_ok=True)
        except OSError as error:
            raise ResultError(refused("The result could not be deleted", self._folder, error)) from error
        with self._lock:
            self._results.pop(result_id, None)
            self.revision += 1


def _is_sound(value: object) -> bool:
    """Whether everything that is shown has the form that showing it needs."""
    if not isinstance(value, dict) or value.get("kind") not in _KINDS or value.get("schema") != SCHEMA:
        return False
    created = value.get("created")
    if isinstance(created, bool) or not isinstance(created, int | float) or not 0 <= created < 1e11:
        return False
    texts = all(isinstance(value.get(name), str) for name in ("model", "localmoe"))
    parts = all(isinstance(value.get(name), dict) for name in ("machine", "engine"))
    parts = parts and isinstance(value["machine"].get("gpus", []), list)
    figures = all(_is_figure(value.get(name)) for name in ("acceptance", "match", "cpu_bytes_per_s"))
    refused = value.get("refused")
    shown = texts and parts and figures and (refused is None or isinstance(refused, dict))
    return shown and isinstance(rows := value.get("rows"), list) and all(map(_is_row, rows))


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("policy"), str) or "draft_length" not in row:
        return False
    return all(isinstance(value, str) or _is_figure(value) for value in row.values())


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < _MOST)


def file_name(result: Result, ending: str) -> str:
    """What an export is called, e.g. "localmoe-benchmark-demo-2026-01-31.csv"."""
    model = re.sub(r"[^A-Za-z0-9.]+", "-", result["model"]).strip("-.")[:60] or "model"
    return f"localmoe-{result['kind']}-{model}-{date_of(result)}.{ending}"


def date_of(result: Result) -> str:
    """The day, in this computer's time zone."""
    return time.strftime("%Y-%m-%d", time.localtime(result["created"]))


def machine_of(result: Result) -> str:
    """ "NVIDIA GeForce RTX 4090 · AMD Ryzen 9 · 64 GiB RAM" """
    machine = result["machine"]
    names = [*machine.get("gpus", []), machine.get("cpu", ""), machine.get("ram", "")]
    return " · ".join(str(name) for name in names if name)


def as_json(result: Result) -> str:
    """The whole result."""
    return json.dumps(result, ensure_ascii=False, indent=1)


def as_csv(result: Result) -> str:
    """A line a row, each with the model, the day, the machine and the version."""
    fixed = {
        "kind": result["kind"], "model": result["model"], "date": date_of(result),
        "machine": machine_of(result), "localmoe": result["localmoe"],
    }  # fmt: skip
    columns = list(dict.fromkeys([*fixed, *(name for row in result["rows"] for name in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**fixed, **row} for row in result["rows"])
    return text.getvalue()
