"""What a model folder's generation_config.json says, for those who look for something in it. Decides nothing
of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localmoe.hub.weight_files import read_json_object

GENERATION_CONFIG = "generation_config.json"


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Its values by name; none where there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or is no JSON object.
    """
    path = folder / GENERATION_CONFIG
    return read_json_object(path) if path.is_file() else {}
