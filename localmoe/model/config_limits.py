"""Refuses configs of a kilobyte that would fill the memory before a weight is read. Builds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localmoe.core.errors import UnsupportedModelError
from localmoe.hub.safetensors_header import shown

# ends of names in configs, and the most that is believed
_LONG_LISTS = {"layers": 2000, "n_layer": 2000, "num_labels": 100_000}


def refuse_long_lists(config: Mapping[str, Any], folder: Path) -> None:
    """transformers makes lists of as many entries as a config says.

    Raises:
        UnsupportedModelError: they would be too long.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            refuse_long_lists(value, folder)
        most = next((most for end, most in _LONG_LISTS.items() if name.endswith(end)), None)
        if most is not None and isinstance(value, int) and value > most:
            raise UnsupportedModelError(
                f"The config in {folder} says {shown(name)} {shown(str(value))}, more than {most}: it is "
                "damaged, so choose another model, or download this one again."
            )
