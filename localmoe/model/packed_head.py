"""An output head whose weight is kept in twelve bits on a GPU (kernels.packed_weight): the largest of all
linear layers, which every pass reads whole. Decides which models have one that may be; not whether it is.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.bf12_tiles import UnpackableError
from localmoe.kernels.packed_weight import PackedWeight, can_be_packed, packed_bytes
from localmoe.model.skeleton import Skeleton
from localmoe.model.tying import path_of_own_weight

_ROWS_AT_ONCE = 1024
_MEMORY = "localmoe_packed"  # a buffer of the module: it moves, counts and goes with the model


class UnpackableHeadError(UnpackableError):
    """It is the head that cannot be packed, whatever the experts are."""


def own_head(model: Any) -> str | None:
    """Path of a model's output head; None if something else uses its weight too, such as an input embedding
    that it is tied to, if it does more than multiply, if its shape has no whole tiles, or if the architecture
    keeps it in float32."""
    module = model.get_output_embeddings()
    if type(module) is not nn.Linear or not can_be_packed(*module.weight.shape):
        return None
    return path_of_own_weight(model, module)


def saved_bytes(model: Any, stored: torch.dtype) -> int:
    """What packing saves of a head's bytes in 16 bits, as far as shapes and this machine tell; 0 where it
    cannot be packed."""
    path = own_head(model) if stored == torch.bfloat16 and find_spec("numba") is not None else None
    if path is None:
        return 0
    rows, columns = map(int, model.get_submodule(path).weight.shape)
    return max(0, rows * columns * stored.itemsize - packed_bytes(rows, columns))


class PackedHead:
    """The weight of a skeleton's head, which is packed as it is read."""

    def __init__(self, skeleton: Skeleton, device: torch.device, *, stand_in: bool = False) -> None:
        """Its memory on the device, unwritten, becomes the module's; the module's own weight stays without
        any. stand_in: see PackedWeight."""
        assert skeleton.packed_head is not None, "it was to be packed"
        module = skeleton.model.get_submodule(skeleton.packed_head)
        self.key = f"{skeleton.packed_head}.weight"
        self.is_taken = False  # whole, rather than row by row
        make = PackedWeight.stand_in if stand_in else PackedWeight.empty
        self._weight = make(module.out_features, module.in_features, device)
        module.register_buffer(_MEMORY, self._weight.memory, persistent=False)

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self._weight.rows

    @property
    def columns(self) -> int:
        """Likewise."""
        return self._weight.columns

    def take(self, weights: Tensor) -> None:
        """All of it, (R, C), of any device and dtype.

        Raises:
            UnpackableHeadError: as `put`.
        """
        for first in range(0, self.rows, _ROWS_AT_ONCE):
            part = weights[first : first + _ROWS_AT_ONCE]
            self.put(first, part.to("cpu", torch.bfloat16).contiguous())
        self.is_taken = True

    def put(self, first_row: int, weights: Tensor) -> None:
        """Rows (N, C) from `first_row` on, as PackedWeight.put.

        Raises:
            UnpackableHeadError: the weights, or this machine, do not allow it.
        """
        try:
            self._weight.put(first_row, weights)
        except UnpackableError as error:
            raise UnpackableHeadError(str(error), lasting=error.lasting) from error


def packed_weight_of(module: nn.Module) -> PackedWeight | None:
    """What a linear layer multiplies with in the place of its weight; None: with that."""
    memory = module._buffers.get(_MEMORY)
    if memory is None:
        return None
    assert isinstance(module, nn.Linear), f"{type(module)}"
    return PackedWeight(memory, module.out_features, module.in_features)
