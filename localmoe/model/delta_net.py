"""Linear attention by the gated delta rule in a transformers model: found by the names of a module's parts,
and believed if a small one of its class computes, on a trial, what kernels.delta_rule says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from localmoe.kernels.delta_rule import (
    DeltaShape,
    reference_delta_inputs,
    reference_delta_rule,
    reference_gated_norm,
)
from localmoe.model.skeleton import RECURRENT_LAYER_TYPES, Skeleton

_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
_APART, _GROUPED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")
_SMALL = {
    "hidden_size": 48,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_TRIAL_ROWS = 7
_SAME = 1e-4  # relative error of float32 sums in other orders
_WIDEST = 256  # of a head, which one program holds a row of


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A module of a decoder layer. grouped: what belongs to a key head lies together in its projections."""

    module: Any
    shape: DeltaShape
    grouped: bool

    @classmethod
    def of(cls, module: nn.Module) -> DeltaNet | None:
        """None where the module has other parts."""
        sizes = [getattr(module, name, None) for name in _SIZES]
        convolution, norm = getattr(module, "conv1d", None), getattr(module, "norm", None)
        grouped = isinstance(getattr(module, _GROUPED[0], None), nn.Linear)
        names = (*(_GROUPED if grouped else _APART), "out_proj")
        if not all(type(size) is int for size in sizes) or getattr(module, "activation", "") != "silu":
            return None
        if not all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return None
        if not isinstance(convolution, nn.Conv1d) or not hasattr(norm, "variance_epsilon"):
            return None
        shape = DeltaShape(*sizes)  # type: ignore[arg-type]
        dims = shape.key_dim, shape.value_dim
        fits = all(16 <= size <= _WIDEST and size & (size - 1) == 0 for size in dims)
        plain = convolution.bias is None and not any(
            getattr(module, name).bias is not None for name in names[:-1]
        )
        if not fits or not plain or shape.value_heads % shape.key_heads or not 2 <= shape.taps <= 8:
            return None
        return cls(module, shape, grouped)

    @property
    def projections(self) -> list[nn.Linear]:
        """Of its input."""
        return [getattr(self.module, name) for name in (_GROUPED if self.grouped else _APART)]

    def reference(self, hidden: Tensor) -> Tensor:
        """(T, H) -> (T, H) of a text that begins with it."""
        module, shape = self.module, self.shape
        x, z, b, a = self._parts(hidden)
        before = x.new_zeros(shape.taps - 1, shape.channels)
        inputs = reference_delta_inputs(
            x, before, module.conv1d.weight[:, 0], a, b, module.A_log, module.dt_bias
        )
        state = torch.zeros(shape.value_heads, shape.value_dim, shape.key_dim, device=x.device)
        out, _ = reference_delta_rule(inputs, state, shape)
        normed = reference_gated_norm(out, z, module.norm.weight, module.norm.variance_epsilon)
        projected: Tensor = module.out_proj(normed.flatten(1))
        return projected

    def _parts(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Channels (T, C), gates (T, value_heads, value_dim), b and a (T, value_heads)."""
        shape, found = self.shape, [linear(hidden) for linear in self.projections]
        heads = shape.value_heads, shape.value_dim
        if not self.grouped:
            x, z, b, a = found
            return x, z.unflatten(1, heads), b, a
        values = shape.group * shape.value_dim
        groups = found[0].unflatten(1, (shape.key_heads, -1))
        q, k, v, z = groups.split((shape.key_dim, shape.key_dim, values, values), dim=2)
        b, a = (part.flatten(1) for part in found[1].unflatten(1, (shape.key_heads, -1)).chunk(2, dim=2))
        x = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
        return x, z.flatten(1).unflatten(1, heads), b, a


def delta_nets(model: nn.Module) -> dict[int, DeltaNet]:
    """By decoder layer."""
    found = ((module, DeltaNet.of(module)) for module in model.modules() if hasattr(module, "layer_idx"))
    return {int(module.layer_idx): net for module, net in found if net is not None}  # type: ignore[arg-type]


def is_delta_recurrent(skeleton: Skeleton) -> bool:
    """Whether all recurrent state of the model is that of such layers, alike, and all else is keys and
    values."""
    text, nets = skeleton.text_config, delta_nets(skeleton.model)
    types = getattr(text, "layer_types", None) or ()
    recurrent = {layer for layer, kind in enumerate(types) if kind in RECURRENT_LAYER_TYPES}
    if not nets or recurrent != nets.keys() or len({(net.shape, net.grouped) for net in nets.values()}) > 1:
        return False
    others = [
        layer
        for index, layer in enumerate(transformers.DynamicCache(config=text).layers)
        if index not in nets
    ]
    if not all(getattr(layer, "is_croppable", hasattr(layer, "crop")) for layer in others):
        return False
    return all(
        _computes_alike(net, text) for net in {type(net.module): net for net in nets.values()}.values()
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice on what else to install."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@torch.no_grad()
def _computes_alike(net: DeltaNet, text_config: Any) -> bool:
    """Whether the module's class, with few channels and float32 weights, gives what the reference gives."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _quiet():
        torch.default_generator.manual_seed(0)  # the CPU's alone
        try:
            config = copy.deepcopy(text_config)
            sizes = {**_SMALL, "linear_num_value_heads": 2 * net.shape.group, "dtype": None}
            for name, value in sizes.items():
                setattr(config, name, value)
            module = type(net.module)(config, net.module.layer_idx).float().eval()
            module.norm.weight.normal_(1.0, 0.2)
            module.dt_bias.normal_(0.0, 0.5)
            small = DeltaNet.of(module)
            hidden = torch.randn(1, _TRIAL_ROWS, _SMALL["hidden_size"])
            wanted = module(hidden)[0]
        except Exception:  # any line of any architecture
            return False
        if small is None or small.grouped != net.grouped:
            return False
        got = small.reference(hidden[0])
    return got.shape == wanted.shape and bool((got - wanted).norm() <= _SAME * wanted.norm())
