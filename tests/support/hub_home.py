"""A Hub, a home and quick retries for the tests of downloads; models that are cheap to make."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest

from localmoe.hub.downloads import DownloadOptions, download_model
from localmoe.hub.http_files import Patience
from support.hub_server import HubServer, hub_server

REPO = "org/moe"
QUICK = DownloadOptions(patience=Patience(attempts=4, first_wait_s=0.01, longest_wait_s=0.05, stall_s=5.0))


@contextmanager
def hub_and_home(home: Path) -> Iterator[HubServer]:
    """HF_ENDPOINT is a new server and LOCALMOE_HOME this folder; nobody is logged in."""
    with hub_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("LOCALMOE_HOME", str(home))
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(home / "no-token"))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()


def weights(num_values: int, name: str = "a", seed: int = 0) -> bytes:
    """A safetensors file of random numbers, 4 bytes each."""
    entry = {"dtype": "F32", "shape": [num_values], "data_offsets": [0, 4 * num_values]}
    header = json.dumps({name: entry}).encode()
    return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(4 * num_values)


def small_model(num_values: int = 1000) -> dict[str, bytes]:
    """A repo with two shards, an index, and much that no model needs."""
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    return {
        "config.json": b'{"model_type": "qwen2_moe", "num_experts": 8}',
        "tokenizer.json": b'{"a": "large file that is text"}',
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b"{}",
        "model.safetensors.index.json": json.dumps({"weight_map": shards}).encode(),
        shards["a"]: weights(num_values, "a", 1),
        shards["b"]: weights(num_values, "b", 2),
        "pytorch_model.bin": b"pickle",
        "consolidated.00.safetensors": b"other layout",
        "original/model.safetensors": b"in a folder",
        "modeling_moe.py": b"print('code')",
        "README.md": b"# card",
    }


NEEDED = (
    "chat_template.jinja", "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
)  # fmt: skip


def needed_bytes(files: dict[str, bytes]) -> int:
    """Bytes of the files that a download of `small_model` fetches."""
    return sum(len(files[name]) for name in NEEDED)


def pull(revision: str | None = None) -> Path:
    """Download REPO without patience."""
    return download_model(REPO, revision, options=QUICK)


def contents(folder: Path) -> dict[str, bytes]:
    """A downloaded model's files but for the record of where they come from."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files.pop("localmoe_download.json")
    return files
