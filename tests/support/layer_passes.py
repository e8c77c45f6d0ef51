"""What goes through the decoder layers of transformers' own models, and what their experts are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from localmoe.model.layerwise import RoutedTokens


@contextmanager
def watched(model: Any) -> Iterator[tuple[list[Tensor], dict[str, RoutedTokens]]]:
    """What leaves each decoder layer of transformers' model, and what each of its experts modules is
    asked, in one pass."""
    left: list[Tensor] = []
    asked: dict[str, RoutedTokens] = {}
    hooks = []

    def note_layer(module: Any, args: Any, out: Any) -> None:
        left.append((out[0] if isinstance(out, tuple) else out).clone())

    def noting(path: str) -> Callable[[Any, Any], None]:
        def note(module: Any, args: Any) -> None:
            hidden, index, weights = args
            asked[path] = RoutedTokens(hidden.clone(), index.clone(), weights.clone())

        return note

    for layer in model.model.layers:
        hooks.append(layer.register_forward_hook(note_layer))
    for path, module in model.named_modules():
        if path.endswith("experts") and hasattr(module, "is_transposed"):
            hooks.append(module.register_forward_pre_hook(noting(path)))
    try:
        yield left, asked
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def passes(
    model: Any, tokens: Tensor, batch: int
) -> tuple[list[Tensor], list[Tensor], dict[str, RoutedTokens]]:
    """Of transformers' model, by layer (S, length, H): what leaves it; what its experts are asked by all
    batches; and the last hidden states before the head."""
    layers: list[list[Tensor]] = []
    routed: list[dict[str, RoutedTokens]] = []
    final = []
    for part in tokens.split(batch):
        with watched(model) as (left, asked):
            final.append(model.base_model(input_ids=part, use_cache=False).last_hidden_state)
        layers.append(left)
        routed.append(asked)
    together = {
        path: RoutedTokens(*(torch.cat([getattr(asked[path], name) for asked in routed]) for name in
                             ("hidden", "index", "weights")))
        for path in routed[0]
    }  # fmt: skip
    return [torch.cat(parts) for parts in zip(*layers, strict=True)], final, together
