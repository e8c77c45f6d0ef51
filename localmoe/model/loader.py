"""Stream a checkpoint into a skeleton: routed experts into host records, everything else onto the device.
Decides nothing about slots, budgets or drafts.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from localmoe.core.errors import LoadCancelledError
from localmoe.core.types import Progress, ProgressCallback
from localmoe.experts.host_store import HostStore
from localmoe.experts.record_store import RecordStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.footprint import checkpoint_dtype
from localmoe.model.materialise import rebuild_buffers
from localmoe.model.parallel_reader import read_pieces
from localmoe.model.pieces import AnyPiece, split_read
from localmoe.model.placement import Conversion, Placement
from localmoe.model.skeleton import Skeleton, embedding_shape
from localmoe.model.weight_reader import stored_dtype

_PROGRESS_BYTES = 16 << 20


def load_weights(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    pin: bool = False,
    memory: Callable[[int], mmap.mmap] | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> HostStore:
    """Fill the skeleton's shared weights on `device` and return the routed experts' host store, which has the
    input embedding's table too if that is to lie there.

    The shared weights take the skeleton's dtype, but for modules that the architecture keeps in float32. What
    is missing or of another shape is refused before anything is read.

    Args:
        pin: register each layer's records with the CUDA driver as soon as they are read, while others are.
        memory: for the records, see HostStore.

    Raises:
        CheckpointError: tensors are missing, have another shape, or cannot be read.
        HardwareError: the driver refuses to pin.
        LoadCancelledError: `cancel` was set.
        UnpackableError: experts were to be packed and cannot be.
    """
    if cancel is not None and cancel.is_set():
        raise LoadCancelledError("Loading the model was cancelled.")
    layouts = [experts.layout for experts in skeleton.experts]
    dtype = checkpoint_dtype(checkpoint)
    store = HostStore(layouts, skeleton.num_experts, dtype, embedding_shape(skeleton), memory=memory)
    try:
        placement = Placement(skeleton, store, device, checkpoint)
        if not placement.conversions:  # which may make weights of any name
            placement.check_complete()
        report = _Report(checkpoint.total_bytes, progress)
        _read_placed(placement, store, report, cancel, pin=pin)
        for key, conversion in placement.conversions.items():
            _convert(skeleton.model, key, conversion, placement, report, cancel)
        placement.check_complete()
        # not before: it copies the bias beside a tied weight
        skeleton.model.tie_weights(recompute_mapping=False)
        if pin:
            store.pin()
        rebuild_buffers(skeleton.model, device)
        report.finish()
    except BaseException:
        store.close()
        raise
    return store


def load_shared(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    store: RecordStore,
    *,
    device: torch.device,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Fill only the skeleton's shared weights, for a model whose experts are in `store` already.

    Raises:
        CheckpointError: tensors are missing, have another shape, or cannot be read.
        LoadCancelledError: `cancel` was set.
    """
    placement = Placement(skeleton, store, device, checkpoint, shared_only=True)
    pieces = list(placement.pieces())
    conversions = placement.conversions
    sources = [header.num_bytes for found in conversions.values() for _, header in found.sources]
    report = _Report(sum(piece.num_bytes for piece in pieces) + sum(sources), progress)
    read_pieces(pieces, lambda piece: report.add(piece.num_bytes), cancel)
    for key, conversion in conversions.items():
        _convert(skeleton.model, key, conversion, placement, report, cancel)
    skeleton.model.tie_weights(recompute_mapping=False)
    rebuild_buffers(skeleton.model, device)
    report.finish()


class _Report:
    """Bytes read so far, told every 16 MiB and at the end."""

    def __init__(self, total_bytes: int, progress: ProgressCallback | None) -> None:
        self._total = total_bytes
        self._progress = progress
        self._done = 0
        self._told = 0

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._done - self._told >= _PROGRESS_BYTES and self._done < self._total:
            self._tell(self._done)

    def finish(self) -> None:
        """Tensors that the model does not know count too."""
        self._tell(self._total)

    def _tell(self, done: int) -> None:
        self._told = done
        if self._progress is not None:
            self._progress(Progress("Loading weights", done, self._total, "bytes"))


def _read_placed(
    placement: Placement, store: HostStore, report: _Report, cancel: threading.Event | None, *, pin: bool
) -> None:
    pieces = list(placement.pieces())
    left = Counter(piece.layer for piece in pieces)

    def finished(piece: AnyPiece) -> None:
        report.add(piece.num_bytes)
        left[piece.layer] -= 1
        if pin and piece.layer is not None and left[piece.layer] == 0:
            store.pin_layer(piece.layer)

    read_pieces(pieces, finished, cancel)


def _convert(
    model: Any,
    key: str,
    conversion: Conversion,
    placement: Placement,
    report: _Report,
    cancel: threading.Event | None,
) -> None:
    """Read the sources of one parameter and run transformers' converter over them."""
    tensors = [torch.empty(header.shape, dtype=stored_dtype(header)) for _, header in conversion.sources]
    pieces: list[AnyPiece] = []
    for (pattern, header), tensor in zip(conversion.sources, tensors, strict=True):
        pieces += split_read(header, tensor)
        conversion.converter.add_tensor(key, header.name, pattern, tensor)
    del tensors  # the converter lets go of them one by one
    read_pieces(pieces, lambda piece: report.add(piece.num_bytes), cancel)
    pieces.clear()
    converted = conversion.converter.convert(key, model=model, config=model.config)
    for name, value in converted.items():
        placement.put(name, value[0] if isinstance(value, list) else value)
