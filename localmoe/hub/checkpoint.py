"""A read-only view of a model folder's weight files, from their headers alone. Does not know which tensor
is an expert, and loads no weights."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from localmoe.core.errors import CheckpointError
from localmoe.hub.download_record import snapshot_revision
from localmoe.hub.file_version import open_again
from localmoe.hub.float8_tensors import with_scales
from localmoe.hub.int4_tensors import with_integers
from localmoe.hub.nvfp4_tensors import with_fours
from localmoe.hub.safetensors_header import FileHeader, TensorHeader, read_file_header, shown
from localmoe.hub.weight_files import find_weights, read_config

__all__ = ["Checkpoint", "TensorHeader"]

FINGERPRINT_EDGE_BYTES = 64 * 1024
FINGERPRINT_PIECES = 1024  # evenly through all files' data: every 60 MB of 60 GB
FINGERPRINT_PIECE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked model folder.

    Attributes:
        config: what config.json says.
        tensors: every tensor of the weight files, by name; scales of weights in codes are a part of theirs.
        files: the weight files, in name order.
        total_bytes: bytes of all tensors.
        revision: of the Hub, when it was opened; "" if unknown.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorHeader]
    files: tuple[Path, ...]
    total_bytes: int
    _headers: tuple[FileHeader, ...]
    revision: str = ""
    _fingerprint: list[str] = field(default_factory=list, repr=False, compare=False)  # one, once it is known

    @classmethod
    def open(cls, folder: Path, *, as_stored: bool = False) -> Checkpoint:
        """Read and check config, index and headers; reads no weights. as_stored: weights in codes and their
        scales stay tensors of their own.

        Raises:
            ModelNotFoundError: the folder is missing, empty or no model.
            UnsupportedModelError: the weights are not safetensors, or in codes that lie as is not read.
            CheckpointError: a file is missing, damaged or truncated, or another revision was put in place
                meanwhile.
        """
        revision, config = snapshot_revision(folder), read_config(folder)
        files, index = find_weights(folder)
        headers = tuple(read_file_header(file) for file in files)
        tensors = _merge(headers)
        _check_index(index, tensors)
        total_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        if (snapshot_revision(folder), read_config(folder)) != (revision, config):  # of which headers may be
            raise CheckpointError(f"Model folder {folder} has changed while it was opened: load it again.")
        if not as_stored:
            tensors = with_integers(with_scales(with_fours(tensors, config), config), config)
        return cls(folder, config, MappingProxyType(tensors), files, total_bytes, headers, revision)

    def fingerprint(self) -> str:
        """SHA-256 (hex) over each weight file's name, size, header, the first and last 64 KiB of its data and
        pieces of 4 KiB in between: tells models apart, and those that share most of their layers, without
        reading gigabytes; it is no proof against forgery. It is read once and then kept, so that it stays
        that of the weights that were loaded.

        Raises:
            CheckpointError: a file is gone or has changed since it was opened.
        """
        if self._fingerprint:
            return self._fingerprint[0]
        digest = hashlib.sha256()
        data_bytes = sum(header.num_bytes - header.data_start for header in self._headers)
        step = max(FINGERPRINT_PIECE_BYTES, data_bytes // FINGERPRINT_PIECES)
        for header in self._headers:
            name = header.file.name.encode("utf-8", "surrogateescape")
            digest.update(len(name).to_bytes(8, "little") + name)
            digest.update(header.num_bytes.to_bytes(8, "little"))
            _hash_parts(digest.update, header, step)
        self._fingerprint.append(digest.hexdigest())
        return self._fingerprint[0]

    def check_unchanged(self) -> None:
        """See that the folder holds what it held when it was opened.

        Raises:
            CheckpointError: a file is gone or has changed, or the files are another revision's.
        """
        for header in self._headers:
            try:
                open_again(header.file, header.version).close()
            except OSError as error:
                raise _unreadable(header.file, error) from error
        if snapshot_revision(self.folder) != self.revision:
            raise CheckpointError(
                f"Model folder {self.folder} has changed since it was opened: load the model again."
            )


def _merge(headers: tuple[FileHeader, ...]) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    for header in headers:
        for tensor in header.tensors:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise CheckpointError(
                    f"Tensor {shown(tensor.name)} is in both {other.file} and {tensor.file.name}: "
                    "remove the file that does not belong to the model."
                )
    return tensors


def _check_index(index: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> None:
    for name, file_name in index.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.file.name != file_name:
            raise CheckpointError(
                f"The index places tensor {shown(name)} in {file_name}, which does not hold it: "
                "download the model again."
            )


def _hash_parts(update: Callable[[bytes], None], header: FileHeader, step: int) -> None:
    """Header, first and last data bytes of one file, and a piece every `step` bytes in between; what is one
    part's already is hashed once."""
    try:
        with io.BufferedReader(open_again(header.file, header.version)) as stream:
            update(stream.read(header.data_start + FINGERPRINT_EDGE_BYTES))
            for at in range(header.data_start + step, header.num_bytes - FINGERPRINT_EDGE_BYTES, step):
                if at >= stream.tell():
                    stream.seek(at)
                    update(stream.read(FINGERPRINT_PIECE_BYTES))
            stream.seek(max(stream.tell(), header.num_bytes - FINGERPRINT_EDGE_BYTES))
            update(stream.read(FINGERPRINT_EDGE_BYTES))
    except OSError as error:
        raise _unreadable(header.file, error) from error


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"Weight file {file} cannot be read: {error.strerror or error}.")
