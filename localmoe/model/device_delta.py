"""Linear attention by the gated delta rule where passes run on the GPU without the host: its state, and what
a module of it runs. A window's tokens can be dropped again, see kernels.gpu.delta_places. Knows no cache of
keys and values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from localmoe.kernels.gpu.delta_inputs import Projected, delta_inputs
from localmoe.kernels.gpu.delta_memory import DeltaMemory
from localmoe.kernels.gpu.delta_places import WINDOW, begin_pass, go_back, keep_before, new_places
from localmoe.kernels.gpu.delta_rule import delta_rule, gated_norm
from localmoe.model.delta_net import DeltaNet
from localmoe.model.device_window import DeviceWindow


class DeltaStates:
    """State of all such layers of a model, for the target and for a draft that goes ahead of it.

    Attributes:
        layers: decoder layers that have one.
    """

    def __init__(self, nets: dict[int, DeltaNet], window: DeviceWindow, dtype: torch.dtype) -> None:
        """All layers are alike. dtype: of activations."""
        (self.shape,) = {net.shape for net in nets.values()}
        self.layers = sorted(nets)
        self._window, self._dtype = window, dtype
        self._kind = WINDOW
        self._places = new_places(window.at.device)
        self._memory: DeltaMemory | None = None
        self._by_layer: dict[int, DeltaMemory] = {}

    def begin(self, kind: int) -> None:
        """A pass of that kind (of delta_places) begins at the window's position, in stream order."""
        rows = self._window.rows
        if self._memory is None:
            size = len(self.layers), rows, self._dtype, self._window.at.device
            self._memory = DeltaMemory.empty(self.shape, *size)
            self._by_layer = {layer: self._memory.of_layer(index) for index, layer in enumerate(self.layers)}
        self._kind = kind
        begin_pass(self._places, self._window.at, self._window.live, kind, rows)

    def keep_before(self, row: int) -> None:
        """The next window or prompt keeps its state before that row, for `go_back`."""
        keep_before(self._places, row)

    @torch.inference_mode()
    def go_back(self, position: int) -> None:
        """To the state that was kept, which is one of that position."""
        assert self._memory is not None, "nothing was kept"
        self._memory.restore()
        go_back(self._places, position)

    def release(self) -> None:
        """Give the memory back. The next pass has to begin a text."""
        self._memory, self._by_layer = None, {}

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._memory is None else self._memory.num_bytes

    def run(self, net: DeltaNet, hidden: Tensor) -> Tensor:
        """(T, H) -> (T, H) of the pass that has begun, in the layer of that module."""
        module, shape, norm = net.module, self.shape, net.module.norm
        memory = self._by_layer[int(module.layer_idx)]
        projected, gate, place = _lie(net, [linear(hidden) for linear in net.projections])
        weight, rates = module.conv1d.weight[:, 0], (module.A_log, module.dt_bias)
        inputs = delta_inputs(projected, weight, *rates, shape, memory, self._places, self._kind)
        live, rows = self._window.live, len(hidden)
        out = delta_rule(inputs, shape, memory, self._places, live, rows, self._kind)
        normed = gated_norm(out, gate, place, shape.group, norm.weight, norm.variance_epsilon)
        found: Tensor = module.out_proj(normed)
        return found


def take_over_deltas(nets: dict[int, DeltaNet], states: DeltaStates) -> None:
    """Have the modules run in `states`."""
    for net in nets.values():
        net.module.forward = partial(_forward, net, states)


def _forward(net: DeltaNet, states: DeltaStates, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return states.run(net, hidden_states.reshape(-1, hidden_states.shape[-1])).view_as(hidden_states)


def _lie(net: DeltaNet, parts: list[Tensor]) -> tuple[Projected, Tensor, tuple[int, int]]:
    """Where things lie in the projections; the tensor with the gates, and where in it."""
    shape = net.shape
    dk, group, values = shape.key_dim, shape.group, shape.group * shape.value_dim
    if net.grouped:
        x, rates = parts
        stride = 2 * dk + 2 * values
        places = (0, stride), (dk, stride), (2 * dk, stride)
        return Projected(x, rates[:, group:], rates, *places, 2 * group), x, (2 * dk + values, stride)
    x, z, b, a = parts
    keys = shape.key_heads * dk
    return Projected(x, a, b, (0, dk), (keys, dk), (2 * keys, values), group), z, (0, values)
