"""Register localmoe's functions with transformers and hand a model's experts and attention to them.

After `take_over`, every routed-expert computation of the model calls the object given for its layer, and
attention goes through kernels.attention. Decides nothing about where experts come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from localmoe.core.errors import UnsupportedModelError
from localmoe.kernels.attention import blocked_attention
from localmoe.model.expert_module import weight_names
from localmoe.model.image_rows import ImageRows
from localmoe.model.skeleton import Skeleton

NAME = "localmoe"


class AttentionKernel(Protocol):
    """Attention of one sequence."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, *,
        softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """As kernels.attention.blocked_attention."""


class ExpertLayer(Protocol):
    """Computes one MoE layer's routed experts."""

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H), (T, K), (T, K) -> (T, H)."""


def take_over(skeleton: Skeleton, layers: Sequence[ExpertLayer], *, attention: str | None = NAME) -> None:
    """Route the model's experts to `layers` (one a MoE layer, in order) and drop the fused expert parameters.

    Args:
        attention: name of the attention function to use: this file's goes through kernels.attention, which
            needs a model.kv_cache.KVCache; None keeps the model's own.

    Raises:
        UnsupportedModelError: the architecture does not let its attention or experts be replaced.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    for experts, layer in zip(skeleton.experts, layers, strict=True):
        experts.module.localmoe_layer = layer  # type: ignore[assignment]
        for name in weight_names(experts.module):
            empty = torch.empty_like(experts.module._parameters[name], device="meta")  # type: ignore[arg-type]
            experts.module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    try:
        skeleton.model.set_experts_implementation(NAME)
        if attention is not None:
            skeleton.model.set_attn_implementation(attention)
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{skeleton.config.model_type} does not let its attention or experts be replaced: {error}"
        ) from error


def attend_with(model: nn.Module, kernel: AttentionKernel) -> None:
    """Have a model's attention computed by `kernel` from now on, where it goes through this file's."""
    for module in model.modules():
        if hasattr(module, "is_causal"):  # as whatever attends says of itself
            module.localmoe_attend = kernel  # type: ignore[assignment]


def _experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    out: Tensor = module.localmoe_layer(hidden, top_k_index, top_k_weights)
    return out


def _mask(*args: Any, **kwargs: Any) -> Tensor:
    """A boolean mask (1, 1, T, L), never skipped: the cache hands out whole blocks, whose tail it must
    hide."""
    kwargs["allow_is_causal_skip"] = False
    kwargs["allow_is_bidirectional_skip"] = False
    mask: Tensor = sdpa_mask(*args, **kwargs)
    return mask


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, heads, T, D) in, (1, T, heads, D) out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend: AttentionKernel = getattr(module, "localmoe_attend", blocked_attention)
    images: ImageRows | None = getattr(module, "localmoe_images", None)
    mask = attention_mask[0] if images is None else images.widened(attention_mask[0], module.sliding_window)
    out = attend(query[0], key[0], value[0], mask, scale, softcap=softcap, sinks=s_aux)
    return out[None], None
