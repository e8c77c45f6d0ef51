"""How ModelOpt has stored a model's weights, of versions of it that say so in a file of their own instead of
config.json. Reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FILE_NAME = "hf_quant_config.json"


def wants_file(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json says nothing of how weights are stored, so that the file counts if there
    is one."""
    return not config.get("quantization_config")


def with_quantisation(config: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """A config that wants_file, as later versions would have written it. file: what it holds."""
    said = file.get("quantization")
    if not isinstance(said, Mapping) or not said.get("quant_algo"):
        return dict(config)
    return {**config, "quantization_config": {**said, "quant_method": "modelopt"}}
