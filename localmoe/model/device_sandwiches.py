"""Decoder layers on the GPU whose parts have a norm before and behind them, with a dense MLP beside the
routed experts (Gemma 4): what lies between in two kernels, the MLP on a stream of its own. Known
by what their forward names.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from localmoe.kernels.gpu.sandwich import enter_feed_forward, leave_feed_forward
from localmoe.model.device_shared_experts import forward_names
from localmoe.model.side_stream import SideStream, beside

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
    norms = [getattr(module, name) for name in _NORMS]
    if not all(hasattr(norm, "localmoe_norm") for norm in norms):
        return
    kernels = [norm.localmoe_norm.keywords for norm in norms]
    if any(kernel["offset"] != 0.0 for kernel in kernels) or not hasattr(module.router, "localmoe_choose"):
        return
    if len({module.router.norm.eps, *(kernel["eps"] for kernel in kernels)}) == 1:
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
    mixed = layer.self_attn(hidden_states=normed, **for_mixer)[0]
    router, eps = layer.router, layer.router.norm.eps
    before = (
        layer.pre_feedforward_layernorm.weight, layer.pre_feedforward_layernorm_2.weight, router.scale
    )  # fmt: skip
    width = hidden_states.shape[-1]
    residual, for_dense, for_routed, for_scores = enter_feed_forward(
        mixed.reshape(-1, width), hidden_states.reshape(-1, width), layer.post_attention_layernorm.weight,
        before, eps, float(router.scalar_root_size),
    )  # fmt: skip
    with beside(side, len(residual)):
        dense = layer.mlp(for_dense)
    weights, index, _ = router.localmoe_choose(for_scores)
    routed = layer.experts(for_routed, index, weights)
    side.join()
    behind = (
        layer.post_feedforward_layernorm_1.weight, layer.post_feedforward_layernorm_2.weight,
        layer.post_feedforward_layernorm.weight,
    )  # fmt: skip
    out = leave_feed_forward(dense, routed.view_as(dense), residual, behind, eps, layer.layer_scalar)
    return out.view_as(hidden_states)
