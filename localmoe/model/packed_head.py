"""An output head whose weight is kept in twelve bits on a GPU (kernels.packed_weight): the largest of all
linear layers, which every pass reads whole. Where the input embedding is the same weight, its rows are
unpacked from there. Decides which models have one that may be; not whether it is.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.bf12_tiles import UnpackableError
from localmoe.kernels.packed_weight import PackedWeight, can_be_packed, packed_bytes
from localmoe.model.row_lookup import look_up, looks_up_by_table
from localmoe.model.skeleton import Skeleton
from localmoe.model.tying import input_embedding, path_of_own_weight, paths_of_pair, tied_weights

_ROWS_AT_ONCE = 1024
_MEMORY = "localmoe_packed"  # a buffer of the module: it moves, counts and goes with the model


class UnpackableHeadError(UnpackableError):
    """It is the head that cannot be packed, whatever the experts are."""


def own_head(model: Any) -> str | None:
    """Path of a model's output head; None if something else uses its weight too, but for an input embedding
    that can look rows up in it, if it does more than multiply, if its shape has no whole tiles, or if the
    architecture keeps it in float32."""
    module = model.get_output_embeddings()
    if type(module) is not nn.Linear or not can_be_packed(*module.weight.shape):
        return None
    pair = _tied_to_embedding(model)
    return path_of_own_weight(model, module) if pair is None else pair[0]


def packed_embedding(model: Any) -> str | None:
    """Path of an input embedding that is the same weight as such a head."""
    pair = None if own_head(model) is None else _tied_to_embedding(model)
    return None if pair is None else pair[1]


def _tied_to_embedding(model: Any) -> tuple[str, str] | None:
    """Paths of head and input embedding, if they are one weight that the latter reads as a table alone."""
    head, embedding = model.get_output_embeddings(), input_embedding(model)
    if embedding is None or not looks_up_by_table(embedding):
        return None
    return paths_of_pair(model, head, embedding)


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
        any. key: by which files name it. stand_in: see PackedWeight."""
        assert skeleton.packed_head is not None, "it was to be packed"
        module = skeleton.model.get_submodule(skeleton.packed_head)
        key = f"{skeleton.packed_head}.weight"
        self.key = tied_weights(skeleton.model).get(key, key)
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


def read_packed_rows(skeleton: Skeleton) -> None:
    """Let an input embedding that is the packed head's weight, which is there, look its rows up in it."""
    if skeleton.packed_embedding is None:
        return
    assert skeleton.packed_head is not None, "it is the head's weight"
    from localmoe.kernels.gpu.packed_rows import packed_rows

    embedding = skeleton.model.get_submodule(skeleton.packed_embedding)
    head = skeleton.model.get_submodule(skeleton.packed_head)

    def rows(ids: Tensor) -> Tensor:
        weight = packed_weight_of(head)  # the module's, so that the memory goes with the model
        assert weight is not None, "the head was packed"
        return packed_rows(ids.reshape(-1), weight).view(*ids.shape, weight.columns)

    # no parameter of the model: it says neither where nor in what passes compute
    embedding.__dict__["weight"] = embedding._parameters.pop("weight")
    look_up(embedding, rows)
