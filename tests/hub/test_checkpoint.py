"""A model folder as a whole: what opens, what is refused and with which words, and its fingerprint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors_files import (
    MOE_CONFIG,
    write_model,
    write_sharded_model,
    write_snapshot,
    write_tensors,
)

from localmoe.core.errors import CheckpointError, LocalMoeError, ModelNotFoundError, UnsupportedModelError
from localmoe.hub import checkpoint as checkpoints
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.safetensors_header import FileHeader, read_file_header

SHARD = "model-00002-of-00002.safetensors"


def test_a_single_file_model_opens_with_its_config_and_tensors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "m"))
    assert checkpoint.config == MOE_CONFIG
    assert {name: header.shape for name, header in checkpoint.tensors.items()} == {"a": (2, 3), "b": (4,)}
    assert checkpoint.total_bytes == 40
    assert checkpoint.files == (tmp_path / "m" / "model.safetensors",)


def test_a_sharded_model_opens_with_each_tensor_in_its_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_sharded_model(tmp_path / "m"))
    assert [file.name for file in checkpoint.files] == ["model-00001-of-00002.safetensors", SHARD]
    assert checkpoint.tensors["b"].file.name == SHARD


def test_shards_without_an_index_open_only_if_all_are_there(tmp_path: Path) -> None:
    folder = write_sharded_model(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    assert set(Checkpoint.open(folder).tensors) == {"a", "b"}
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match="1 of the 2 files"):
        Checkpoint.open(folder)


def test_a_missing_folder_a_file_and_an_empty_folder_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "file", "empty", "x" * 5000):
        with pytest.raises(ModelNotFoundError):
            Checkpoint.open(tmp_path / name)


def test_a_folder_with_weights_but_no_config_is_no_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        Checkpoint.open(folder)


def test_a_config_without_any_weights_is_no_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model-Q4_K_M.gguf"])
def test_weights_in_other_formats_alone_are_unsupported(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000, '"qwen2_moe"'])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(folder)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = write_sharded_model(tmp_path / "m")
    whole = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(whole[:-1])
    with pytest.raises(
        CheckpointError, match=rf"{SHARD}.*{len(whole)} bytes expected, {len(whole) - 1} found"
    ):
        Checkpoint.open(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_sharded_model(tmp_path / "m")
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD} is missing"):
        Checkpoint.open(folder)


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_sharded_model(tmp_path / "m", {"a": SHARD, "b": SHARD})
    with pytest.raises(CheckpointError, match="'a'"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "..safetensors",
        ".hidden.safetensors",
        "passwd",
        "",
        "x\0.safetensors",
        "x\n.safetensors",
    ],
)
def test_an_index_that_points_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    write_tensors(tmp_path / "x.safetensors", {"a": [1]})
    folder = write_sharded_model(tmp_path / "m", {"a": name})
    with pytest.raises(CheckpointError, match="plain name"):
        Checkpoint.open(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(
    weight_map=st.none()
    | st.integers()
    | st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=20), max_size=3)
)
def test_an_arbitrary_index_raises_nothing_but_a_checkpoint_error(tmp_path: Path, weight_map: object) -> None:
    folder = write_sharded_model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_sharded_model(tmp_path / "m")
    write_tensors(folder / SHARD, {"a": [1], "b": [4]})
    with pytest.raises(CheckpointError, match="both"):
        Checkpoint.open(folder)


def test_a_snapshot_of_the_hugging_face_cache_opens_through_its_links(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "hub", "org/moe")
    assert set(Checkpoint.open(snapshot).tensors) == {"a", "b"}
    (tmp_path / "link").symlink_to(snapshot)
    assert set(Checkpoint.open(tmp_path / "link").tensors) == {"a", "b"}


def share_blob(cache: Path, snapshot: Path) -> None:
    """Move the weights' blob to the store that all repos of a cache share, as recent versions do."""
    blob = (snapshot / "model.safetensors").resolve()
    store = cache / "blobs" / "ab"
    store.mkdir(parents=True)
    blob.rename(store / "abcd")
    blob.symlink_to(os.path.relpath(store / "abcd", blob.parent))


def test_a_snapshot_opens_through_the_blob_store_that_repos_share(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, "org/moe")
    share_blob(tmp_path, snapshot)
    (tmp_path / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    assert set(Checkpoint.open(snapshot).tensors) == {"a", "b"}


def test_a_folder_of_that_name_without_the_store_s_mark_is_not_trusted(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, "org/moe")
    share_blob(tmp_path, snapshot)
    with pytest.raises(CheckpointError, match="leaves the model's folder"):
        Checkpoint.open(snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_that_leaves_the_model_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match="leaves the model's folder"):
        Checkpoint.open(folder)


def test_a_snapshot_that_links_into_another_repo_is_refused(tmp_path: Path) -> None:
    other = write_snapshot(tmp_path, "org/other")
    snapshot = write_snapshot(tmp_path, "org/moe")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to((other / "model.safetensors").resolve())
    with pytest.raises(CheckpointError, match="leaves the model's folder"):
        Checkpoint.open(snapshot)


def test_links_that_lead_nowhere_or_in_a_circle_and_pipes_are_refused(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "m") / "model.safetensors"
    weights.unlink()
    weights.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="missing"):
        Checkpoint.open(tmp_path / "m")
    weights.unlink()
    weights.symlink_to(weights.name)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "m")
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(CheckpointError, match="regular"):
        Checkpoint.open(tmp_path / "m")


