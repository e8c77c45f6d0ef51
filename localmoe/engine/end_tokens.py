"""Which tokens end an answer: what the model's generation config, config and tokenizer say. Ends nothing
itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localmoe.core.errors import CheckpointError


def find_end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Union of the eos tokens of generation_config.json, config.json, its text part and the tokenizer.

    Raises:
        CheckpointError: one of the files is no JSON object.
    """
    found: set[int | None] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            values = _read(path)
            for part in (values, values.get("text_config")):
                value = part.get("eos_token_id") if isinstance(part, dict) else None
                found.update(value if isinstance(value, list) else [value])
    found.add(getattr(tokenizer, "eos_token_id", None))
    return frozenset(token for token in found if isinstance(token, int))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object: download the model again.")
    return value
