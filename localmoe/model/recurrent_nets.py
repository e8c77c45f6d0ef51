"""Which layers of a transformers model keep recurrent state that can be kept on a GPU: found by the names of
their parts, and believed if a small one of their class computes, on a trial, what its reference says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from localmoe.model.channel_delta_net import ChannelDeltaNet
from localmoe.model.delta_net import DeltaNet
from localmoe.model.short_conv_net import ShortConvNet
from localmoe.model.skeleton import (
    KEYS_AND_VALUES,
    RECURRENT_LAYER_TYPES,
    Skeleton,
    cached_layers,
    layer_types,
)
from localmoe.model.state_space_net import StateSpaceNet

RecurrentNet = DeltaNet | ChannelDeltaNet | StateSpaceNet | ShortConvNet
_TRIAL_ROWS = 7
_SAME = 1e-4  # relative error of float32 sums in other orders


def recurrent_net(module: nn.Module) -> RecurrentNet | None:
    """What it is; None if it is of no known form."""
    known = (DeltaNet, ChannelDeltaNet, StateSpaceNet, ShortConvNet)
    found = (kind.of(module) for kind in known)
    return next((net for net in found if net is not None), None)


def recurrent_nets(model: nn.Module) -> dict[int, RecurrentNet]:
    """By decoder layer."""
    found = ((module, recurrent_net(module)) for module in model.modules() if hasattr(module, "layer_idx"))
    return {int(module.layer_idx): net for module, net in found if net is not None}  # type: ignore[arg-type]


def keeps_known_state(skeleton: Skeleton) -> bool:
    """Whether all recurrent state of the model is that of such layers, alike, and all else is keys and
    values."""
    text, nets = skeleton.text_config, recurrent_nets(skeleton.model)
    recurrent = {layer for layer, kind in enumerate(layer_types(text)) if kind in RECURRENT_LAYER_TYPES}
    if not nets or recurrent != nets.keys() or len({(type(net), net.kind) for net in nets.values()}) > 1:
        return False
    for index, kept in cached_layers(text).items():
        if type(kept) not in KEYS_AND_VALUES and index not in nets:
            return False
        if getattr(kept, "number_of_states", 1) > 1:  # of other modules of the layer
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
def _computes_alike(net: RecurrentNet, text_config: Any) -> bool:
    """Whether the module's class, with few channels and float32 weights, gives what the reference gives."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _quiet():
        torch.default_generator.manual_seed(0)  # the CPU's alone
        try:
            config = copy.deepcopy(text_config)
            for name, value in {**net.small_sizes(), "dtype": None}.items():
                setattr(config, name, value)
            module = type(net.module)(config, net.module.layer_idx).float().eval()
            for parameter in module.parameters():
                if parameter.numel() == max(parameter.shape):  # what begins as all ones would tell nothing
                    parameter.normal_(0.7, 0.3)
            small = recurrent_net(module)
            hidden = torch.randn(1, _TRIAL_ROWS, config.hidden_size, dtype=torch.float32)
            wanted = module(hidden)[0]
            if type(small) is not type(net) or small is None:
                return False
            got = small.reference(hidden[0])
            module.bfloat16()
            if isinstance(small, ChannelDeltaNet) and not small.rounds_as_said(hidden.bfloat16()):
                return False
        except Exception:  # any line of any architecture
            return False
    return got.shape == wanted.shape and bool((got - wanted).norm() <= _SAME * wanted.norm())
