"""An input embedding whose rows come from elsewhere than its table, whatever its class does with them
besides. Decides neither where they come from nor for which models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

Lookup = Callable[[Tensor], Tensor]  # int64 (..., T) -> (..., T, H)


class _LookedUp(nn.Embedding):
    """Stands before nn.Embedding among the classes of a module, so that `super().forward` of the
    architecture's own class comes here."""

    localmoe_lookup: Lookup

    def forward(self, ids: Tensor) -> Tensor:
        return self.localmoe_lookup(ids)


def look_up(module: nn.Embedding, lookup: Lookup) -> None:
    """From now on its rows come from there; its table may go."""
    kind = type(module)
    bases = (_LookedUp,) if kind is nn.Embedding else (kind, _LookedUp)
    module.__class__ = type(kind.__name__, bases, {})
    assert isinstance(module, _LookedUp)
    module.localmoe_lookup = lookup


def looks_up_by_table(module: nn.Module) -> bool:
    """Whether an embedding, on any device, reads its table by nn.Embedding's own forward alone, as is
    tried on the meta device."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    asked: list[Tensor] = []

    def rows(ids: Tensor) -> Tensor:
        asked.append(ids)
        return torch.empty(*ids.shape, module.embedding_dim, dtype=module.weight.dtype, device="meta")

    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(module.weight.to("meta"), requires_grad=False)}
    tried._buffers = {
        name: None if buffer is None else buffer.to("meta") for name, buffer in module._buffers.items()
    }
    look_up(tried, rows)
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        out = tried(ids)
    except Exception:  # any line of any architecture
        return False
    return len(asked) == 1 and asked[0] is ids and tuple(out.shape) == (1, 2, module.embedding_dim)
