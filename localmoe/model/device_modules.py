"""Give a transformers model fused GPU kernels for what lies around its experts: norms, routers, gated MLPs,
rotary embedding, residual sums. A module is replaced only if the kernel computes what the module itself
computes on a trial, decoder layers and gated shared experts by what their forward names; whatever is not
recognised keeps its own code. Knows no architecture by name.
"""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.gpu.packed_linear import packed_linear, packed_row
from localmoe.model.device_decoders import fuse_decoder_layer
from localmoe.model.device_linear import KernelMode
from localmoe.model.device_mlps import replace_gated_mlp
from localmoe.model.device_routers import router_trial
from localmoe.model.device_shared_experts import (
    SharedBeside,
    has_gated_shared_expert,
    has_plain_shared_experts,
    shared_expert_forward,
)
from localmoe.model.device_trials import norm_trial, rope_trial, settle
from localmoe.model.packed_head import packed_weight_of
from localmoe.model.recurrent_nets import recurrent_net
from localmoe.model.side_stream import SideStream


def install(model: Any, context: int, stop: threading.Event | None = None) -> KernelMode:
    """Replace what is recognised; returns the mode in which the model has to run.

    A linear layer whose weight is packed cannot run without its kernel.

    Args:
        model: with its shared weights on the device, in 16 bits.
        context: positions that the rotary embedding is tabulated for.
        stop: ends it early.

    Raises:
        CompilingStopped: `stop` was set.
    """
    mode, trials = KernelMode(), []
    side = SideStream(next(model.parameters()).device)
    for module in list(model.modules()):
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            trials.append(norm_trial(module))
        elif name.endswith("RotaryEmbedding"):
            _tabulate_rotary(module, context, model.dtype)
        elif "Router" in name:
            trials.append(router_trial(module, model.dtype))
        if all(isinstance(getattr(module, part, None), nn.Linear) for part in ("q_proj", "k_proj", "v_proj")):
            linears = [module.q_proj, module.k_proj, module.v_proj]
            if len({linear.bias is None for linear in linears}) == 1:
                mode.fuse(linears)
            trials.append(rope_trial(module))
        net = recurrent_net(module)
        if net is not None and len(net.projections) > 1:
            mode.fuse(net.projections)
        replace_gated_mlp(module, mode)
        if packed_weight_of(module) is not None:
            _replace_packed(module, mode)
        if has_gated_shared_expert(module):
            module.forward = partial(shared_expert_forward, module, side)
    settle([trial for trial in trials if trial is not None], stop)
    for module in list(model.modules()):  # once the norms and the shared experts have their kernels
        if has_plain_shared_experts(module):
            SharedBeside(module, side)
        fuse_decoder_layer(module, side)
    return mode


# -- rotary embedding


def _tabulate_rotary(module: nn.Module, context: int, dtype: torch.dtype) -> None:
    """Angles of all positions once. An embedding that depends on the length of the text so becomes that of
    the engine's context, for every token alike."""
    on_host = copy.deepcopy(module).cpu()  # as of routers
    tables: dict[tuple[Any, ...], Any] = {}

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        coordinates = position_ids.shape[:-1]  # of a place, and the batch; those of a text are all alike
        key = (x.device, coordinates, *args, *sorted(kwargs.items()))
        if key not in tables:
            all_places = torch.arange(context).expand(*coordinates, context)
            found = on_host(torch.empty(0, dtype=dtype), all_places, *args, **kwargs)
            parts = found if isinstance(found, tuple) else (found,)
            parts = tuple(part.to(x.device) for part in parts)
            tables[key] = parts if isinstance(found, tuple) else parts[0]
        found = tables[key]
        places = position_ids.reshape(-1, position_ids.shape[-1])[0]
        if isinstance(found, tuple):
            return tuple(part.index_select(1, places) for part in found)
        return found.index_select(1, places)

    module.forward = forward


# -- packed layers


def _replace_packed(module: Any, mode: KernelMode) -> None:
    """What the kernels read is the module's own, so that it goes with the model."""

    def forward(x: Tensor) -> Tensor:
        weight = packed_weight_of(module)
        assert weight is not None, "the model is closed"
        rows = x.reshape(-1, x.shape[-1])
        run = packed_row if mode.one_row and rows.shape[0] == 1 else packed_linear
        return run(rows, weight, module.bias).view(*x.shape[:-1], weight.rows)

    module.forward = forward