def test_the_tensors_cannot_be_changed(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "m"))
    with pytest.raises(TypeError):
        checkpoint.tensors["c"] = checkpoint.tensors["a"]  # type: ignore[index]


def write_large_model(folder: Path) -> Path:
    """Big enough that the middle of its data lies outside both hashed edges."""
    write_model(folder)
    write_tensors(folder / "model.safetensors", {"a": [100_000]})
    return folder


def test_equal_models_in_other_folders_have_equal_fingerprints(tmp_path: Path) -> None:
    prints = {Checkpoint.open(write_large_model(tmp_path / name)).fingerprint() for name in ("m", "n")}
    assert len(prints) == 1 and len(prints.pop()) == 64


@pytest.mark.parametrize("position", [0, 65_535, -65_536, -1])
def test_a_changed_byte_at_either_edge_of_the_data_changes_the_fingerprint(
    tmp_path: Path, position: int
) -> None:
    checkpoint = Checkpoint.open(write_large_model(tmp_path / "m"))
    before = checkpoint.fingerprint()
    raw = bytearray(checkpoint.files[0].read_bytes())
    start = checkpoint.tensors["a"].offset
    raw[start + position if position >= 0 else position] ^= 1
    checkpoint.files[0].write_bytes(raw)
    assert Checkpoint.open(tmp_path / "m").fingerprint() != before


def test_models_that_share_their_first_and_last_layers_have_other_fingerprints(tmp_path: Path) -> None:
    """A hundredth of the data, wherever it is in between, is seen."""
    folder = write_large_model(tmp_path / "m")
    checkpoint = Checkpoint.open(folder)
    start, whole = checkpoint.tensors["a"].offset, checkpoint.files[0].read_bytes()
    prints = {checkpoint.fingerprint()}
    for place in range(70_000, 330_000, 20_000):
        raw = bytearray(whole)
        raw[start + place : start + place + 4096] = bytes(255 - byte for byte in raw[start + place :][:4096])
        checkpoint.files[0].write_bytes(raw)
        prints.add(Checkpoint.open(folder).fingerprint())
    assert len(prints) == 1 + len(range(70_000, 330_000, 20_000))


def test_other_names_shapes_and_files_change_the_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    prints = set()
    for shapes in ({"a": [2, 3]}, {"b": [2, 3]}, {"a": [3, 2]}, {"a": [6, 1]}):
        write_tensors(folder / "model.safetensors", shapes)
        prints.add(Checkpoint.open(folder).fingerprint())
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    prints.add(Checkpoint.open(folder).fingerprint())
    assert len(prints) == 5


def test_a_file_that_changed_its_size_since_opening_has_no_fingerprint(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "m"))
    with checkpoint.files[0].open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(CheckpointError, match="changed"):
        checkpoint.fingerprint()
    checkpoint.files[0].unlink()
    with pytest.raises(LocalMoeError, match="cannot be read"):
        checkpoint.fingerprint()


def test_a_file_of_the_same_size_in_its_place_has_no_fingerprint_and_a_known_one_stays(
    tmp_path: Path,
) -> None:
    write_large_model(tmp_path / "m")
    known, unread = (Checkpoint.open(tmp_path / "m") for _ in range(2))
    before = known.fingerprint()
    known.check_unchanged()
    replace_file(known.files[0])
    changed = r"has changed since it was opened: load the model again\.$"
    with pytest.raises(CheckpointError, match=changed):
        unread.fingerprint()
    with pytest.raises(CheckpointError, match=changed):
        known.check_unchanged()
    assert known.fingerprint() == before, "it is that of the weights that were opened"
    assert Checkpoint.open(tmp_path / "m").fingerprint() != before


def test_another_file_behind_the_link_of_a_snapshot_is_seen_and_other_links_to_it_are_not(
    tmp_path: Path,
) -> None:
    checkpoint = Checkpoint.open(write_snapshot(tmp_path, "org/moe"))
    assert checkpoint.revision == "abc123"
    blob = checkpoint.files[0].resolve()
    os.link(blob, tmp_path / "elsewhere")
    checkpoint.check_unchanged()
    replace_file(blob)
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        checkpoint.check_unchanged()


@pytest.mark.parametrize("what", ["config", "revision"])
def test_a_folder_in_which_another_model_appears_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = write_model(tmp_path / "m")

    def changing(file: Path) -> FileHeader:
        if what == "config":
            (folder / "config.json").write_text(json.dumps({**MOE_CONFIG, "rope_theta": 5.0}))
        else:
            record = {"repo_id": "org/moe", "revision": "b" * 40}
            (folder / "localmoe_download.json").write_text(json.dumps(record))
        return read_file_header(file)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "read_file_header", changing)
        with pytest.raises(CheckpointError, match="has changed while it was opened: load it again"):
            Checkpoint.open(folder)
    assert Checkpoint.open(folder).revision == ("" if what == "config" else "b" * 40)


def replace_file(path: Path) -> None:
    """Another file of the same size, later, and of the same header."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.with_suffix(".new").write_bytes(raw)
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path.with_suffix(".new"), ns=(later, later))
    path.with_suffix(".new").replace(path)
