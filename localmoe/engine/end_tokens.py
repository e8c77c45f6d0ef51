"""Which tokens end an answer, as the model's generation config and config say; its tokenizer may name
another. Ends nothing itself."""

from __future__ import annotations

from pathlib import Path

from localmoe.engine.generation_config import read_generation_config
from localmoe.hub.weight_files import CONFIG_NAME, read_json_object


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Union of the eos tokens of generation_config.json, config.json and its text part.

    Raises:
        CheckpointError: one of the files is no JSON object.
    """
    found: list[object] = []
    config = folder / CONFIG_NAME
    for values in (read_generation_config(folder), read_json_object(config) if config.is_file() else {}):
        for part in (values, values.get("text_config")):
            value = part.get("eos_token_id") if isinstance(part, dict) else None
            found += value if isinstance(value, list) else [value]
    return frozenset(token for token in found if type(token) is int)
