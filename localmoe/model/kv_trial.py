"""What each decoder layer of a model caches of a token, found by running one token through it without
weights: right for every attention design. Divides no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import ReferenceType, ref

import torch
import transformers
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from localmoe.core.errors import UnsupportedModelError, sentence_of
from localmoe.model.cached_pass import cached_pass
from localmoe.model.kv_cache import KVCache, KVLayerShape
from localmoe.model.rotary import measured_on_host

_MEASURE_ONLY = "localmoe_measure_only"


@dataclass(frozen=True, slots=True)
class Visible:
    """Stands for a mask: a row sees what came before it, or the last `window` positions of that."""

    window: int | None


def visible(*args: Any, **kwargs: Any) -> Visible:
    """In the place of transformers' mask functions."""
    return Visible(kwargs.get("local_size"))


@dataclass(frozen=True, slots=True)
class _Configured:
    """A model without weights, equal to others of its class and configuration."""

    kind: type
    configuration: str
    can_rollback: bool
    model: ReferenceType[Any] = field(compare=False)


def kv_layers(model: Any, *, can_rollback: bool) -> tuple[KVLayerShape, ...]:
    """Of each decoder layer, once a configuration.

    Raises:
        UnsupportedModelError: the model cannot run with the cache that the engine would give it.
    """
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    configuration = model.config.to_json_string(use_diff=False) + " ".join(dtypes)
    return _kv_layers(_Configured(type(model), configuration, can_rollback, ref(model)))


def kv_elements_per_token(model: Any, *, can_rollback: bool) -> int:
    """Of all layers together; raises as `kv_layers`."""
    return sum(layer.elements for layer in kv_layers(model, can_rollback=can_rollback))


@lru_cache(maxsize=64)
def _kv_layers(configured: _Configured) -> tuple[KVLayerShape, ...]:
    model = configured.model()
    assert model is not None, "the caller holds it"
    ALL_EXPERTS_FUNCTIONS.register(
        _MEASURE_ONLY, lambda module, hidden, index, weights: torch.zeros_like(hidden)
    )
    before = model.get_experts_implementation()
    try:
        model.set_experts_implementation(_MEASURE_ONLY)
        cache = _run(configured, model)
        windows = _windows(configured, model) if configured.can_rollback else {}
        model.set_experts_implementation(before)
    except Exception as error:  # any line of any architecture
        raise UnsupportedModelError(
            f"{model.config.model_type} cannot run on localmoe's cache: {sentence_of(error)}"
        ) from error
    return tuple(
        KVLayerShape(sum(map(_elements, vars(layer).values())), windows.get(index))
        for index, layer in enumerate(cache.layers)
    )


def _run(configured: _Configured, model: Any) -> Any:
    """The cache that one token leaves."""
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    text = model.config.get_text_config()
    cache = (
        KVCache.of_model(text, capacity=1)
        if configured.can_rollback
        else transformers.DynamicCache(config=text)
    )
    with torch.no_grad(), measured_on_host(model):
        cached_pass(model, token, token, cache)
    return cache


def _elements(kept: object) -> int:
    """Of keys or values, (1, heads, positions, dim), or an index, (1, positions, dim): a token's."""
    if not isinstance(kept, Tensor) or kept.dim() < 3 or not kept.shape[-2]:
        return 0
    return kept.numel() // kept.shape[-2]


def _windows(configured: _Configured, model: Any) -> dict[int, int]:
    """Positions that a row sees, of layers that see no others: as their own code asks for it, whatever the
    config says. None where that cannot be told, since all positions are right for every layer."""
    if not getattr(model.config.get_text_config(), "sliding_window", None):
        return {}
    seen: dict[int, set[Any]] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *a: Any, **k: Any) -> Any:
        seen.setdefault(module.layer_idx, set()).add(mask.window)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    ALL_ATTENTION_FUNCTIONS.register(_MEASURE_ONLY, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_MEASURE_ONLY, visible)
    try:
        with _attending(model):
            _run(configured, model)
    except Exception:  # any line of any architecture, here of one that is not asked this way
        return {}
    return {layer: max(of) for layer, of in seen.items() if None not in of}


@contextmanager
def _attending(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(_MEASURE_ONLY)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
