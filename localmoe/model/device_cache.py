"""The shared KV cache where passes run on the GPU without the host: positions are read on the device. Keeps
the rules of model.kv_cache otherwise."""

from __future__ import annotations

from torch import Tensor

from localmoe.kernels.gpu.rope import write_kv
from localmoe.model.device_window import DeviceWindow
from localmoe.model.kv_cache import KVCache, KVLayer


class DeviceKVLayer(KVLayer):
    """Keys and values of one decoder layer; the runner keeps its length."""

    def __init__(self, capacity: int, window: DeviceWindow) -> None:
        super().__init__(capacity)
        self._window = window

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
        self.layers = [DeviceKVLayer(capacity, window) for _ in range(num_layers)]

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return int(self.layers[0].capacity)

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
