"""Whether a published config needs Python code of its own: many name some, written before transformers knew
their architecture. Reads no weight and runs none of that code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.models.auto import modeling_auto

_MODELS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)


def needs_own_code(config: Mapping[str, Any]) -> bool:
    """Whether transformers has no class by the name of the one that the config's code would define, for
    configs of its model_type. Names are compared without case: some are written otherwise."""
    named = config.get("auto_map")
    if not named:
        return False
    known = {name.casefold() for name in _class_names(config.get("model_type"))}
    wanted = {name.casefold() for name in _wanted(named, config.get("architectures"))}
    return not wanted or not wanted <= known


def _class_names(model_type: object) -> Iterator[str]:
    if not isinstance(model_type, str):
        return
    for mapping in _MAPPINGS:
        found = getattr(modeling_auto, mapping, {}).get(model_type, ())
        yield from (found,) if isinstance(found, str) else found


def _wanted(auto_map: object, architectures: object) -> Iterator[str]:
    """The classes that run the text: as the code calls them, or, where that defines but other things, as the
    config does."""
    entries = auto_map if isinstance(auto_map, Mapping) else {}
    named = [entries[key] for key in _MODELS if key in entries]
    if not named:
        named = list(architectures) if isinstance(architectures, list) else []
    for name in named:
        yield name.rpartition(".")[2] if isinstance(name, str) else ""
