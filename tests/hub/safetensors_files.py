"""Writes safetensors files and model folders for tests, valid or deliberately not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOE_CONFIG = {"model_type": "qwen2_moe", "num_experts": 8}


def header_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """A valid float32 header for tensors laid end to end."""
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name, shape in shapes.items():
        begin, size = end, 4
        for length in shape:
            size *= length
        end = begin + size
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    return entries


def data_bytes(header: Mapping[str, Any]) -> int:
    """How much data a header from `header_of` describes."""
    return max((entry["data_offsets"][1] for entry in header.values()), default=0)


def write_raw(path: Path, header: bytes, num_data_bytes: int) -> Path:
    """Length, the given header and counted-up data bytes."""
    data = bytes(i % 251 for i in range(num_data_bytes))
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def write_tensors(path: Path, shapes: Mapping[str, Sequence[int]]) -> Path:
    """A valid file of float32 tensors."""
    header = header_of(shapes)
    return write_raw(path, json.dumps(header).encode(), data_bytes(header))


def write_model(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """A folder with a config and one small weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MOE_CONFIG if config is None else config))
    write_tensors(folder / "model.safetensors", {"a": [2, 3], "b": [4]})
    return folder


def write_sharded_model(folder: Path, index: Mapping[str, str] | None = None) -> Path:
    """Two shards with tensors a and b, and an index that says so (or another one)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MOE_CONFIG))
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_tensors(folder / names["a"], {"a": [2, 3]})
    write_tensors(folder / names["b"], {"b": [4]})
    weight_map = names if index is None else dict(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_snapshot(cache: Path, repo: str, revision: str = "abc123", *, main: bool = True) -> Path:
    """A repo in the layout of the Hugging Face cache, its files links into blobs; returns the snapshot."""
    root = cache / ("models--" + repo.replace("/", "--"))
    snapshot = root / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    made = write_model(cache / "made")
    for path in sorted(made.iterdir()):
        blob = root / "blobs" / f"{revision}-{path.name}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    made.rmdir()
    if main:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(revision)
    return snapshot
