"""Read prompt files: one JSON object a line with "id" and "prompt". Knows no model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from localmoe.core.bounded_file import read_text_bounded
from localmoe.core.errors import ConfigError

MOST_BYTES = 256 << 20
BUNDLED_PROMPTS = Path(__file__).resolve().parents[2] / "tests" / "data" / "eval_prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its name.

    Attributes:
        id: any value of JSON, as it was given: whoever numbers prompts looks answers up by number.
    """

    id: object
    text: str


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSON-lines file, in order.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is no prompt.
    """
    try:
        lines = read_text_bounded(path, MOST_BYTES).split("\n")  # other ends of lines may stand in a text
    except OSError as error:
        raise ConfigError(f"The prompts file {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The prompts file {path} cannot be read: it is no text in UTF-8.") from None
    if limit is not None and limit < 1:
        raise ConfigError(f"Limit {limit} is out of range: use at least 1 prompt.")
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    if not prompts:
        raise ConfigError(f"The prompts file {path} holds no prompt.")
    return prompts


def _parse(path: Path, number: int, line: str) -> Prompt:
    try:
        value = json.loads(line)
        json.dumps(value, allow_nan=False)  # what Python reads, and JSON does not know, is no id
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str) or "id" not in value:
        raise ConfigError(f'Line {number} of {path} is no prompt: it needs {{"id": ..., "prompt": "..."}}.')
    return Prompt(value["id"], value["prompt"])
