"""Whether two records hold the same expert: bit by bit, but for what lies behind a strip's last stray."""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.experts.records import RecordLayout


def same_record(layout: RecordLayout, one: Tensor, other: Tensor) -> bool:
    """Of any device; what follows a record does not count."""
    if layout.packed and not layout.bf12:  # of whole pages
        pairs = zip(layout.packed_views(one.cpu()), layout.packed_views(other.cpu()), strict=True)
        taken = ((a.take(), b.take()) for a, b in pairs)
        return all(torch.equal(x, y) for pair in taken for x, y in zip(*pair, strict=True))
    if not layout.bf12:
        size = min(len(one), len(other))
        return torch.equal(one[:size].cpu(), other[:size].cpu())
    for a, b in zip(layout.bf12_views(one.cpu()), layout.bf12_views(other.cpu()), strict=True):
        whole = torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
        if not whole or not torch.equal(a.take().view(torch.int16), b.take().view(torch.int16)):
            return False
    return True
