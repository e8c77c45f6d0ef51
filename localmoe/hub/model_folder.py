"""What the lists need to know of a model folder, from its config and file sizes. Checks no header and does
not decide whether the engine supports the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localmoe.core.errors import CheckpointError
from localmoe.hub.weight_files import find_weights, read_config

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """`num_bytes` are those of the weight files; `architecture` is the config's model_type."""

    architecture: str
    num_bytes: int
    is_moe: bool


def read_folder(folder: Path) -> FolderFacts:
    """The facts of a complete model folder.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: as for `Checkpoint.open`, except that no
            weight file is opened.
    """
    config = read_config(folder)
    files, _ = find_weights(folder)
    try:
        num_bytes = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise CheckpointError(f"Folder {folder} cannot be read: {error.strerror or error}.") from error
    architecture = config.get("model_type")
    return FolderFacts(
        architecture if isinstance(architecture, str) else "unknown", num_bytes, is_moe(config)
    )


def is_moe(config: Mapping[str, Any]) -> bool:
    """Whether a config, or its text part, names two experts or more."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    return any(_count(part.get(key)) >= 2 for part in parts for key in EXPERT_COUNTS)


def _count(value: object) -> int:
    """Experts by a config entry: a number, or a list of them (text, vision, ...)."""
    if isinstance(value, list):
        return max((_count(one) for one in value if not isinstance(one, list)), default=0)
    return value if isinstance(value, int) else 0
