"""Which rows of a layer's tokens each expert gets, and where its outputs belong. On the device these are
uploaded once a layer: what is uploaded for each expert by itself has the host wait for the device each time.
Chooses none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairRows:
    """Of one expert, on the device.

    Attributes:
        tokens: (n padded,) int64, rows of the layer's input; the first one again, up to a whole multiple.
        places: (n,) int64, of its pairs among all (token, k), one after the other.
    """

    tokens: Tensor
    places: Tensor


def rows_by_expert(chosen: list[list[int]], num_experts: int) -> dict[int, list[int]]:
    """expert -> flat (token, k) positions that chose it; indices outside the experts mean "none" and are
    skipped."""
    rows: dict[int, list[int]] = {}
    top_k = len(chosen[0])
    for token, experts in enumerate(chosen):
        for k, expert in enumerate(experts):
            if 0 <= expert < num_experts:
                rows.setdefault(expert, []).append(token * top_k + k)
    return rows


def pair_rows(
    rows: Mapping[int, Sequence[int]], top_k: int, device: torch.device, row_multiple: int = 1
) -> dict[int, PairRows]:
    """Upload what `rows_by_expert` says. row_multiple: see kernels.rows; padding the numbers costs the device
    nothing, where padding each expert's rows would be a kernel or two more."""
    numbers: list[int] = []
    sizes: list[int] = []
    for places in rows.values():
        tokens = [place // top_k for place in places]
        tokens += tokens[:1] * (-len(tokens) % row_multiple)
        numbers += [*tokens, *places]
        sizes += [len(tokens), len(places)]
    uploaded = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    parts = uploaded.to(device, non_blocking=True).split(sizes)
    return {expert: PairRows(parts[2 * i], parts[2 * i + 1]) for i, expert in enumerate(rows)}
