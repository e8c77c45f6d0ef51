"""One weight file's header: valid files are read as the safetensors library reads them, and nothing else
passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from safetensors_files import data_bytes, header_of, write_raw, write_tensors

from localmoe.core.errors import CheckpointError
from localmoe.hub.safetensors_header import read_file_header

SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
SHAPES = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.lists(st.integers(0, 5), max_size=3),
    min_size=1,
    max_size=5,
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def read_json_header(folder: Path, header: Any, num_data_bytes: int) -> Any:
    """What reading gives for this header over this much data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return read_file_header(write_raw(folder / "model.safetensors", raw, num_data_bytes))


def is_accepted_by_safetensors(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


def test_a_file_written_by_safetensors_is_read_with_dtypes_shapes_and_places(tmp_path: Path) -> None:
    tensors = {
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "codes": torch.arange(5, dtype=torch.uint8),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_file_header(path)
    found = {tensor.name: (tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in header.tensors}
    assert found == {
        "half": ("BF16", (2, 3), 12),
        "empty": ("F32", (0, 4), 0),
        "scalar": ("I64", (), 8),
        "codes": ("U8", (5,), 5),
    }
    raw = path.read_bytes()
    for tensor in header.tensors:
        data = raw[tensor.offset : tensor.offset + tensor.num_bytes]
        assert data == tensors[tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes()


@SHARED_FOLDER
@given(shapes=SHAPES)
def test_every_tensor_of_a_valid_file_is_found(tmp_path: Path, shapes: dict[str, list[int]]) -> None:
    header = read_file_header(write_tensors(tmp_path / "model.safetensors", shapes))
    assert {tensor.name: list(tensor.shape) for tensor in header.tensors} == shapes
    assert sum(tensor.num_bytes for tensor in header.tensors) == header.num_bytes - header.data_start


@SHARED_FOLDER
@given(shapes=SHAPES, data=st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, shapes: dict[str, list[int]], data: Any) -> None:
    path = write_tensors(tmp_path / "model.safetensors", shapes)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CheckpointError):
        read_file_header(path)


@SHARED_FOLDER
@given(content=st.binary(max_size=60), claimed=st.integers(0, 2**64 - 1) | st.integers(0, 60))
def test_arbitrary_bytes_raise_nothing_but_a_checkpoint_error(
    tmp_path: Path, content: bytes, claimed: int
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(claimed.to_bytes(8, "little") + content)
    try:
        read_file_header(path)
    except CheckpointError:
        return
    assert content.rstrip() == b"{}"  # the only valid file that short


@SHARED_FOLDER
@given(
    entry=st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "BF16", "F4", "nonsense"]) | JSON_VALUES,
            "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON_VALUES,
            "data_offsets": st.lists(st.integers(-1, 20), min_size=2, max_size=2) | JSON_VALUES,
        },
    )
    | JSON_VALUES,
    num_data_bytes=st.integers(0, 20),
)
def test_no_header_passes_that_the_safetensors_library_refuses(
    tmp_path: Path, entry: Any, num_data_bytes: int
) -> None:
    path = tmp_path / "model.safetensors"
    try:
        read_json_header(tmp_path, {"a": entry}, num_data_bytes)
    except CheckpointError:
        return
    assert is_accepted_by_safetensors(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 100_000_001])
def test_a_huge_header_length_is_refused_without_allocating_it(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=str(length)):
        read_file_header(path)


def test_a_truncated_file_is_reported_with_both_sizes_and_a_remedy(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "model.safetensors", {"a": [100]})
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=f"{len(whole)} bytes expected, {len(whole) - 10} found.*again"):
        read_file_header(path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    header = header_of({"a": [2]})
    with pytest.raises(CheckpointError, match="damaged"):
        read_json_header(tmp_path, header, data_bytes(header) + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [4, 12]}, "overlaps"),
        ({"data_offsets": [12, 20]}, "gap"),
        ({"data_offsets": [8, 12]}, "8 bytes by its shape, 4 by its offsets"),
        ({"data_offsets": [16, 8]}, "not a range"),
        ({"data_offsets": [8.0, 16.0]}, "not a range"),
        ({"data_offsets": [-8, 0]}, "not a range"),
        ({"shape": [2**62, 2**62]}, "by its shape"),
        ({"shape": [-1, -2]}, "list of sizes"),
        ({"shape": [True, 2]}, "list of sizes"),
        ({"shape": [1] * 65}, "list of sizes"),
        ({"dtype": "F33"}, "unknown dtype"),
        ({"dtype": ["F32"]}, "unknown dtype"),
    ],
)
def test_a_second_tensor_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    header = header_of({"a": [2], "b": [2]})
    header["b"] |= change
    with pytest.raises(CheckpointError, match=message):
        read_json_header(tmp_path, header, 16)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},' * 2 + b'"c":{}}', "JSON"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            "twice",
        ),
        (b'{"a":{"dtype":"U8","shape":[1],"shape":[2],"data_offsets":[0,2]}}', "twice"),
        (b"[" * 100_000, "JSON"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', "JSON"),
        (b'{"\xff":{}}', "JSON"),
        (b"[]", "JSON object"),
        (b" {}", "JSON object"),
        (b"", "JSON"),
        (b'{"__metadata__":{"a":1}}', "metadata"),
        (b'{"__metadata__":[]}', "metadata"),
        (b'{"a":{"dtype":"U8"}}', "lacks"),
        (b'{"a":7}', "lacks"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_json_header(tmp_path, raw, 2)


def test_a_message_never_carries_control_characters_or_whole_long_names(tmp_path: Path) -> None:
    name = "\x1b[31m\n" + "x" * 10_000
    with pytest.raises(CheckpointError) as caught:
        read_json_header(tmp_path, {name: {}}, 0)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500 + len(str(tmp_path))


def test_a_name_that_patterns_would_take_minutes_over_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.1." * 40_000
    with pytest.raises(CheckpointError, match="1160000 characters, more than 1000; download") as caught:
        read_json_header(tmp_path, header_of({name: [0]}), 0)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
    longest = "x" * 1000
    assert [tensor.name for tensor in read_json_header(tmp_path, header_of({longest: [0]}), 0).tensors]


def test_a_git_lfs_pointer_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_file_header(path)
