"""Streams tensors into the safetensors shards of one checkpoint, holding at most one shard in memory. Knows
no quantisation and does not decide where the folder ends up."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEFAULT_SHARD_BYTES = 512 << 20
_ALIGNMENT = 8  # a header's length is padded to this many bytes, so that tensors start aligned
_DTYPE_NAMES = {torch.int32: "I32", torch.float16: "F16", torch.uint8: "U8"}


def write_synced(path: Path, *parts: bytes | memoryview) -> None:
    """A new file with these bytes, on the disk when this returns."""
    with path.open("xb") as stream:
        for part in parts:
            stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A new JSON file, on the disk when this returns."""
    write_synced(path, (json.dumps(value, indent=2) + "\n").encode())


class ShardWriter:
    """Writes model.safetensors, or model-0000i-of-0000n.safetensors and their index where there are several.

    Shards have provisional names until `finish`, since only then their number is known.
    """

    def __init__(self, folder: Path, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []  # names of the tensors of each written shard
        self._names: set[str] = set()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take CPU tensors that the caller will not change; a full shard is written at once."""
        for name, tensor in tensors.items():
            assert name not in self._names and tensor.is_contiguous()
            if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
                self._write_shard()
            self._names.add(name)
            self._pending[name] = tensor
            self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, give the shards their names and write the index."""
        if self._pending or not self._shards:
            self._write_shard()
        count = len(self._shards)
        if count == 1:
            _provisional(self._folder, 0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file_name = f"model-{index + 1:05}-of-{count:05}.safetensors"
            _provisional(self._folder, index).rename(self._folder / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        metadata = {"total_size": self._total_bytes}
        write_json(
            self._folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map}
        )

    def _write_shard(self) -> None:
        path = _provisional(self._folder, len(self._shards))
        data = [tensor.numpy().data.cast("B") for tensor in self._pending.values()]
        write_synced(path, _header(self._pending), *data)
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0


def _provisional(folder: Path, index: int) -> Path:
    return folder / f"shard-{index + 1:05}.part"


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Length and JSON header of a safetensors file that holds these tensors end to end, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
