"""Recurrent state where passes run on the GPU without the host. A window's tokens can be dropped again, see
kernels.gpu.state_places. Knows no cache of keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localmoe.kernels.gpu.state_memory import StateMemory
from localmoe.kernels.gpu.state_places import WINDOW, begin_pass, go_back, keep_before, new_places
from localmoe.model.device_recurrence import Stand, run_recurrent
from localmoe.model.device_window import DeviceWindow
from localmoe.model.recurrent_nets import RecurrentNet
from localmoe.model.sequence_copy import from_host, to_host


class RecurrentStates:
    """State of all such layers of a model, for the target and for a draft that goes ahead of it.

    Attributes:
        layers: decoder layers that have one.
    """

    def __init__(self, nets: dict[int, RecurrentNet], window: DeviceWindow, dtype: torch.dtype) -> None:
        """All layers are alike. dtype: of activations."""
        (self.shape,) = {net.shape for net in nets.values()}
        self.layers = sorted(nets)
        self._window, self._dtype = window, dtype
        self._kind = WINDOW
        self._places = new_places(window.at.device)
        self._memory: StateMemory | None = None
        self._by_layer: dict[int, StateMemory] = {}

    def begin(self, kind: int) -> None:
        """A pass of that kind (of state_places) begins at the window's position, in stream order."""
        rows = self._window.rows
        if self._memory is None:
            size = len(self.layers), rows, self._dtype, self._window.at.device
            self._memory = StateMemory.empty(self.shape, *size)
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

    def copy_out(self, parts: list[Tensor]) -> None:
        """Add all of it to `parts` in host RAM."""
        parts += to_host(self._tensors())

    @torch.inference_mode()
    def bring_back(self, parts: Iterator[Tensor]) -> None:
        """Take from `parts` what a copy added."""
        own = self._tensors()
        from_host(itertools.islice(parts, len(own)), own)

    def _tensors(self) -> list[Tensor]:
        return [] if self._memory is None else [self._places, *self._memory.tensors()]

    def run(self, net: RecurrentNet, hidden: Tensor) -> Tensor:
        """(T, H) -> (T, H) of the pass that has begun, in the layer of that module."""
        memory = self._by_layer[int(net.module.layer_idx)]
        return run_recurrent(net, hidden, Stand(memory, self._places, self._window.live, self._kind))


def take_over_recurrence(nets: dict[int, RecurrentNet], states: RecurrentStates) -> None:
    """Have the modules run in `states`."""
    for net in nets.values():
        net.module.forward = partial(_forward, net, states)


def _forward(
    net: RecurrentNet, states: RecurrentStates, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    return states.run(net, hidden_states.reshape(-1, hidden_states.shape[-1])).view_as(hidden_states)
