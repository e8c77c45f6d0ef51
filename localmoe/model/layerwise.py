"""Runs a model decoder layer by decoder layer over many sequences, as calibration wants it: what goes into a
layer's experts is taken out, and what comes out of them is put in. Quantises nothing.

Weights wait in RAM; the layer that runs is moved to the device and back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.model.skeleton import Skeleton
from localmoe.model.takeover import take_over


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """What a layer's experts are asked: hidden (T, H), index int64 (T, K) and weights (T, K) of the
    router."""

    hidden: Tensor
    index: Tensor
    weights: Tensor


class _ReachedError(Exception):
    """The layer has got as far as its experts."""


@dataclass(slots=True)
class _Tap:
    """Stands in for a layer's experts (takeover.ExpertLayer)."""

    taken: list[RoutedTokens] = field(default_factory=list)
    outputs: Tensor | None = None  # (T, H) of all tokens; None: take the inputs instead
    given: int = 0  # rows of `outputs` that were given out

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.outputs is None:
            self.taken.append(RoutedTokens(hidden, top_k_index, top_k_weights))
            raise _ReachedError
        rows = slice(self.given, self.given + hidden.shape[0])
        self.given = rows.stop
        return self.outputs[rows].to(hidden.device, hidden.dtype)


def _nothing() -> None:
    """Between two batches."""


def decoder_layers(skeleton: Skeleton) -> nn.ModuleList:
    """The stack of decoder layers, in which the experts are."""
    first = skeleton.experts[0]
    path = re.split(rf"\.{first.decoder_layer}\.", first.path, maxsplit=1)[0]
    layers = skeleton.model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    return layers


class LayerwiseModel:
    """A skeleton whose shared weights are in RAM. It is of no other use afterwards."""

    def __init__(self, skeleton: Skeleton, device: torch.device) -> None:
        self.device = device
        self._model = skeleton.model
        self._layers = decoder_layers(skeleton)
        self._taps = {experts.decoder_layer: _Tap() for experts in skeleton.experts}
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        take_over(skeleton, list(self._taps.values()), attention=None)

    @property
    def num_layers(self) -> int:
        """Decoder layers, dense ones included."""
        return len(self._layers)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer's shared weights."""
        return sum(t.nbytes for _, _, t in _own_tensors(self._layers[layer]))

    @torch.inference_mode()
    def embed(self, tokens: Tensor, batch: int) -> list[Tensor]:
        """What enters the first layer: (batch, length, H) in RAM for each `batch` of the sequences (S,
        length).

        S is a multiple of `batch`, so that all batches are called alike; how, is noted for the layers.
        """
        assert tokens.shape[0] % batch == 0
        hidden: list[Tensor] = []

        def note(layer: int, entering: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if layer == 0:
                hidden.append(entering)
            self._calls.setdefault(layer, (args, kwargs))
            return entering

        with _replaced_forwards(self._layers, note):
            for part in tokens.split(batch):
                self._model.base_model(input_ids=part, use_cache=False)
        self._calls = {layer: _moved(call, self.device) for layer, call in self._calls.items()}
        return hidden

    @torch.inference_mode()
    def routed(
        self, layer: int, hidden: list[Tensor], tick: Callable[[], None] = _nothing
    ) -> RoutedTokens | None:
        """What the layer's experts are asked by all batches together, on the device; None of a dense
        layer. `tick` is called before each batch, and may raise."""
        tap = self._taps.get(layer)
        if tap is None:
            return None
        with self._on_device(layer):
            for part in hidden:
                tick()
                try:
                    self._run(layer, part)
                except _ReachedError:
                    continue
                raise AssertionError(f"decoder layer {layer} did not call its experts")
        taken, tap.taken = tap.taken, []
        return RoutedTokens(
            torch.cat([tokens.hidden for tokens in taken]),
            torch.cat([tokens.index for tokens in taken]),
            torch.cat([tokens.weights for tokens in taken]),
        )

    @torch.inference_mode()
    def advance(
        self,
        layer: int,
        hidden: list[Tensor],
        outputs: Tensor | None,
        tick: Callable[[], None] = _nothing,
    ) -> None:
        """Replace each batch by what leaves the layer, whose experts give `outputs` (T, H) for all tokens
        (None: a dense layer)."""
        tap = self._taps.get(layer)
        assert (tap is None) == (outputs is None)
        if tap is not None:
            tap.outputs, tap.given = outputs, 0
        with self._on_device(layer):
            for i, part in enumerate(hidden):
                tick()
                hidden[i] = self._run(layer, part).to("cpu")
        if tap is not None:
            tap.outputs = None

    def _run(self, layer: int, hidden: Tensor) -> Tensor:
        args, kwargs = self._calls[layer]
        out = self._layers[layer](hidden.to(self.device), *args, **kwargs)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    @contextmanager
    def _on_device(self, layer: int) -> Iterator[None]:
        if self.device.type == "cpu":
            yield
            return
        homes = list(_own_tensors(self._layers[layer]))
        try:
            for module, name, tensor in homes:
                _put(module, name, tensor.to(self.device))
            yield
        finally:
            for module, name, tensor in homes:
                _put(module, name, tensor)


def _own_tensors(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Weights and buffers that are there; experts' are not."""
    for module in layer.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not tensor.is_meta:
                yield module, name, tensor


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


@contextmanager
def _replaced_forwards(layers: nn.ModuleList, note: Any) -> Iterator[None]:
    for index, layer in enumerate(layers):
        layer.forward = functools.partial(note, index)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _moved(value: Any, device: torch.device) -> Any:
    """The tensors in a nest of tuples, lists and dicts on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value
