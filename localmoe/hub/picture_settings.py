"""The file that says how a model's pictures are processed: its names, and which one a folder has. Reads no
setting."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from localmoe.core.errors import CheckpointError
from localmoe.hub.weight_files import read_json_object

PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")


def settings_file(folder: Path) -> Path | None:
    """How pictures are processed: a file of its own, or a part of what says it of all that the model takes,
    if that can be read. None: neither is there."""
    own, whole = (folder / name for name in PROCESSOR_FILES)
    if own.is_file():
        return own
    try:
        return whole if whole.is_file() and "image_processor" in read_json_object(whole) else None
    except CheckpointError:
        return whole  # whoever reads it says so
