"""Finds the files that make up a model folder and holds them inside it. Reads no tensor."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from localmoe.core.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from localmoe.hub.modelopt_config import FILE_NAME, in_brief, wants_file, with_quantisation
from localmoe.hub.safetensors_header import shown

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARED_BLOBS_MARKER = ".huggingface-shared-blobs"
MAX_JSON_BYTES = 100_000_000
_SAFE_NAME = re.compile(r"[\w+-][\w.+ -]*\.safetensors")
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def allowed_roots(folder: Path) -> tuple[Path, ...]:
    """The folders that links of a model may point into: its own, and, for a snapshot of the Hugging Face
    cache (repo/snapshots/revision), the repo's cache folder, whose blobs may in turn be links into the
    blob store that the repos of one cache share."""
    folder = folder.resolve()
    repo = folder.parent.parent
    if folder.parent.name != "snapshots" or not (repo / "blobs").is_dir():
        return (folder,)
    store = repo.parent / "blobs"
    if repo.name.startswith("models--") and (store / SHARED_BLOBS_MARKER).is_file():
        return (repo, store)
    return (repo,)


def checked_file(folder: Path, name: str) -> Path:
    """`folder / name`, known to be a regular file that does not lie elsewhere through a link.

    Raises:
        CheckpointError: it is missing, no regular file, or a link that leaves the model's folder.
    """
    path = folder / name
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"File {path} is missing: download the model again.") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(f"File {path} cannot be read: {error}.") from error
    if not any(target.is_relative_to(root) for root in allowed_roots(folder)):
        raise CheckpointError(
            f"File {path} is a link that leaves the model's folder (to {target}): replace it by the file."
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a regular file: download the model again.")
    return path


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file is too long, cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"File {path} cannot be read: {error.strerror or error}.") from error
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(f"File {path} is longer than {MAX_JSON_BYTES} bytes: download it again.")
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"File {path} is not valid JSON ({str(error)[:100]}): download it again."
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"File {path} does not hold a JSON object: download it again.")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a model folder, with what a file of ModelOpt's says beside it.

    Raises:
        ModelNotFoundError: there is no such folder, or no config in it.
        CheckpointError: the config is damaged.
    """
    if not os.path.exists(folder):  # unlike Path.exists, never an OSError
        raise ModelNotFoundError(f"There is no folder {folder}: give the folder of a downloaded model.")
    if not os.path.isdir(folder):
        raise ModelNotFoundError(f"{folder} is not a folder: give the folder of a downloaded model.")
    if not os.path.lexists(folder / CONFIG_NAME):
        raise ModelNotFoundError(
            f"Folder {folder} is no model: it has no {CONFIG_NAME}; give the folder of a downloaded model."
        )
    config = read_json_object(checked_file(folder, CONFIG_NAME))
    if wants_file(config) and os.path.lexists(folder / FILE_NAME):
        config = with_quantisation(config, read_json_object(checked_file(folder, FILE_NAME)))
    return in_brief(config)


def find_weights(folder: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The safetensors files of a model folder in name order, and its index (tensor name -> file name;
    empty without an index file).

    Raises:
        ModelNotFoundError: there are no weights.
        UnsupportedModelError: there are only weights in other formats.
        CheckpointError: a file that should be there is missing, or the index is damaged.
    """
    if os.path.lexists(folder / INDEX_NAME):
        index = _read_index(checked_file(folder, INDEX_NAME))
        names = sorted(set(index.values()))
        if not any(os.path.lexists(folder / name) for name in names) and (folder / SINGLE_NAME).exists():
            names, index = [SINGLE_NAME], {}  # left over from shards, which the single file has replaced
        return tuple(checked_file(folder, name) for name in names), index
    present = _names_in(folder)
    names = [name for name in present if name.endswith(".safetensors")]
    if SINGLE_NAME in names:
        names = [SINGLE_NAME]
    if not names:
        _fail_without_weights(folder, present)
    _check_shards(folder, names)
    return tuple(checked_file(folder, name) for name in names), {}


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"Folder {folder} cannot be read: {error.strerror or error}.") from error


def _read_index(path: Path) -> dict[str, str]:
    index = read_json_object(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"File {path} has no weight_map: download it again.")
    for tensor, name in index.items():
        if not isinstance(name, str) or not _SAFE_NAME.fullmatch(name):
            raise CheckpointError(
                f"File {path} places tensor {shown(tensor)} in {shown(str(name))}, which is not the plain "
                "name of a safetensors file: download it again from a source you trust."
            )
    return index


def _check_shards(folder: Path, names: list[str]) -> None:
    """Without an index, names such as x-00001-of-00003 still say which files belong together."""
    matches = [match for name in names if (match := _SHARD_NAME.fullmatch(name))]
    present = Counter((match.group(1), match.group(3)) for match in matches)
    for (stem, total), count in present.items():
        if count != int(total):
            raise CheckpointError(
                f"Folder {folder} holds {count} of the {int(total)} files "
                f"{stem}-*-of-{total}.safetensors: download the missing ones."
            )


def _fail_without_weights(folder: Path, present: list[str]) -> NoReturn:
    others = [name for name in present if name.endswith(_OTHER_FORMATS)]
    if others:
        raise UnsupportedModelError(
            f"Folder {folder} has no safetensors weights, only {shown(others[0])}: localmoe reads "
            "safetensors alone, because they can be checked and read in pieces and run no code; get the "
            "safetensors version of the model."
        )
    raise ModelNotFoundError(
        f"Folder {folder} has no weights (*.safetensors): give the folder of a fully downloaded model."
    )
