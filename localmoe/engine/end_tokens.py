"""Which tokens end an answer: what the model's generation config, config and tokenizer say. Ends nothing
itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localmoe.engine.generation_config import read_generation_config
from localmoe.hub.weight_files import CONFIG_NAME, read_json_object


def find_end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Union of the eos tokens of generation_config.json, config.json, its text part and the tokenizer.

    Raises:
        CheckpointError: one of the files is no JSON object.
    """
    found: set[int | None] = set()
    config = folder / CONFIG_NAME
    for values in (read_generation_config(folder), read_json_object(config) if config.is_file() else {}):
        for part in (values, values.get("text_config")):
            value = part.get("eos_token_id") if isinstance(part, dict) else None
            found.update(value if isinstance(value, list) else [value])
    found.add(getattr(tokenizer, "eos_token_id", None))
    return frozenset(token for token in found if isinstance(token, int))
