"""The KV cache that draft and target share: preallocated, written in place, rolled back by setting a length.

Every layer keeps all positions (a sliding window is a matter of the mask), so any number of the last tokens
can be dropped. Keys and values are handed out in whole blocks of kernels.attention.KV_BLOCK positions; what
lies past the written length is hidden by the causal mask. Does not decide what is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from localmoe.kernels.attention import KV_BLOCK
from localmoe.model.sequence_copy import SequenceCopy, from_host, to_host

# of decoder layers that are nothing else, whatever transformers' own cache has in their places
_STATELESS_LAYER_TYPES = {"moe", "mlp"}


@dataclass(frozen=True, slots=True)
class KVLayerShape:
    """What a decoder layer caches.

    Attributes:
        elements: of a token.
        window: positions that a row sees, its own among them, where it sees no others; None where it sees
            all.
    """

    elements: int
    window: int | None = None


def stateless_layers(text_config: Any) -> frozenset[int]:
    """Decoder layers that are experts or an MLP and nothing else, so that they keep nothing of earlier
    tokens."""
    types = getattr(text_config, "layer_types", None) or ()
    return frozenset(index for index, kind in enumerate(types) if kind in _STATELESS_LAYER_TYPES)


class KVLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, (1, kv_heads, capacity, head_dim) each; allocated at the first
    update."""

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int, block: int = KV_BLOCK) -> None:
        """block: positions that are handed out together; 1 for attention that reads all it is given."""
        super().__init__()
        self.block = block
        self.capacity = self._in_blocks(capacity)
        self.length = 0

    def _in_blocks(self, length: int) -> int:
        return -(-length // self.block) * self.block

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeros: hidden positions are read and multiplied by zero, so they must be finite."""

        def allocate(like: Tensor) -> Tensor:
            _, heads, _, dim = like.shape
            return torch.zeros(1, heads, self.capacity, dim, dtype=like.dtype, device=like.device)

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append (1, kv_heads, T, head_dim) and return all whole blocks written so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        assert end <= self.capacity, f"{end} positions in a cache of {self.capacity}"
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        visible = self._in_blocks(end)
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(mask columns, offset) for a pass of `query_length` tokens."""
        return self._in_blocks(self.length + query_length), 0

    def get_seq_length(self) -> int:
        """Tokens written."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.capacity

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        if not self.is_initialized:
            return 0
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))


class _NoKeys(KVLayer):
    """In the place of a decoder layer that attends to nothing: as long as one that does."""

    def __init__(self, like: KVLayer) -> None:
        self._like = like
        super().__init__(like.capacity, like.block)

    @property
    def length(self) -> int:
        """Tokens that the other layer holds."""
        return self._like.length

    @length.setter
    def length(self, length: int) -> None:
        """It is the other layer's."""


class KVCache(Cache):
    """One KVLayer a decoder layer, always of equal length between passes."""

    def __init__(
        self, num_layers: int, capacity: int, block: int = KV_BLOCK, stateless: Collection[int] = ()
    ) -> None:
        """stateless: decoder layers that attend to nothing, but not all."""
        layers = [KVLayer(capacity, block) for _ in range(num_layers)]
        like = next(layer for index, layer in enumerate(layers) if index not in stateless)
        super().__init__(
            layers=[_NoKeys(like) if index in stateless else layer for index, layer in enumerate(layers)]
        )

    @classmethod
    def of_model(cls, text_config: Any, capacity: int, block: int = KV_BLOCK) -> KVCache:
        """For all layers of a model with this config."""
        return cls(int(text_config.num_hidden_layers), capacity, block, stateless_layers(text_config))

    @property
    def length(self) -> int:
        """Tokens that all layers hold."""
        return min(int(layer.length) for layer in self.layers)

    def keepable(self, length: int) -> int:
        """So many of the first `length` tokens can be kept."""
        return min(length, self.length)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; also evens out layers after an interrupted pass."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} tokens to {length}"
        for layer in self.layers:
            layer.length = length

    def _parts(self) -> Iterator[Tensor]:
        """Keys and values of all layers that have some."""
        for layer in self.layers:
            if not isinstance(layer, _NoKeys) and layer.is_initialized:
                yield from (layer.keys, layer.values)

    @property
    def copy_bytes(self) -> int:
        """Of the positions that are held."""
        return sum(part.nbytes // part.shape[2] * self.length for part in self._parts())

    def copy_out(self) -> SequenceCopy:
        """Keys and values of the positions that are held, in host RAM."""
        length = self.length
        parts = to_host(self._parts(), length)
        return SequenceCopy(length, tuple(parts), None, lambda wanted: min(wanted, length))

    @torch.inference_mode()
    def bring_back(self, kept: SequenceCopy) -> None:
        """Hold what a copy holds."""
        self.truncate(0)  # an interruption leaves nothing
        from_host(kept.parts, self._parts(), cut=True)
        for layer in self.layers:
            layer.length = kept.length

    def wipe(self) -> None:
        """Forget all tokens, and numbers in their place that are none: those that no row sees count too."""
        self.release()

    def release(self) -> None:
        """Forget all tokens and give the memory back."""
        for layer in self.layers:
            layer.reset()
            layer.keys = layer.values = None
            layer.is_initialized = False

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.num_bytes for layer in self.layers)
