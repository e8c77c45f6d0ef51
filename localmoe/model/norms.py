"""Where a model's RMS norms keep what they multiply with. Knows no architecture by name."""

from __future__ import annotations

from torch import Tensor, nn


def norm_parts(module: nn.Module) -> tuple[Tensor, float] | None:
    """Weight (N,) and epsilon of a norm; None where it has none by the usual names, or no weights yet."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or weight.dim() != 1 or weight.is_meta:
        return None
    return weight, float(eps)
