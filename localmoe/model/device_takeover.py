"""Hand a model's experts and attention to the GPU's kernels, which read positions on the device. See takeover
for the rest. Decides nothing about where experts come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from localmoe.kernels.gpu.attention import attention
from localmoe.model.device_latent import Latent, attend_in_latent_space, expanded
from localmoe.model.device_window import DeviceWindow
from localmoe.model.kv_trial import Visible, visible
from localmoe.model.skeleton import Skeleton
from localmoe.model.takeover import ExpertLayer, take_over

DEVICE_ATTENTION = "localmoe-device"


def take_over_device(skeleton: Skeleton, layers: Sequence[ExpertLayer], window: DeviceWindow) -> None:
    """Route the model's experts to `layers` and its attention to the kernels, which need a DeviceKVCache.

    Raises:
        UnsupportedModelError: the architecture does not let its attention or experts be replaced.
    """
    ALL_ATTENTION_FUNCTIONS.register(DEVICE_ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(DEVICE_ATTENTION, visible)
    take_over(skeleton, layers, attention=DEVICE_ATTENTION)
    for module in skeleton.model.modules():
        if hasattr(module, "layer_idx"):
            module.localmoe_window = window
            attend_in_latent_space(module)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, heads, T, D) in, (1, T, heads, D) out. Where a module attends in
    latent space, key and value are its latent vectors and rotated keys."""
    window: DeviceWindow = module.localmoe_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent: Latent | None = getattr(module, "localmoe_latent", None)
    if latent is not None:
        if attention_mask.window is None and softcap is None and s_aux is None:
            out = latent.attend(query, key, value, window.at, scale, window.visible)
            return out[None], None
        key, value = expanded(module, key, value)
    start, length, unrolled = window.at, window.visible, window.unrolled
    if attention_mask.window is not None and unrolled is not None:
        start, length = unrolled.start, unrolled.length
    out = attention(
        query,
        key,
        value,
        start,
        scale=scale,
        max_length=length,
        window=attention_mask.window,
        softcap=softcap,
        sinks=s_aux,
        until=None if attention_mask.window is None else window.until,
    )
    return out[None], None
