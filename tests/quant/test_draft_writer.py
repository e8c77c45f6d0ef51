"""Draft folders: what is in them, and that they appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from quant_samples import (
    CONFIG,
    FINGERPRINT,
    GROUP_SIZE,
    NAMING,
    Source,
    build,
    gaussian,
    names_in,
    provenance,
    sample_layer,
    weights_of,
    writer_at,
)
from safetensors.torch import load_file

from localmoe import __version__
from localmoe.core.errors import DraftError
from localmoe.kernels.codes import quantize_rtn
from localmoe.quant import DraftProvenance, DraftWriter
from localmoe.quant.packing import pack_matrix


def test_a_draft_of_one_layer_is_one_safetensors_file_and_three_json_files(tmp_path: Path) -> None:
    out = build(tmp_path / "draft", Source(num_layers=1))
    assert names_in(out) == {
        "config.json",
        "localmoe_draft.json",
        "model.safetensors",
        "quantize_config.json",
    }
    assert names_in(tmp_path) == {"draft"}


def test_every_layer_is_a_numbered_shard_and_the_index_places_every_tensor(tmp_path: Path) -> None:
    with writer_at(tmp_path / "draft") as writer:
        for layer in (1, 0):  # layers are numbered as they lie in the model
            writer.add_layer(layer + 1, sample_layer(layer))
        out = writer.publish()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    loaded = {file.name: load_file(file) for file in files}
    for layer, shard in zip((1, 2), loaded.values(), strict=True):
        assert all(name.startswith(f"model.layers.{layer}.") for name in shard) and len(shard) == 3 * 3 * 4
    assert index["weight_map"] == {name: file for file, tensors in loaded.items() for name in tensors}
    tensors = {name: tensor for shard in loaded.values() for name, tensor in shard.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    expected = pack_matrix(sample_layer(1)[2][2])
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        assert torch.equal(tensors[f"model.layers.2.mlp.experts.2.down_proj.{part}"], getattr(expected, part))
    assert names_in(out) - names_in(build(tmp_path / "other")) == set()


def test_the_json_files_describe_a_gptq_checkpoint_and_its_origin(tmp_path: Path) -> None:
    out = build(tmp_path / "draft")
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == CONFIG
    assert quantization == json.loads((out / "quantize_config.json").read_text())
    expected = {
        "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": GROUP_SIZE,
        "desc_act": False, "sym": True, "lm_head": False, "pack_dtype": "int32",
    }  # fmt: skip
    assert expected.items() <= quantization.items()
    assert {"-:.*self_attn.*", "-:.*shared_expert.*", r"-:.*mlp\.gate$"} <= quantization["dynamic"].keys()
    origin = json.loads((out / "localmoe_draft.json").read_text())
    assert origin.pop("created").endswith("+00:00")
    assert origin == {
        "base_model": "some/model", "base_fingerprint": FINGERPRINT, "method": "rtn", "bits": 4,
        "group_size": GROUP_SIZE, "localmoe_version": __version__, "base_revision": "",
        "calibration_hash": "", "seed": 0, "settings": {},
    }  # fmt: skip


def test_no_path_of_this_machine_gets_into_the_draft(tmp_path: Path) -> None:
    config = {**CONFIG, "_name_or_path": "/home/me/model", "text_config": {"_name_or_path": "/home/me/model"}}
    for name in ("/home/me/model", r"C:\Users\me\model"):
        origin = DraftProvenance.now(name, FINGERPRINT, "rtn", GROUP_SIZE)
        with DraftWriter(tmp_path / "draft", config, NAMING, origin, 1000) as writer:
            writer.add_layer(1, sample_layer(0))
            out = writer.publish()
        for file in out.glob("*.json"):
            assert "me/" not in file.read_text() and "Users" not in file.read_text()
        assert json.loads((out / "localmoe_draft.json").read_text())["base_model"] == "model"


def test_leaving_without_publishing_leaves_nothing(tmp_path: Path) -> None:
    with writer_at(tmp_path / "draft") as writer:
        writer.add_layer(1, sample_layer(0))
        assert len(names_in(tmp_path)) == 1
    assert names_in(tmp_path) == set()
    with pytest.raises(RuntimeError), writer_at(tmp_path / "draft") as writer:
        writer.add_layer(1, sample_layer(0))
        raise RuntimeError
    assert names_in(tmp_path) == set()


def test_a_draft_of_the_same_model_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    out = build(tmp_path / "draft")
    before = weights_of(out)
    with writer_at(out) as writer:
        writer.add_layer(1, sample_layer(0))
    assert weights_of(out) == before
    build(out, Source(num_experts=5))
    assert {name: len(data) > len(before[name]) for name, data in weights_of(out).items()} == {
        "model-00001-of-00002.safetensors": True,
        "model-00002-of-00002.safetensors": True,
    }
    assert names_in(tmp_path) == {"draft"}


def test_a_swap_that_fails_half_way_puts_the_old_draft_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build(tmp_path / "draft")
    before = weights_of(out)
    rename = Path.rename

    def failing_rename(path: Path, target: Path) -> Path:
        if ".building-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(DraftError, match="Input/output error"):
        build(out)
    assert weights_of(out) == before
    assert names_in(tmp_path) == {"draft"}


def test_an_empty_folder_and_a_damaged_draft_may_be_taken(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    out = build(tmp_path / "draft")
    for damaged in ("{", "[" * 100_000):
        (out / "localmoe_draft.json").write_text(damaged)
        build(out)
    assert json.loads((out / "localmoe_draft.json").read_text())["base_model"] == "some/model"


def test_a_folder_or_file_of_someone_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder, file = tmp_path / "photos", tmp_path / "file"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"cat")
    file.write_bytes(b"text")
    draft_and_more = build(tmp_path / "draft")
    (draft_and_more / "notes.txt").write_text("mine")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for out in (folder, file, draft_and_more, loop):
        with pytest.raises(DraftError, match="not a draft"):
            writer_at(out)
    assert (folder / "cat.jpg").read_bytes() == b"cat" and file.read_bytes() == b"text"
    assert names_in(tmp_path) == {"photos", "file", "draft", "loop"} and loop.is_symlink()


def test_a_draft_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    out = build(tmp_path / "draft")
    with pytest.raises(DraftError, match="a draft of some/model, not of other/model"):
        writer_at(out, provenance("other/model", "a" * 64))
    with writer_at(out, provenance("renamed/model")), writer_at(tmp_path / "draft2"):
        pass  # the same weights under another name are the same model


def test_too_little_disk_space_is_refused_with_numbers_before_anything_is_written(tmp_path: Path) -> None:
    asked: list[Path] = []

    def free(folder: Path) -> int:
        asked.append(folder)
        return 3 << 30

    needed = (4 << 30) - (16 << 20)
    with pytest.raises(DraftError, match=r"needs 4\.0 GiB .* has 3\.0 GiB free"):
        DraftWriter(tmp_path / "a" / "draft", CONFIG, NAMING, provenance(), needed, free_bytes=free)
    assert asked == [(tmp_path / "a").resolve()] and names_in(tmp_path / "a") == set()


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free some disk space"), (errno.EACCES, "another folder")]
)
def test_a_disk_that_refuses_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, pytest.raises(DraftError, match=remedy):
        patch.setattr("localmoe.quant.shard_writer.os.fsync", refuse)
        build(tmp_path / "draft")
    assert names_in(tmp_path) == set()


def test_a_matrix_that_does_not_fit_the_format_leaves_nothing(tmp_path: Path) -> None:
    odd = quantize_rtn(gaussian(12, 16), group_size=GROUP_SIZE)
    with pytest.raises(ValueError, match="12 x 16"), writer_at(tmp_path / "draft") as writer:
        writer.add_layer(0, [(odd, odd, odd)])
    assert names_in(tmp_path) == set()
