"""Stream a checkpoint into a skeleton: routed experts into host records, everything else onto the device.

transformers' own conversion mapping says where each checkpoint tensor belongs, so no architecture is named
here. One tensor is in flight at a time. Decides nothing about slots, budgets or drafts.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterator
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

from localmoe.core.errors import CheckpointError, LoadCancelledError
from localmoe.core.types import ExpertKey, Progress, ProgressCallback
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint, TensorHeader
from localmoe.model.footprint import checkpoint_dtype
from localmoe.model.skeleton import Skeleton
from localmoe.model.weight_reader import WeightReader

_EXPERT_INDEX = re.compile(r"experts\.(\d+)\.")
_PROGRESS_BYTES = 16 << 20
_WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(slots=True)
class _ExpertTarget:
    """A fused expert parameter: MoE layer, which of the two matrices, and elements still to come."""

    layer: int
    part: int
    remaining: int


@dataclass(slots=True)
class _Pending:
    """Tensors that transformers' own converter turns into one parameter."""

    converter: Any
    sources: list[tuple[str, TensorHeader]] = field(default_factory=list)


def load_weights(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> HostStore:
    """Fill the skeleton's shared weights on `device` and return the routed experts' host store.

    The shared weights take the skeleton's dtype, but for modules that the architecture keeps in float32.

    Raises:
        CheckpointError: tensors are missing, have another shape, or cannot be read.
        LoadCancelledError: `cancel` was set.
    """
    layouts = [experts.layout for experts in skeleton.experts]
    store = HostStore(layouts, skeleton.num_experts, checkpoint_dtype(checkpoint))
    loading = _Loading(skeleton, store, device)
    done, reported = 0, 0
    headers = sorted(checkpoint.tensors.values(), key=lambda header: (header.file, header.offset))
    with loading.reader:
        for header in headers:
            if cancel is not None and cancel.is_set():
                raise LoadCancelledError("Loading the model was cancelled.")
            loading.take(header)
            done += header.num_bytes
            if progress is not None and (
                done - reported >= _PROGRESS_BYTES or done == checkpoint.total_bytes
            ):
                progress(Progress("Loading weights", done, checkpoint.total_bytes, "bytes"))
                reported = done
        loading.convert_pending()
    loading.finish(checkpoint)
    return store


class _Loading:
    """One load: where each tensor goes, and what is still missing."""

    def __init__(self, skeleton: Skeleton, store: HostStore, device: torch.device) -> None:
        self.reader = WeightReader()
        self._model = skeleton.model
        self._store = store
        self._device = device
        self._meta: dict[str, Tensor] = skeleton.model.state_dict()
        self._missing = set(self._meta)
        self._experts = {
            f"{experts.path}.{name}": _ExpertTarget(layer, part, self._meta[f"{experts.path}.{name}"].numel())
            for layer, experts in enumerate(skeleton.experts)
            for part, name in enumerate(_WEIGHTS)
        }
        mapping = get_model_conversion_mapping(skeleton.model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {p: entry for entry in self._converters for p in entry.source_patterns}
        self._pending: dict[str, _Pending] = {}
        self._float32 = self._float32_modules()

    def _float32_modules(self) -> re.Pattern[str] | None:
        dtype = self._model.dtype
        names = [name for name, kept in self._model._get_dtype_plan(dtype).items() if kept == torch.float32]
        return re.compile("|".join(re.escape(name) for name in names)) if names else None

    def take(self, header: TensorHeader) -> None:
        """Read one checkpoint tensor and put it where it belongs; unknown tensors are skipped, as
        transformers does."""
        key, pattern = rename_source_key(
            header.name, self._renamings, self._converters, self._model.base_model_prefix, self._meta
        )
        if key not in self._meta and header.name in self._meta:
            key, pattern = header.name, None
        if key not in self._meta:
            return
        if pattern is None:
            if key in self._experts:
                self._take_fused(key, header)
            else:
                self._put(key, self.reader.read(header))
            return
        converter = self._by_pattern[pattern]
        operations = [type(operation) for operation in converter.operations]
        if key in self._experts and operations in ([MergeModulelist], [MergeModulelist, Concatenate]):
            self._take_one_expert(key, header, pattern, converter)
        else:  # any other chain runs through transformers' own converter, once all its sources are known
            self._pending.setdefault(key, _Pending(copy.deepcopy(converter))).sources.append(
                (pattern, header)
            )

    def _take_fused(self, key: str, header: TensorHeader) -> None:
        """(E, ...) in the checkpoint as in the module: one slice an expert."""
        target = self._experts[key]
        if tuple(header.shape) != tuple(self._meta[key].shape):
            raise _wrong_shape(header, self._meta[key])
        for expert in range(self._store.num_experts):
            view = self._store.views(ExpertKey(target.layer, expert))[target.part]
            self._fill(view, header, expert * view.numel())
        self._written(key, self._meta[key].numel())

    def _take_one_expert(self, key: str, header: TensorHeader, pattern: str, converter: Any) -> None:
        """One expert's matrix, or one of the slabs that its fused matrix is made of."""
        target = self._experts[key]
        match = _EXPERT_INDEX.search(header.name)
        expert = int(match.group(1)) if match else -1
        if not 0 <= expert < self._store.num_experts:
            raise CheckpointError(
                f"Tensor {header.name} names no expert of this model: download the model again."
            )
        view = self._store.views(ExpertKey(target.layer, expert))[target.part]
        if len(converter.operations) == 2:
            dim = converter.operations[1].dim - 1  # without the expert dimension
            width = view.shape[dim] // len(converter.source_patterns)
            view = view.narrow(dim, converter.source_patterns.index(pattern) * width, width)
        if tuple(header.shape) != tuple(view.shape):
            raise _wrong_shape(header, view)
        self._fill(view, header, 0)
        self._written(key, view.numel())

    def _fill(self, view: Tensor, header: TensorHeader, first_element: int) -> None:
        stored = self.reader.dtype(header)
        if view.is_contiguous() and view.dtype == stored:
            self.reader.read_part(header, first_element, view)
            return
        part = torch.empty(view.shape, dtype=stored)
        self.reader.read_part(header, first_element, part)
        view.copy_(part)

    def _written(self, key: str, elements: int) -> None:
        target = self._experts[key]
        target.remaining -= elements
        if target.remaining == 0:
            self._missing.discard(key)

    def convert_pending(self) -> None:
        """Run transformers' converters over the tensors that need one."""
        for key, pending in self._pending.items():
            for pattern, header in pending.sources:
                pending.converter.add_tensor(key, header.name, pattern, self.reader.read(header))
            converted = pending.converter.convert(key, model=self._model, config=self._model.config)
            for name, value in converted.items():
                tensor = value[0] if isinstance(value, list) else value
                if name in self._experts:
                    self._put_fused(name, tensor)
                else:
                    self._put(name, tensor)

    def _put_fused(self, key: str, tensor: Tensor) -> None:
        target = self._experts[key]
        for expert in range(self._store.num_experts):
            self._store.views(ExpertKey(target.layer, expert))[target.part].copy_(tensor[expert])
        self._written(key, tensor.numel())

    def _put(self, key: str, tensor: Tensor) -> None:
        expected = self._meta[key]
        if tuple(tensor.shape) != tuple(expected.shape):
            raise CheckpointError(
                f"Tensor {key} has shape {list(tensor.shape)}, the model expects {list(expected.shape)}: "
                "config.json and weights do not belong together."
            )
        path, _, leaf = key.rpartition(".")
        module = self._model.get_submodule(path)
        dtype = expected.dtype
        if expected.is_floating_point() and self._float32 is not None and self._float32.search(key):
            dtype = torch.float32
        tensor = tensor.to(device=self._device, dtype=dtype)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        self._missing.discard(key)

    def finish(self, checkpoint: Checkpoint) -> None:
        """Tie weights, rebuild buffers that no file holds, and see that nothing is missing.

        Raises:
            CheckpointError: a weight is missing.
        """
        self._model.tie_weights()
        absent = sorted(key for key in self._missing if key in self._experts or _is_meta(self._model, key))
        if absent:
            raise CheckpointError(
                f"{len(absent)} weights are missing from {checkpoint.folder}, e.g. {absent[0]}: "
                "download the model again."
            )
        for parameter in self._model.parameters():
            parameter._is_hf_initialized = True  # so that _init_weights leaves it alone
        for module in self._modules_with_meta_buffers():
            self._model._init_weights(module)

    def _modules_with_meta_buffers(self) -> Iterator[nn.Module]:
        for module in self._model.modules():
            meta = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
            for name, buffer in meta.items():
                module._buffers[name] = torch.empty_like(buffer, device=self._device)
            if meta:
                yield module


def _is_meta(model: nn.Module, key: str) -> bool:
    path, _, leaf = key.rpartition(".")
    return bool(getattr(model.get_submodule(path), leaf).is_meta)


def _wrong_shape(header: TensorHeader, expected: Tensor) -> CheckpointError:
    return CheckpointError(
        f"Tensor {header.name} in {header.file.name} has shape {list(header.shape)}, the model expects "
        f"{list(expected.shape)}: config.json and weights do not belong together."
    )
