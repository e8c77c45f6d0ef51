"""Writes safetensors shards and JSON files that are whole or absent, and makes a checkpoint of finished
shards. Knows no quantisation and does not decide where the folder ends up."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localmoe.core.whole_file import sync_folder
from localmoe.hub.safetensors_header import read_file_header
from localmoe.hub.weight_files import INDEX_NAME, SINGLE_NAME

_ALIGNMENT = 8  # a header's length is padded to this many bytes, so that tensors start aligned
_DTYPE_NAMES = {torch.int32: "I32", torch.float16: "F16", torch.uint8: "U8", torch.float32: "F32"}
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardMark:
    """What tells a whole shard from a damaged one.

    Attributes:
        num_bytes: of the file.
        sha256: of the file, hexadecimal.
    """

    num_bytes: int
    sha256: str

    @classmethod
    def of_parts(cls, parts: Iterable[bytes | memoryview]) -> ShardMark:
        """Of the parts end to end."""
        digest, total = hashlib.sha256(), 0
        for part in parts:
            digest.update(part)
            total += len(part)
        return cls(total, digest.hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> ShardMark:
        """Of a file as it lies on the disk, read from one end to the other; OSError as `open` raises."""
        with path.open("rb") as stream:
            return cls.of_parts(iter(lambda: stream.read(_READ_BYTES), b""))


def write_synced(path: Path, *parts: bytes | memoryview) -> None:
    """The file `path` holds these bytes, on the disk when this returns; before, it is as it was."""
    part_path = path.with_name(path.name + ".part")
    with part_path.open("wb") as stream:
        for part in parts:
            stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())
    part_path.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file, written as `write_synced` does."""
    write_synced(path, (json.dumps(value, indent=2) + "\n").encode())


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> ShardMark:
    """A safetensors file of contiguous CPU tensors, end to end in this order; written as `write_synced`
    does."""
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    parts: list[bytes | memoryview] = [_header(tensors)]
    parts += [tensor.numpy().data.cast("B") for tensor in tensors.values()]
    write_synced(path, *parts)
    return ShardMark.of_parts(parts)


def shard_name(index: int, count: int) -> str:
    """Name of shard `index` of `count` in a checkpoint."""
    return SINGLE_NAME if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def number_shards(folder: Path, shards: Sequence[Path]) -> None:
    """Give shards their names in a checkpoint, in this order, and write its index if there are several."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for index, shard in enumerate(shards):
        header = read_file_header(shard)
        total_bytes += header.num_bytes - header.data_start
        weight_map |= {tensor.name: shard_name(index, len(shards)) for tensor in header.tensors}
    if len(shards) > 1:
        index_values = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / INDEX_NAME, index_values)
    for index, shard in enumerate(shards):
        shard.rename(folder / shard_name(index, len(shards)))


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
