"""How ModelOpt says that it has stored a model's weights: some versions in a file of their own instead of
config.json, and of mixed precision layer by layer; and where others say it of the text part alone. Reads no
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FILE_NAME = "hf_quant_config.json"
_SAID = "quantization_config"


def wants_file(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json says nothing of how weights are stored, so that the file counts if there
    is one."""
    return not config.get(_SAID) and not _of_text(config)


def with_quantisation(config: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """A config that wants_file, as later versions would have written it. file: what it holds."""
    said = file.get("quantization")
    if not isinstance(said, Mapping) or not said.get("quant_algo"):
        return dict(config)
    return {**config, "quantization_config": {**said, "quant_method": "modelopt"}}


def _of_text(config: Mapping[str, Any]) -> Any:
    """What a config says of the part for text alone."""
    text = config.get("text_config")
    return text.get(_SAID) if isinstance(text, Mapping) else None


def in_brief(config: dict[str, Any]) -> dict[str, Any]:
    """A config that says what it does of the text part in its own place, as transformers takes it, and whose
    quantised layers are one of each kind: of many experts it names tens of thousands, and configs are copied
    again and again."""
    if not config.get(_SAID) and (of_text := _of_text(config)):
        config = {**config, _SAID: of_text}
    said = config.get(_SAID)
    if not isinstance(said, Mapping) or not isinstance(said.get("quantized_layers"), Mapping):
        return config
    layers = said["quantized_layers"]
    kinds = {repr(kind): name for name, kind in layers.items()}
    one_each = {name: layers[name] for name in kinds.values()}
    return {**config, "quantization_config": {**said, "quantized_layers": one_each}}
