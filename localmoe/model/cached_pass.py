"""One pass of a transformers model behind what its cache holds, by the name that its forward has for the
cache: `cache` from transformers 5.24 on, `past_key_values` before."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


def cached_pass(
    model: Any, input_ids: Tensor, position_ids: Tensor, cache: Cache, *, keep: int = 0
) -> Tensor:
    """Append tokens to the cache; their logits.

    Args:
        input_ids, position_ids: (B, T).
        keep: so many last tokens' logits; 0: all.

    Returns:
        (B, T or keep, V), in the model's dtype.

    Raises:
        Exception: whatever the model's own code does.
    """
    kept: int | slice = keep
    if keep and _shares_keys(model):
        kept = slice(-keep, None)  # told a number, Gemma leaves the other rows out of layers that share keys
    out = model(
        input_ids=input_ids, position_ids=position_ids, use_cache=True, logits_to_keep=kept,
        **{cache_name(type(model).forward): cache},
    )  # fmt: skip
    logits: Tensor = out.logits
    return logits


def _shares_keys(model: Any) -> bool:
    config = getattr(model, "config", None)  # None: it only stands in for one of transformers'
    return config is not None and bool(getattr(config.get_text_config(), "num_kv_shared_layers", 0))


@functools.cache
def cache_name(forward: Callable[..., Any]) -> str:
    """What a forward of transformers' calls its cache."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
