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

from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.add import add
from localmoe.kernels.gpu.linear import gemv_gated, linear_gated
from localmoe.kernels.gpu.packed_linear import packed_linear, packed_row
from localmoe.model.delta_net import DeltaNet
from localmoe.model.device_linear import KernelMode, join_rows
from localmoe.model.device_shared_experts import (
    SharedBeside,
    forward_names,
    has_gated_shared_expert,
    has_plain_shared_experts,
    shared_expert_forward,
)
from localmoe.model.device_trials import norm_trial, rope_trial, router_trial, settle
from localmoe.model.packed_head import packed_weight_of
from localmoe.model.side_stream import SideStream

_DECODER_NAMES = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
# of one that attends linearly in some layers
_MIXED_NAMES = _DECODER_NAMES | {"linear_attn", "isinstance", "tuple"}
_KIND_NAMES = ({"block_type"}, {"layer_type"})
_MLP_NAMES = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SILU = Activation("silu")


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
        net = DeltaNet.of(module)
        if net is not None:
            mode.fuse(net.projections)
        if _is_gated_mlp(module):
            _replace_mlp(module, mode)
        if packed_weight_of(module) is not None:
            _replace_packed(module, mode)
        if has_gated_shared_expert(module):
            module.forward = partial(shared_expert_forward, module, side)
    settle([trial for trial in trials if trial is not None], stop)
    for module in list(model.modules()):  # once the norms and the shared experts have their kernels
        if has_plain_shared_experts(module):
            SharedBeside(module, side)
        if _is_decoder_layer(module) and _has_kernel(module.post_attention_layernorm):
            module.forward = partial(_decoder_forward, module)
    return mode


def _is_decoder_layer(module: nn.Module) -> bool:
    names = forward_names(module)
    return names == _DECODER_NAMES or any(names == _MIXED_NAMES | kind for kind in _KIND_NAMES)


def _has_kernel(norm: nn.Module) -> bool:
    return hasattr(norm, "localmoe_norm")


def _decoder_forward(
    layer: Any, hidden_states: Tensor, attention_mask: Any = None, **for_attention: Any
) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x)), the first sum in one kernel with the norm after it."""
    normed = layer.input_layernorm(hidden_states)
    attend = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
    attended = attend(hidden_states=normed, attention_mask=attention_mask, **for_attention)
    attended = attended[0] if isinstance(attended, tuple) else attended
    normed, residual = layer.post_attention_layernorm.localmoe_norm(attended, hidden_states)
    out = layer.mlp(normed)
    return add(residual, (out[0] if isinstance(out, tuple) else out).contiguous())


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


# -- gated MLPs


def _is_gated_mlp(module: Any) -> bool:
    if forward_names(module) != _MLP_NAMES or not isinstance(module.act_fn, nn.Module):
        return False
    parts = (module.gate_proj, module.up_proj, module.down_proj)
    if not all(isinstance(part, nn.Linear) for part in parts) or module.gate_proj.bias is not None:
        return False
    x = torch.linspace(-8, 8, 97)
    return bool(torch.allclose(module.act_fn(x), nn.functional.silu(x), atol=1e-6))


def _replace_mlp(module: Any, mode: KernelMode) -> None:
    weight = join_rows([module.gate_proj.weight, module.up_proj.weight])

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        run = gemv_gated if mode.one_row and rows.shape[0] == 1 else linear_gated
        out: Tensor = module.down_proj(run(rows, weight, activation=_SILU))
        return out.view(*x.shape[:-1], out.shape[-1])

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
