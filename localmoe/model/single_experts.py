"""Experts that a checkpoint has one by one, of an architecture for which transformers knows those of a layer
as one tensor alone: so FP8 versions may be published, as matrices are quantised one by one. Reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

_SINGLE = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_USUAL = "qwen2_moe"  # whose checkpoints name them as most do


def with_single_experts(converters: list[WeightConverter], names: Iterable[str]) -> list[WeightConverter]:
    """transformers' converters of a model, with those of another one that say where experts of such names
    belong, where none of its own does."""
    known = any("experts.*." in pattern for entry in converters for pattern in entry.source_patterns)
    if known or not any(map(_SINGLE.search, names)):
        return converters
    usual = get_checkpoint_conversion_mapping(_USUAL) or []
    return converters + [entry for entry in usual if isinstance(entry, WeightConverter)]
