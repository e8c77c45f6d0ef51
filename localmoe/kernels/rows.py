"""Find how many rows a matrix product must be padded to for a row's bits not to depend on the row count.

Matrix libraries pick another kernel, and so another order of summation, for one row than for nine. Padding
every product to a multiple of some rows removes the difference; which multiple does it is a property of the
library and the processor, so it is measured. Decides nothing about what is padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CANDIDATES = (1, 2, 4, 8, 16)
_PROBED = 4 << 20  # weights of a probe of its own


@dataclass(frozen=True, slots=True)
class RowPadding:
    """Passes padded to a multiple of `multiple` rows give each row the same bits, up to `max_rows` rows."""

    multiple: int
    max_rows: int


def measure_row_multiple(weights: Iterable[Tensor], max_rows: int, *, transposed: bool) -> int | None:
    """Smallest row multiple for which x W^T (x W if transposed) is row-invariant for every weight.

    Args:
        weights: (out_features, in_features) each, or the other way round if transposed, on the compute
            device; one of each shape and dtype is tried.
        max_rows: rows of the largest pass whose rows must equal those of a one-token pass.

    Returns:
        The multiple, or None if none of CANDIDATES will do (outputs may then differ in the last bits).
    """
    kinds = {(tuple(weight.shape), weight.dtype): weight for weight in weights}
    for multiple in CANDIDATES:
        if all(_is_invariant(weight, multiple, max_rows, transposed) for weight in kinds.values()):
            return multiple
    return None


def _is_invariant(weight: Tensor, multiple: int, max_rows: int, transposed: bool) -> bool:
    """By sums that cancel, then by the weight itself."""
    top = -(-max_rows // multiple) * multiple
    inner = weight.shape[0] if transposed else weight.shape[1]
    generator = torch.Generator().manual_seed(weight.shape[0] * 65_537 + weight.shape[1])
    x = torch.randn(top, inner, generator=generator, dtype=torch.float32)
    probe, cancelled = _cancelling(weight, x, transposed, generator)
    if not _comes_out_alike(probe, cancelled.to(weight), multiple, transposed):
        return False
    return _comes_out_alike(weight, x.to(weight), multiple, transposed)


def _cancelling(
    weight: Tensor, x: Tensor, transposed: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A weight of the same kind (its first outputs, where it is large) and rows, whose exact products are 0:
    all that comes out is what a sum's order leaves. Of other numbers 16 bits round that away but once in
    thousands of outputs, which a few rows need not show."""
    outputs = min(weight.shape[1 if transposed else 0], max(1, _PROBED // x.shape[1]))
    order = torch.randperm(x.shape[1], generator=generator)
    plus, minus, rest = order.tensor_split([x.shape[1] // 2, x.shape[1] // 2 * 2])
    numbers = torch.randn(outputs, x.shape[1], generator=generator, dtype=torch.float32)
    numbers[:, minus], numbers[:, rest] = -numbers[:, plus], 0
    rows = x.clone()
    rows[:, minus] = rows[:, plus]
    probe = torch.empty_like(weight[:, :outputs] if transposed else weight[:outputs])
    return probe.copy_(numbers.T if transposed else numbers), rows


def _comes_out_alike(weight: Tensor, x: Tensor, multiple: int, transposed: bool) -> bool:
    """Whether rows come out alike in another order, and the first and last n alone as among all, for
    several n."""
    top = len(x)

    def product(rows: Tensor) -> Tensor:
        return rows @ weight if transposed else F.linear(rows, weight)

    whole = product(x)
    counts = (n * multiple for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16) if n * multiple < top)
    if not torch.equal(product(x.roll(1, 0)), whole.roll(1, 0)):
        return False
    return all(
        torch.equal(product(x[:n]), whole[:n]) and torch.equal(product(x[-n:]), whole[-n:]) for n in counts
    )
