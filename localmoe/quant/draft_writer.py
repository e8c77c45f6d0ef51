"""Writes a draft folder in the standard GPTQ checkpoint format, all of it or nothing. Chooses no codes and no
place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from localmoe.hub.weight_files import CONFIG_NAME
from localmoe.kernels.int4 import QuantizedMatrix
from localmoe.quant.draft_folder import DraftFolder, free_disk_bytes, write_errors
from localmoe.quant.draft_format import (
    PROJECTIONS,
    PROVENANCE_FILE,
    QUANTIZE_CONFIG_FILE,
    DraftProvenance,
    ExpertNaming,
    draft_config,
    quantization_config,
)
from localmoe.quant.packing import pack_matrix
from localmoe.quant.shard_writer import DEFAULT_SHARD_BYTES, ShardWriter, write_json

__all__ = ["DraftProvenance", "DraftWriter", "ExpertMatrices", "ExpertNaming"]

ExpertMatrices = tuple[QuantizedMatrix, QuantizedMatrix, QuantizedMatrix]  # gate, up, down


class DraftWriter:
    """A context manager: add the layers, then `publish`. Leaving it without publishing, by an exception or
    not, removes what was written, and `out` is as before.

    At most one shard is held in memory.
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
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        """Check the place and the free disk space, and start a temporary folder beside `out`.

        Raises:
            DraftError: `out` holds something else or is being built, the disk is too full or not writable.
        """
        self._folder = DraftFolder(out, provenance)
        self._config = config
        self._naming = naming
        self._provenance = provenance
        self._folder.create(estimated_bytes, free_bytes)
        self._shards = ShardWriter(self._folder.path, shard_bytes)
        self._published = False

    def __enter__(self) -> DraftWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._published:
            self._folder.discard()

    def add_layer(self, decoder_layer: int, experts: Iterable[ExpertMatrices]) -> None:
        """Write one layer's experts, in the order of their indices; taken one by one.

        Raises:
            DraftError: the disk is full or not writable.
            ValueError: a matrix does not fit the GPTQ format.
        """
        for expert, matrices in enumerate(experts):
            for projection, matrix in zip(PROJECTIONS, matrices, strict=True):
                assert matrix.group_size == self._provenance.group_size
                module = self._naming.module(decoder_layer, expert, projection)
                tensors = pack_matrix(matrix.to("cpu")).named(module)
                with write_errors(self._folder.out):
                    self._shards.add(tensors)

    def publish(self) -> Path:
        """Write the JSON files and move the folder into place; the draft's path.

        Raises:
            DraftError: the disk is full or not writable, or `out` has been taken meanwhile.
        """
        group_size = self._provenance.group_size
        with write_errors(self._folder.out):
            self._shards.finish()
            write_json(self._folder.path / CONFIG_NAME, draft_config(self._config, group_size))
            write_json(self._folder.path / QUANTIZE_CONFIG_FILE, quantization_config(group_size))
            write_json(self._folder.path / PROVENANCE_FILE, self._provenance.to_json())
        path = self._folder.publish()
        self._published = True
        return path
