"""How wide a model's attention heads are, which layers may not agree about. Decides nothing."""

from __future__ import annotations

from localmoe.model.skeleton import Skeleton


def head_widths(skeleton: Skeleton) -> set[int]:
    """Dimensions of a query or key in each kind of attention layer; by the modules, as a config need not have
    one number for all."""
    found: set[int] = set()
    for module in skeleton.model.modules():
        if hasattr(module, "layer_idx"):
            width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
            found |= {width} if type(width) is int else set()
    text = skeleton.text_config
    return found or {int(text.hidden_size) // int(text.num_attention_heads)}
