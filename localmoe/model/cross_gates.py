"""What the target's gates make of a draft model's hidden states: SP-MoE's cross-model predictor (Chen et al.
2025, 3.1.1). Changes nothing that either model computes, and prefetches nothing.

The gate of the target's layer l reads what the feed-forward of the draft's layer l reads: its attention
output, residual added and normalised. That needs models of one family: as many layers, as wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from localmoe.model.draft_model import DraftModel
from localmoe.model.next_gate import Gate
from localmoe.model.skeleton import Skeleton

_FEED_FORWARD = ("mlp", "block_sparse_moe", "feed_forward")
Listener = Callable[[int, list[int], list[float]], None]  # MoE layer, experts, router weights


def why_no_routing(draft: DraftModel, skeleton: Skeleton, gates: Sequence[Gate | None]) -> str:
    """Why nothing can be told of the target's routing; "" if it can."""
    shape, text = draft.shape, skeleton.text_config
    if shape.hidden_size != int(text.hidden_size):
        return f"its hidden size is {shape.hidden_size} and the target's {int(text.hidden_size)}"
    if shape.num_layers != int(text.num_hidden_layers):
        return f"it has {shape.num_layers} layers and the target {int(text.num_hidden_layers)}"
    if not any(gate is not None for gate in gates) or any(part is None for part in _feed_forwards(draft)):
        return f"{draft.model.config.model_type} is built otherwise"
    return ""


class CrossGates:
    """Listens to a draft model's passes. Make it only where `why_no_routing` is ""."""

    def __init__(self, draft: DraftModel, skeleton: Skeleton, gates: Sequence[Gate | None]) -> None:
        self.listener: Listener | None = None  # told of the last token of each pass, layer by layer
        parts = _feed_forwards(draft)
        for layer, experts in enumerate(skeleton.experts):
            gate, part = gates[layer], parts[experts.decoder_layer]
            if gate is not None and part is not None:
                part.register_forward_pre_hook(self._hook(layer, gate), with_kwargs=True)

    def _hook(self, layer: int, gate: Gate) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def tell(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self.listener is None:
                return
            hidden: Tensor = next(iter((*arguments, *named.values())))
            weights, experts = gate(hidden.reshape(-1, hidden.shape[-1])[-1:])
            self.listener(layer, experts[0].tolist(), weights[0].tolist())

        return tell


def _feed_forwards(draft: DraftModel) -> list[nn.Module | None]:
    """The feed-forward of each decoder layer."""
    layers = getattr(draft.model.get_decoder(), "layers", ())
    return [
        next((part for name in _FEED_FORWARD if (part := getattr(layer, name, None)) is not None), None)
        for layer in layers
    ]
