"""Where each tensor of a checkpoint belongs in a skeleton: routed experts in host records, everything else on
the device. transformers' own conversion mapping says so, so no architecture is named here. Reads no weights.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from localmoe.core.errors import CheckpointError
from localmoe.core.types import ExpertKey
from localmoe.experts.record_store import RecordStore
from localmoe.experts.records import PackedMatrix
from localmoe.hub.checkpoint import Checkpoint, TensorHeader
from localmoe.kernels.bf12_tiles import Bf12Matrix, UnpackableError
from localmoe.kernels.mxfp4_tiles import Mxfp4Matrix
from localmoe.model.materialise import float32_names
from localmoe.model.packed_head import PackedHead
from localmoe.model.pieces import AnyPiece, split_blocks, split_packed, split_read
from localmoe.model.single_experts import with_single_experts
from localmoe.model.skeleton import Skeleton
from localmoe.model.tying import tied_weights
from localmoe.model.weight_reader import check_kind, wrong_shape
from localmoe.quant.mxfp4 import check_layout, parameter_of, scales_of

_EXPERT_INDEX = re.compile(r"experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """A fused expert parameter: MoE layer, and which of the two matrices."""

    layer: int
    part: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors that transformers' own converter turns into one parameter, with the pattern that each has."""

    converter: Any
    sources: list[tuple[str, TensorHeader]] = field(default_factory=list)


