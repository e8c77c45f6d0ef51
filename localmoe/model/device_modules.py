"""Give a transformers model fused GPU kernels for what lies around its experts: norms, routers, gated MLPs,
rotary embedding, residual sums. A module is replaced only if the kernel computes what the module itself
computes on a trial, decoder layers and gated shared experts by what their forward names; whatever is not
recognised keeps its own code. Knows no architecture by name.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.gpu.packed_linear import packed_linear, packed_row
from localmoe.model.device_decoders import fuse_decoder_layer
from localmoe.model.device_linear import KernelMode
from localmoe.model.device_mlps import replace_gated_mlp
from localmoe.model.device_rotations import rope_trials
from localmoe.model.device_routers import router_trial
from localmoe.model.device_sandwiches import fuse_sandwich
from localmoe.model.device_scaled_routers import scaled_router_trial
from localmoe.model.device_shared_experts import (
    SharedBeside,
    has_gated_shared_expert,
    has_plain_shared_experts,
    shared_expert_forward,
)
from localmoe.model.device_trials import norm_trial, settle
from localmoe.model.packed_head import packed_weight_of
from localmoe.model.recurrent_nets import recurrent_net
from localmoe.model.rotary import tabulate
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
    first = next(model.parameters())
    side = SideStream(first.device)
    like = torch.empty(0, dtype=getattr(model, "dtype", first.dtype), device=first.device)
    for module in list(model.modules()):
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            trials.append(norm_trial(module, like))
        elif name.endswith("RotaryEmbedding"):
            tabulate(module, context, model.dtype)
        elif "Router" in name or name.endswith("Gate"):
            trials.append(router_trial(module, model.dtype) or scaled_router_trial(module))
        trials += rope_trials(module)
        net = recurrent_net(module)
        linears = _projections(module) if net is None else net.projections
        if len(linears) > 1 and len({linear.bias is None for linear in linears}) == 1:
            mode.fuse(linears)
        replace_gated_mlp(module, mode)
        if packed_weight_of(module) is not None:
            _replace_packed(module, mode)
        if has_gated_shared_expert(module):
            module.forward = partial(shared_expert_forward, module, side)
    settle([trial for trial in trials if trial is not None], stop)
    mode.others = any(map(_sums_by_itself, model.modules()))
    for module in list(model.modules()):  # once the norms and the shared experts have their kernels
        if has_plain_shared_experts(module):
            SharedBeside(module, side)
        fuse_decoder_layer(module, side)
        fuse_sandwich(module, side)
    return mode


def _sums_by_itself(module: nn.Module) -> bool:
    """Whether a norm kept its own code, in which PyTorch may sum a long row otherwise where there are
    more."""
    usual = isinstance(module, nn.LayerNorm | nn.RMSNorm)  # one kernel each, a row at a time
    return type(module).__name__.endswith("Norm") and not usual and "forward" not in vars(module)


def _projections(module: Any) -> list[nn.Linear]:
    """Of an attention module's input, all of them; where keys are values, there is none of the latter, and
    where they are kept as latent vectors, one of both."""
    latent = getattr(module, "kv_a_proj_with_mqa", None)
    if isinstance(latent, nn.Linear):
        query = getattr(module, "q_a_proj", None) or getattr(module, "q_proj", None)
        return [query, latent] if isinstance(query, nn.Linear) else []
    parts = [getattr(module, part, None) for part in ("q_proj", "k_proj", "v_proj")]
    found = [part for part in parts if isinstance(part, nn.Linear)]
    return found if len(found) == 3 or (len(found) == 2 and parts[2] is None) else []


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
