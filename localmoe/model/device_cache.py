"""The shared KV cache where passes run on the GPU without the host: positions are read on the device. Keeps
the rules of model.kv_cache otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

from localmoe.kernels.gpu.rope import write_kv
from localmoe.model.device_window import DeviceWindow
from localmoe.model.kv_cache import KVCache, KVLayer


class _Room:
    """One allocation for all layers: the allocator would round each one's up."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._left: Tensor | None = None

    def take(self, shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
        """Zeros of one layer; the first layer's shapes are thought to be every layer's. A layer that needs
        more gets its own."""
        counts = [math.prod(shape) for shape in shapes]
        if self._left is None:
            self._left = like.new_zeros(self._num_layers * sum(counts))
        if sum(counts) > len(self._left) or self._left.dtype != like.dtype:
            return [like.new_zeros(shape) for shape in shapes]
        *parts, self._left = self._left.tensor_split(list(itertools.accumulate(counts)))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def release(self) -> None:
        """Forget it."""
        self._left = None


class DeviceKVLayer(KVLayer):
    """Keys and values of one decoder layer; the runner keeps its length."""

    def __init__(self, capacity: int, window: DeviceWindow, room: _Room) -> None:
        super().__init__(capacity)
        self._window = window
        self._room = room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Zeros of the cache's room."""
        shapes = [(1, t.shape[1], self.capacity, t.shape[3]) for t in (key_states, value_states)]
        self.keys, self.values = self._room.take(shapes, key_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (1, kv_heads, T, head_dim) at the pass's position; return what the pass may look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write_kv(key_states, value_states, self.keys, self.values, self._window.at)
        visible = self._window.visible
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(mask columns, offset); no mask is built."""
        return self._window.visible, 0


class DeviceKVCache(KVCache):
    """One DeviceKVLayer a decoder layer."""

    def __init__(self, num_layers: int, capacity: int, window: DeviceWindow) -> None:
        super().__init__(num_layers, capacity)
        self._room = _Room(num_layers)
        self.layers = [DeviceKVLayer(capacity, window, self._room) for _ in range(num_layers)]

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return int(self.layers[0].capacity)

    def release(self) -> None:
        """Forget all tokens and give the memory back."""
        super().release()
        self._room.release()

    def wipe(self) -> None:
        """Back to zeros."""
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()

    def advance(self, length: int) -> None:
        """A pass has written positions up to `length`."""
        assert length <= self.capacity, f"{length} positions in a cache of {self.capacity}"
        for layer in self.layers:
            layer.length = length
