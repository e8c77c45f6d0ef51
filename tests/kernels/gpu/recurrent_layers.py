"""Recurrent layers of each kind as tests run them: rows of projections in, rows out, and a reference."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from dense_cases import DEVICE, normal
from torch import Tensor

from localmoe.kernels.delta_rule import UNBOUNDED, DecayGate, reference_delta_inputs, reference_delta_rule
from localmoe.kernels.gpu.scan import scan
from localmoe.kernels.gpu.scan_inputs import Projected, ScanWeights, scan_inputs
from localmoe.kernels.gpu.short_conv import short_conv
from localmoe.kernels.gpu.state_memory import StateMemory
from localmoe.kernels.gpu.state_places import begin_pass, new_places
from localmoe.kernels.recurrent_shapes import ConvShape, RecurrentShape, ScanShape
from localmoe.kernels.short_conv import reference_short_conv
from localmoe.kernels.state_space import reference_space_inputs, reference_state_space

WIDEST = 12  # rows of a window


class Layer(ABC):
    """One layer's state and what runs over it. width: elements of a row of its projections."""

    width: int

    def __init__(self, shape: RecurrentShape, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.taps = normal(shape.channels, shape.taps, dtype=dtype, scale=0.5)
        device = torch.device(DEVICE)
        self.memory = StateMemory.empty(shape, 1, WIDEST, dtype, device).of_layer(0)
        held = self.memory.scan
        for tensor in () if held is None else (held.state, held.draft_state, held.kept_state):
            tensor.fill_(float("nan"))
        self.places = new_places(device)

    def rows(self, count: int, seed: int = 0) -> Tensor:
        return normal(count, self.width, dtype=self.dtype, seed=seed)

    def run(self, rows: Tensor, at: int, live: int, kind: int) -> Tensor:
        places = torch.tensor([at], device=DEVICE), torch.tensor([live], device=DEVICE)
        begin_pass(self.places, *places, kind, WIDEST)
        return self.issue(rows, places[1], kind).flatten(1)

    @abstractmethod
    def issue(self, rows: Tensor, live: Tensor, kind: int) -> Tensor: ...

    @abstractmethod
    def reference(self, rows: Tensor) -> Tensor:
        """float32, from the beginning."""

    def before(self, channels: int) -> Tensor:
        return torch.zeros(self.taps.shape[1] - 1, channels, dtype=self.dtype)


class DeltaLayer(Layer):
    """Queries, keys and values, a and b. grouped: what belongs to a key head lies together."""

    def __init__(
        self, shape: ScanShape, dtype: torch.dtype, *, grouped: bool = False, gate: DecayGate = UNBOUNDED
    ) -> None:
        super().__init__(shape, dtype)
        self.shape, self.grouped, self.gate = shape, grouped, gate
        heads = shape.value_heads
        self.decays = heads * shape.decays
        self.width = shape.channels + self.decays + heads
        self.a_log = torch.linspace(-2, 1, heads).to(DEVICE, dtype)
        self.dt_bias = torch.linspace(-1, 1, self.decays).to(DEVICE, dtype)
        self.order = _grouped(shape) if grouped else torch.arange(shape.channels)

    def issue(self, rows: Tensor, live: Tensor, kind: int) -> Tensor:
        shape = self.shape
        x, a, b = rows.split((shape.channels, self.decays, shape.value_heads), dim=1)
        lie = torch.empty_like(x)
        lie[:, self.order.to(DEVICE)] = x
        dk, dv, keys, group = shape.key_dim, shape.value_dim, shape.key_heads * shape.key_dim, shape.group
        places = ((0, dk), (keys, dk), (2 * keys, group * dv))
        if self.grouped:
            stride = 2 * dk + group * dv
            places = (0, stride), (dk, stride), (2 * dk, stride)
        projected = Projected(lie, a, b, *places, group)
        channels, rates = (0, keys, 2 * keys), (self.a_log, self.dt_bias)
        weights = ScanWeights(self.taps, None, channels, *rates, gate=self.gate)
        inputs = scan_inputs(projected, weights, shape, self.memory, self.places, kind)
        return scan(inputs, None, shape, self.memory, self.places, live, len(x), kind)

    def reference(self, rows: Tensor) -> Tensor:
        shape, heads = self.shape, self.shape.value_heads
        x, a, b = rows.cpu().split((shape.channels, self.decays, heads), dim=1)
        bias = self.dt_bias.cpu()
        if shape.by_channel:
            a, bias = a.unflatten(1, (heads, -1)), bias.view(heads, -1)
        rates = self.a_log.cpu(), bias
        before, taps = self.before(shape.channels), self.taps.cpu()
        inputs = reference_delta_inputs(x, before, taps, a, b, *rates, self.gate)
        state = torch.zeros(heads, shape.value_dim, shape.key_dim)
        return reference_delta_rule(inputs, state, shape)[0].float().flatten(1)


def _grouped(shape: ScanShape) -> Tensor:
    """Where each channel lies when what belongs to a key head lies together."""
    dk, dv, keys = shape.key_dim, shape.value_dim, shape.key_heads * shape.key_dim
    stride = 2 * dk + shape.group * dv
    q = torch.arange(keys) // dk * stride + torch.arange(keys) % dk
    v = torch.arange(shape.value_heads * dv)
    return torch.cat((q, q + dk, v // (shape.group * dv) * stride + 2 * dk + v % (shape.group * dv)))


class SpaceLayer(Layer):
    """x, B and C, and steps; their limits cut some."""

    limits = (0.3, 0.9)

    def __init__(self, shape: ScanShape, dtype: torch.dtype, *, biased: bool) -> None:
        super().__init__(shape, dtype)
        self.shape = shape
        heads = shape.value_heads
        self.width = shape.channels + heads
        self.bias = normal(shape.channels, dtype=dtype, seed=5) if biased else None
        self.a_log = torch.linspace(-2, 1, heads).to(DEVICE)  # a model may keep these in 32 bits
        self.dt_bias = torch.linspace(-1, 1, heads).to(DEVICE, dtype)
        self.skip = torch.linspace(0.5, 1.5, heads).to(DEVICE, dtype)

    def issue(self, rows: Tensor, live: Tensor, kind: int) -> Tensor:
        shape = self.shape
        x, dt = rows.split((shape.channels, shape.value_heads), dim=1)
        values, keys = shape.values, shape.key_heads * shape.key_dim
        places = (values + keys, shape.key_dim), (values, shape.key_dim), (0, shape.group * shape.value_dim)
        projected = Projected(x, dt, None, *places, shape.group)
        channels = values + keys, values, 0
        weights = ScanWeights(self.taps, self.bias, channels, self.a_log, self.dt_bias, self.limits)
        inputs = scan_inputs(projected, weights, shape, self.memory, self.places, kind)
        return scan(inputs, self.skip, shape, self.memory, self.places, live, len(x), kind)

    def reference(self, rows: Tensor) -> Tensor:
        shape, heads = self.shape, self.shape.value_heads
        x, dt = rows.cpu().split((shape.channels, heads), dim=1)
        bias = None if self.bias is None else self.bias.cpu()
        rates = self.a_log.cpu(), self.dt_bias.cpu()
        before = self.before(shape.channels)
        inputs = reference_space_inputs(x, before, self.taps.cpu(), bias, dt, *rates, self.limits)
        state = torch.zeros(heads, shape.value_dim, shape.key_dim)
        return reference_state_space(inputs, self.skip.cpu(), state, shape)[0].float().flatten(1)


class ConvLayer(Layer):
    """B, C and x."""

    def __init__(self, shape: ConvShape, dtype: torch.dtype, *, biased: bool) -> None:
        super().__init__(shape, dtype)
        self.shape = shape
        self.width = 3 * shape.channels
        self.bias = normal(shape.channels, dtype=dtype, seed=5) if biased else None

    def issue(self, rows: Tensor, live: Tensor, kind: int) -> Tensor:
        return short_conv(rows, self.taps, self.bias, self.shape, self.memory, self.places, live, kind)

    def reference(self, rows: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.cpu()
        before = self.before(self.shape.channels)
        return reference_short_conv(rows.cpu(), before, self.taps.cpu(), bias)[0].float()
