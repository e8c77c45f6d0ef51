"""Take out what localmoe has put into a transformers model's modules, and all that hangs on it."""

from __future__ import annotations

from torch import nn

# attributes of modules; those of their classes come to light again
_OURS = (
    "forward", "expand_kv", "localmoe_attend", "localmoe_latent", "localmoe_norm", "localmoe_window",
    "localmoe_layer", "localmoe_choose",
)  # fmt: skip


def uninstall(model: nn.Module) -> None:
    """So that nothing keeps replaced weights, tables or slots."""
    for module in model.modules():
        for name in _OURS:
            vars(module).pop(name, None)
