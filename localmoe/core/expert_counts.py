"""How many tokens of a pass ask for each expert. Knows no pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def tokens_of(experts: NDArray[np.int32], num_experts: int) -> NDArray[np.int64]:
    """int (L, E): how many of these tokens (n, L, K) ask for each expert; an index that is no expert's means
    "none"."""
    _, layers, _ = experts.shape
    width = num_experts + 1
    chosen = np.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    cells = np.arange(layers)[None, :, None] * width + chosen
    return np.bincount(cells.reshape(-1), minlength=layers * width).reshape(layers, width)[:, :num_experts]


def demanded_of(experts: NDArray[np.int32], num_experts: int) -> NDArray[np.bool_]:
    """bool (L, E): which experts these tokens ask for, see `tokens_of`."""
    return tokens_of(experts, num_experts) > 0
