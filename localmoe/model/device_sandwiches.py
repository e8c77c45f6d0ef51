"""Decoder layers on the GPU whose parts have a norm before and behind them, with a dense MLP beside the
routed experts (Gemma 4): sums in one kernel with the norm that follows, the MLP on a stream of its own. Known
by what their forward names.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from localmoe.kernels.gpu.add import add
from localmoe.model.device_shared_experts import MOST_BESIDE, forward_names
from localmoe.model.side_stream import SideStream

_NORMS = {
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
}  # fmt: skip
_PARTS = {"self_attn", "mlp", "router", "experts", "layer_scalar", "enable_moe_block"}
_SHAPES = {"reshape", "shape"}
# of another form, which a layer says that it has not
_PER_LAYER = {
    "hidden_size_per_layer_input", "per_layer_input_gate", "act_fn", "per_layer_projection",
    "post_per_layer_input_norm",
}  # fmt: skip


def fuse_sandwich(module: Any, side: SideStream) -> None:
    """Do so if the module is one, and its norms and its router have kernels."""
    if forward_names(module) != _NORMS | _PARTS | _SHAPES | _PER_LAYER:
        return
    if not module.enable_moe_block or module.hidden_size_per_layer_input:
        return
    fused = all(hasattr(getattr(module, name), "localmoe_norm") for name in _NORMS)
    if fused and hasattr(module.router, "localmoe_choose"):
        module.forward = partial(_forward, module, side)


def _forward(
    layer: Any,
    side: SideStream,
    hidden_states: Tensor,
    per_layer_input: Tensor | None = None,
    **for_mixer: Any,
) -> Tensor:
    assert per_layer_input is None, "the layer has none"
    normed = layer.input_layernorm(hidden_states)
    mixed = layer.post_attention_layernorm(layer.self_attn(hidden_states=normed, **for_mixer)[0])
    normed, residual = layer.pre_feedforward_layernorm.localmoe_norm(mixed, hidden_states)
    rows = residual.view(-1, residual.shape[-1])
    if len(rows) > MOST_BESIDE:
        dense = _dense(layer, normed)
    else:
        with side:
            dense = _dense(layer, normed)
    weights, index, _ = layer.router.localmoe_choose(rows)
    routed = layer.experts(layer.pre_feedforward_layernorm_2(rows), index, weights)
    routed = layer.post_feedforward_layernorm_2(routed.view(residual.shape))
    side.join()
    found, _ = layer.post_feedforward_layernorm.localmoe_norm(dense, routed)
    return add(residual, found, factor=layer.layer_scalar)


def _dense(layer: Any, x: Tensor) -> Tensor:
    out: Tensor = layer.post_feedforward_layernorm_1(layer.mlp(x))
    return out
