"""What a recurrent layer runs in a whole pass: its projections, the kernels of its kind, and its norm. Keeps
no state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.kernels.gpu.gated_norms import gated_norm, group_norm
from localmoe.kernels.gpu.scan import scan
from localmoe.kernels.gpu.scan_inputs import Projected, ScanWeights, scan_inputs
from localmoe.kernels.gpu.short_conv import short_conv
from localmoe.kernels.gpu.state_memory import StateMemory
from localmoe.kernels.recurrent_shapes import ScanShape
from localmoe.model.channel_delta_net import ChannelDeltaNet
from localmoe.model.delta_net import DeltaNet
from localmoe.model.recurrent_nets import RecurrentNet
from localmoe.model.short_conv_net import ShortConvNet
from localmoe.model.state_space_net import StateSpaceNet


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a pass begins: a layer's memory, the places of it, the window's live rows, and what kind of pass
    it is (of kernels.gpu.state_places)."""

    memory: StateMemory
    places: Tensor
    live: Tensor
    kind: int


def run_recurrent(net: RecurrentNet, hidden: Tensor, stand: Stand) -> Tensor:
    """(T, H) -> (T, H)."""
    projected = [linear(hidden) for linear in net.projections]
    if isinstance(net, ChannelDeltaNet):
        found: Tensor = net.module.o_proj(_channel_delta(net, projected, stand))
        return found
    if isinstance(net, DeltaNet):
        out = _delta(net, projected, stand)
    elif isinstance(net, StateSpaceNet):
        out = _state_space(net, projected[0], stand)
    else:
        out = _short_conv(net, projected[0], stand)
    found = net.module.out_proj(out)
    return found


def _delta(net: DeltaNet, parts: list[Tensor], stand: Stand) -> Tensor:
    module, shape, norm = net.module, net.shape, net.module.norm
    projected, gate, place = _lie(net, parts)
    keys = shape.key_heads * shape.key_dim
    weights = ScanWeights(module.conv1d.weight[:, 0], None, (0, keys, 2 * keys), module.A_log, module.dt_bias)
    out = _scanned(projected, weights, None, shape, stand)
    return gated_norm(out, gate, place, shape.group, norm.weight, norm.variance_epsilon)


def _channel_delta(net: ChannelDeltaNet, parts: list[Tensor], stand: Stand) -> Tensor:
    module, shape, norm = net.module, net.shape, net.module.o_norm
    keys, dim = shape.key_heads * shape.key_dim, shape.key_dim
    x, b = torch.cat(parts[:3], dim=1), parts[3]
    projected = Projected(x, net.decays(parts), b, (0, dim), (keys, dim), (2 * keys, dim), rate_stride=1)
    channels, bias = (0, keys, 2 * keys), module.forget_gate.dt_bias
    taps = module.conv1d.weight[:, 0]
    weights = ScanWeights(taps, None, channels, net.a_log, bias, gate=net.gate)
    out = _scanned(projected, weights, None, shape, stand)
    gates = net.gates(parts)  # now, as a prompt's take much memory
    return gated_norm(out, gates, (0, dim), 1, norm.weight, norm.variance_epsilon, sigmoid=True)


def _state_space(net: StateSpaceNet, projected: Tensor, stand: Stand) -> Tensor:
    module, shape, norm = net.module, net.shape, net.module.norm
    gate, x, dt = net.parts(projected)
    values, keys = shape.values, shape.key_heads * shape.key_dim
    dk, dv = shape.key_dim, shape.group * shape.value_dim
    places = (values + keys, dk), (values, dk), (0, dv)  # of C, B and x
    channels = values + keys, values, 0
    convolution = module.conv1d.weight[:, 0], module.conv1d.bias
    weights = ScanWeights(*convolution, channels, module.A_log, module.dt_bias, net.limits)
    out = _scanned(Projected(x, dt, None, *places, shape.group), weights, module.D, shape, stand)
    return group_norm(out.flatten(1), gate, norm.weight, shape.key_heads, norm.variance_epsilon)


def _scanned(
    projected: Projected, weights: ScanWeights, skip: Tensor | None, shape: ScanShape, stand: Stand
) -> Tensor:
    inputs = scan_inputs(projected, weights, shape, stand.memory, stand.places, stand.kind)
    rows = projected.x.shape[0]
    return scan(inputs, skip, shape, stand.memory, stand.places, stand.live, rows, stand.kind)


def _short_conv(net: ShortConvNet, projected: Tensor, stand: Stand) -> Tensor:
    convolution = net.module.conv.weight[:, 0], net.module.conv.bias
    return short_conv(projected, *convolution, net.shape, stand.memory, stand.places, stand.live, stand.kind)


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