class Placement:
    """Shared weights are made on `device`, unread, and put into the model; `pieces()` fills them and the
    records. Tensors that the model does not know are skipped, as transformers does."""

    def __init__(
        self, skeleton: Skeleton, store: RecordStore, device: torch.device, checkpoint: Checkpoint, *,
        shared_only: bool = False,
    ) -> None:  # fmt: skip
        """shared_only: the store has the routed experts already.

        Raises CheckpointError: a tensor has another shape or a dtype that is not read.
        """
        self.conversions: dict[str, Conversion] = {}
        self._model = skeleton.model
        self._embedding = skeleton.host_embedding_key
        self._head = None if skeleton.packed_head is None else PackedHead(skeleton, device)
        self._store = store
        self._device = device
        self._folder = checkpoint.folder
        self._meta: dict[str, Tensor] = skeleton.model.state_dict()
        self._experts = {
            key: ExpertTarget(layer, part)
            for layer, experts in enumerate(skeleton.experts)
            for part, key in enumerate(experts.weight_keys)
        }
        # what fills a place (key, expert, slab), -1 for all; where two tensors claim one, the later one wins
        self._reads: dict[tuple[str, int, int], list[AnyPiece]] = {}
        self._elements = dict.fromkeys(self._experts, 0)  # of the experts' weights that have a source
        mapping = get_model_conversion_mapping(skeleton.model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        own = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._converters = with_single_experts(own, checkpoint.tensors)
        self._by_pattern = {p: entry for entry in self._converters for p in entry.source_patterns}
        self._float32 = float32_names(skeleton.model)
        self._tied = tied_weights(skeleton.model)
        self._skipped = self._experts if shared_only else {}
        for header in checkpoint.tensors.values():
            self._place(header, checkpoint.tensors)

    def pieces(self) -> Iterator[AnyPiece]:
        """All reads but those of conversions."""
        for pieces in self._reads.values():
            yield from pieces

    def check_complete(self) -> None:
        """See that each weight has a source, or is tied to one that has.

        Raises:
            CheckpointError: some have none.
        """
        absent = [key for key, found in self._elements.items() if found != self._meta[key].numel()]
        shared = (key for key in self._meta if key not in self._experts)
        absent += [key for key in shared if not self._is_placed(self._tied.get(key, key))]
        if absent:
            raise CheckpointError(
                f"{len(absent)} weights are missing from {self._folder}, e.g. {min(absent)}: "
                "download the model again."
            )

    def put(self, key: str, tensor: Tensor) -> None:
        """Copy a whole parameter, as a conversion gives it, to its place.

        Raises:
            CheckpointError: it has another shape.
        """
        if tuple(tensor.shape) != tuple(self._meta[key].shape):
            raise wrong_shape(f"Tensor {key}", tensor.shape, self._meta[key].shape)
        if self._head is not None and key == self._head.key:
            self._head.take(tensor)
            return
        if key not in self._experts:
            self._make(key).copy_(tensor)
            return
        target = self._experts[key]
        for expert in range(self._store.num_experts):
            if self._store.layouts[target.layer].packed:
                matrices = self._packed(target, expert)
                for matrix, rows in zip(matrices, tensor[expert].chunk(len(matrices)), strict=True):
                    if not isinstance(matrix, Bf12Matrix):
                        raise UnpackableError(f"{key} is put together by transformers")
                    matrix.put(0, rows.to(torch.bfloat16).contiguous())
            else:
                self._weights(key, target, expert).copy_(tensor[expert])
        self._elements[key] = tensor.numel()

    def _place(self, header: TensorHeader, tensors: Mapping[str, TensorHeader]) -> None:
        key, pattern = rename_source_key(
            header.name, self._renamings, self._converters, self._model.base_model_prefix, self._meta
        )
        if key not in self._meta and header.name in self._meta:
            key, pattern = header.name, None
        if key in self._skipped or parameter_of(key) in self._skipped:
            return
        if parameter_of(key) in self._experts:
            self._place_blocks(parameter_of(key), header, tensors.get(scales_of(header.name)))
        if key not in self._meta:
            return
        check_kind(header, self._meta[key])
        if pattern is not None:
            self._place_converted(key, header, pattern)
            return
        expected = tuple(self._meta[key].shape)
        if tuple(header.shape) != expected:
            raise wrong_shape(f"Tensor {header.name} in {header.file.name}", header.shape, expected)
        if key in self._tied:
            return  # the same values as its source has; twice they would take memory
        if key in self._experts:  # (E, ...) in the checkpoint as in the module
            for expert in range(self._store.num_experts):
                size = math.prod(expected[1:])
                if self._store.layouts[self._experts[key].layer].packed:
                    packed = self._packed(self._experts[key], expert)
                    self._read_packed(key, header, expert, 0, packed, expert * size)
                    continue
                view = self._weights(header.name, self._experts[key], expert)
                self._read_expert(key, header, expert, 0, view, expert * size)
        elif self._head is not None and key == self._head.key:
            self._reads[key, -1, -1] = list(split_packed(header, 0, self._head, None))
        else:
            self._reads[key, -1, -1] = list(split_read(header, self._make(key)))

    def _place_converted(self, key: str, header: TensorHeader, pattern: str) -> None:
        """An expert's matrix, or one of the slabs that its fused matrix is made of, is read into its place;
        any other chain is transformers' own converter's."""
        converter = self._by_pattern[pattern]
        operations = [type(operation) for operation in converter.operations]
        if key not in self._experts or operations not in ([MergeModulelist], [MergeModulelist, Concatenate]):
            conversion = self.conversions.setdefault(key, Conversion(copy.deepcopy(converter)))
            conversion.sources.append((pattern, header))
            return
        match = _EXPERT_INDEX.search(header.name)
        expert = int(match.group(1)) if match else -1
        if not 0 <= expert < self._store.num_experts:
            raise CheckpointError(
                f"Tensor {header.name} names no expert of this model: download the model again."
            )
        target, slab = self._experts[key], converter.source_patterns.index(pattern)
        if self._store.layouts[target.layer].packed:
            self._place_packed(key, header, expert, slab, converter)
            return
        view = self._weights(header.name, target, expert)
        if len(operations) == 2:
            dim = converter.operations[1].dim - 1  # without the expert dimension
            width = view.shape[dim] // len(converter.source_patterns)
            view = view.narrow(dim, slab * width, width)
        if tuple(header.shape) != tuple(view.shape):
            raise wrong_shape(f"Tensor {header.name} in {header.file.name}", header.shape, view.shape)
        self._read_expert(key, header, expert, slab, view, 0)

    def _place_packed(
        self, key: str, header: TensorHeader, expert: int, slab: int, converter: WeightConverter
    ) -> None:
        """All of an expert's matrices of this parameter, or the one that a slab is."""
        packed = self._packed(self._experts[key], expert)
        if len(converter.operations) == 2:
            slabs = len(converter.source_patterns)
            if converter.operations[1].dim != 1 or slabs != len(packed):
                raise UnpackableError(f"{key} is made of {slabs} slabs")
            packed = packed[slab : slab + 1]
        expected = sum(matrix.rows for matrix in packed), packed[0].columns
        if tuple(header.shape) != expected:
            raise wrong_shape(f"Tensor {header.name} in {header.file.name}", header.shape, expected)
        self._read_packed(key, header, expert, slab, packed, 0)

    def _place_blocks(self, key: str, blocks: TensorHeader, scales: TensorHeader | None) -> None:
        """A parameter of all experts in MXFP4, whose blocks lie along a row: the sum's dimension."""
        target, store = self._experts[key], self._store
        layout = store.layouts[target.layer]
        rows, columns = layout.rows[target.part]
        found = check_layout(blocks, scales, (store.num_experts, rows, columns))
        for expert in range(store.num_experts):
            place: Tensor | Mxfp4Matrix
            if layout.mxfp4:
                place = store.mxfp4_views(ExpertKey(target.layer, expert))[target.part]
            else:
                view = store.views(ExpertKey(target.layer, expert))[target.part]
                place = view.T if layout.transposed else view
            self._elements[key] += rows * columns if (key, expert, 0) not in self._reads else 0
            pieces = split_blocks(blocks, found, place, expert * rows, target.layer)
            self._reads[key, expert, 0] = list(pieces)

    def _weights(self, name: str, target: ExpertTarget, expert: int) -> Tensor:
        """Where an expert's weights go that the tensor `name` has as such."""
        if self._store.layouts[target.layer].mxfp4:
            raise CheckpointError(
                f"Tensor {name} has weights that {self._folder} has in MXFP4 too: download the model again."
            )
        return self._store.views(ExpertKey(target.layer, expert))[target.part]

    def _packed(self, target: ExpertTarget, expert: int) -> Sequence[PackedMatrix]:
        """gate, if there is one, and up, or down alone, of an expert."""
        *gate_up, down = self._store.packed_views(ExpertKey(target.layer, expert))
        return gate_up if target.part == 0 else (down,)

    def _read_packed(
        self, key: str, header: TensorHeader, expert: int, slab: int, to: Sequence[PackedMatrix], first: int
    ) -> None:
        """first: the element of the tensor that the first matrix begins with."""
        place, layer = (key, expert, slab), self._experts[key].layer
        pieces: list[AnyPiece] = []
        for matrix in to:
            pieces += split_packed(header, first, matrix, layer)
            first += matrix.rows * matrix.columns
        if place not in self._reads:
            self._elements[key] += sum(matrix.rows * matrix.columns for matrix in to)
        self._reads[place] = pieces

    def _read_expert(
        self, key: str, header: TensorHeader, expert: int, slab: int, view: Tensor, first_element: int
    ) -> None:
        place = (key, expert, slab)
        if place not in self._reads:
            self._elements[key] += view.numel()
        self._reads[place] = list(split_read(header, view, first_element, self._experts[key].layer))

    def _is_placed(self, key: str) -> bool:
        if self._head is not None and key == self._head.key:
            return self._head.is_taken or (key, -1, -1) in self._reads
        path, _, leaf = key.rpartition(".")
        return not getattr(self._model.get_submodule(path), leaf).is_meta

    def _make(self, key: str) -> Tensor:
        """A new parameter or buffer on the device, in the skeleton's dtype, but for modules that the
        architecture keeps in float32; or the store's table."""
        expected = self._meta[key]
        path, _, leaf = key.rpartition(".")
        module = self._model.get_submodule(path)
        dtype = expected.dtype
        if expected.is_floating_point() and self._float32 is not None and self._float32.search(key):
            dtype = torch.float32
        if key == self._embedding:
            assert self._store.embedding is not None, "it was to lie there"
            tensor = self._store.embedding
        else:
            tensor = torch.empty(expected.shape, dtype=dtype, device=self._device)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        return tensor
