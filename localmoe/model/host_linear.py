"""Linear layers of a model on the CPU whose weights stay in their 16 bits (but those that something else uses
too), multiplied with float32 activations by the threads that compute its experts: half the memory to hold and
to read, exact products, and a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localmoe.model.materialise import float32_names
from localmoe.model.tying import tied_weights


class RowProducts(Protocol):
    """Multiplies rows with 16-bit weights."""

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: int | None = None) -> Tensor:
        """(T, K), (N, K), (N,) -> (T or rows, N), all but the weights float32; zeros from row T on."""


@dataclass(slots=True)
class HostLinears:
    """What a model's linear layers share.

    Attributes:
        lane: who multiplies; None: PyTorch, with weights converted each time.
        rows, padding: tokens of the running pass, and how many of them, the last ones, nobody looks at.
    """

    lane: RowProducts | None = None
    rows: int = 0
    padding: int = 0

    def begin_pass(self, rows: int, padding: int) -> None:
        """Tell how many rows the next products have."""
        self.rows, self.padding = rows, padding


class HostLinear:
    """The forward of one nn.Linear."""

    def __init__(self, module: nn.Linear, shared: HostLinears, *, is_head: bool) -> None:
        """is_head: it makes logits, of all tokens or of the last ones."""
        self._module = module
        self._shared = shared
        self._is_head = is_head

    def __call__(self, x: Tensor) -> Tensor:
        """(..., T, K) -> (..., T, N); padding rows come out as zeros."""
        weight, bias, lane = self._module.weight, self._module.bias, self._shared.lane
        if lane is None or x.is_meta:
            return F.linear(x, weight.to(x.dtype), bias)
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]  # a tensor's len() takes longer
        of_tokens = self._is_head or count == self._shared.rows
        live = count - (self._shared.padding if of_tokens else 0)
        out = lane.dense(rows[:live].float(), weight, bias, rows=count)
        return out.view(*x.shape[:-1], -1).to(x.dtype)


def plain_linears(model: Any) -> list[nn.Linear]:
    """Linear layers whose weights are their own, and not kept in float32 by the architecture."""
    float32 = float32_names(model)
    ties = tied_weights(model)
    tied = {*ties, *ties.values()}  # a head may be what the embedding is tied to
    names = (
        (f"{path}.weight", module) for path, module in model.named_modules() if type(module) is nn.Linear
    )
    return [module for name, module in names if name not in tied and not (float32 and float32.search(name))]


def keep_linears(model: Any, stored: torch.dtype) -> HostLinears:
    """Let the weights of a model's linear layers, which it has none of yet, stay in `stored`, and give the
    layers their forward; what they share."""
    shared, head = HostLinears(), model.get_output_embeddings()
    for module in plain_linears(model):
        kept = torch.empty_like(module.weight, dtype=stored, device="meta")
        module.weight = nn.Parameter(kept, requires_grad=False)
    for module in _linears(model):
        module.forward = HostLinear(module, shared, is_head=module is head)  # type: ignore[method-assign,assignment]
    return shared


def _linears(model: Any) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]


def undo_linears(model: Any, dtype: torch.dtype) -> None:
    """Take that back, while there are no weights."""
    for module in _linears(model):
        vars(module).pop("forward", None)
    for module in plain_linears(model):
        like = torch.empty_like(module.weight, dtype=dtype, device="meta")
        module.weight = nn.Parameter(like, requires_grad=False)
