"""Writes a draft folder in the checkpoint format of its method, layer by layer: all of it or nothing that
counts as a draft. Chooses no codes and no place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from localmoe.hub.disk import free_disk_bytes
from localmoe.hub.safetensors_header import read_file_header
from localmoe.hub.weight_files import CONFIG_NAME
from localmoe.quant.draft_folder import DraftFolder, write_errors
from localmoe.quant.draft_format import (
    PROVENANCE_FILE,
    QUANTIZE_CONFIG_FILE,
    DraftProvenance,
    draft_config,
)
from localmoe.quant.draft_layout import layout_of
from localmoe.quant.expert_names import ExpertNaming
from localmoe.quant.expert_reader import ExpertMatrices, ExpertReader
from localmoe.quant.shard_writer import write_json

__all__ = ["DraftProvenance", "DraftWriter", "ExpertMatrices", "ExpertNaming"]


class DraftWriter:
    """A context manager: add the layers, then `publish`. Until then `out` is as before.

    Layers are on the disk when `add_layer` returns. If the process is killed, or one of `keep_on` ends the
    context, they stay in a hidden folder beside `out`, and the next writer of the same recipe starts with
    them (`finished_layers`); one of another recipe removes them. Leaving the context in any other way without
    publishing removes them at once. No more than the layer that is being added is held in memory.
    """

    def __init__(
        self,
        out: Path,
        config: Mapping[str, Any],
        naming: ExpertNaming,
        provenance: DraftProvenance,
        estimated_bytes: int,
        *,
        free_bytes: Callable[[Path], int] = free_disk_bytes,
        keep_on: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit),
    ) -> None:
        """Check the place and the free disk space, and start or take over a temporary folder beside `out`.

        Args:
            estimated_bytes: of the whole draft; finished layers are subtracted.
            keep_on: how a user stops a build.

        Raises:
            DraftError: `out` holds something else or is being built, the disk is too full or not writable.
        """
        self._folder = DraftFolder(out, provenance)
        self._config = config
        self._naming = naming
        self._provenance = provenance
        self._layout = layout_of(provenance)
        self._keep_on = keep_on
        self._folder.create(estimated_bytes, free_bytes)
        self._published = False

    def __enter__(self) -> DraftWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._published:
            return
        if kind is not None and issubclass(kind, self._keep_on):
            self._folder.set_aside()
        else:
            self._folder.discard()

    @property
    def finished_layers(self) -> tuple[int, ...]:
        """Decoder layers that need not be added again, ascending."""
        return self._folder.progress.finished_layers

    def add_layer(self, decoder_layer: int, experts: Iterable[ExpertMatrices]) -> None:
        """Write one layer's experts, in the order of their indices; taken one by one. A finished layer is
        replaced.

        Raises:
            DraftError: the disk is full or not writable.
            ValueError: a matrix does not fit the format.
        """
        tensors: dict[str, Tensor] = {}
        for expert, matrices in enumerate(experts):
            tensors |= self.pack(decoder_layer, expert, matrices)
        self.add_packed(decoder_layer, tensors)

    def pack(self, decoder_layer: int, expert: int, matrices: ExpertMatrices) -> dict[str, Tensor]:
        """What the files hold of one expert, on the CPU. Any thread may ask.

        Raises:
            ValueError: a matrix does not fit the format.
        """
        tensors: dict[str, Tensor] = {}
        for projection, matrix in zip(self._naming.projections, matrices, strict=True):
            module = self._naming.module(decoder_layer, expert, projection)
            packed = self._layout.pack(matrix)  # where the matrix is: a GPU packs faster
            tensors |= {f"{module}.{part}": tensor.cpu() for part, tensor in packed.items()}
        return tensors

    def add_packed(self, decoder_layer: int, tensors: Mapping[str, Tensor]) -> None:
        """`add_layer` of what `pack` gave for each expert of the layer, in order.

        Raises:
            DraftError: the disk is full or not writable.
        """
        with write_errors(self._folder.out):
            self._folder.progress.add(decoder_layer, tensors)

    def read_layer(
        self, decoder_layer: int, num_experts: int, up_shape: tuple[int, int]
    ) -> Iterator[ExpertMatrices]:
        """The matrices of a finished layer, as `DraftCheckpoint.layer` gives them."""
        assert decoder_layer in self.finished_layers
        header = read_file_header(self._folder.progress.shard(decoder_layer))
        tensors = {tensor.name: tensor for tensor in header.tensors}
        reader = ExpertReader(self._folder.out, tensors, self._layout, self._naming)
        return reader.layer(decoder_layer, num_experts, up_shape)

    def publish(self) -> Path:
        """Write the JSON files and move the folder into place; the draft's path.

        Raises:
            DraftError: the disk is full or not writable, or `out` has been taken meanwhile.
        """
        quantization = self._layout.config()
        folder = self._folder.path
        with write_errors(self._folder.out):
            self._folder.progress.complete()
            write_json(folder / CONFIG_NAME, draft_config(self._config, quantization))
            write_json(folder / QUANTIZE_CONFIG_FILE, quantization)
            write_json(folder / PROVENANCE_FILE, self._provenance.to_json())
        path = self._folder.publish()
        self._published = True
        return path
