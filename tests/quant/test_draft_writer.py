"""Draft folders: what is in them, and that they appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quant_samples import CONFIG, FINGERPRINT, GROUP_SIZE, NAMING, Source, build, gaussian, provenance
from safetensors.torch import load_file

from localmoe import __version__
from localmoe.core.errors import DraftError
from localmoe.kernels.int4 import quantize_rtn
from localmoe.quant import DraftProvenance, DraftWriter
from localmoe.quant.draft_writer import ExpertMatrices
from localmoe.quant.packing import pack_matrix


def sample_layer(layer: int, num_experts: int = 3) -> list[ExpertMatrices]:
    layers = []
    for expert in range(num_experts):
        gate, up, down = Source().matrices(layer, expert)
        layers.append(tuple(quantize_rtn(weight, GROUP_SIZE) for weight in (gate, up, down)))
    return layers


def writer_at(out: Path, base_model: str = "some/model", fingerprint: str = FINGERPRINT) -> DraftWriter:
    return DraftWriter(out, CONFIG, NAMING, provenance(base_model, fingerprint), 1000, shard_bytes=4096)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_small_draft_is_one_safetensors_file_and_three_json_files(tmp_path: Path) -> None:
    out = build(tmp_path / "draft")
    assert names_in(out) == {
        "config.json",
        "localmoe_draft.json",
        "model.safetensors",
        "quantize_config.json",
    }
    assert names_in(tmp_path) == {"draft"}


def test_shards_are_numbered_and_the_index_places_every_tensor(tmp_path: Path) -> None:
    with writer_at(tmp_path / "draft") as writer:
        for layer in range(2):
            writer.add_layer(layer + 1, sample_layer(layer))
        out = writer.publish()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    loaded = {file.name: load_file(file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in loaded.items() for name in tensors}
    tensors = {name: tensor for shard in loaded.values() for name, tensor in shard.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert all(sum(tensor.nbytes for tensor in shard.values()) <= 4096 for shard in loaded.values())
    expected = pack_matrix(sample_layer(1)[2][2])
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        assert torch.equal(tensors[f"model.layers.2.mlp.experts.2.down_proj.{part}"], getattr(expected, part))
    assert len(tensors) == 2 * 3 * 3 * 4


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
        "group_size": GROUP_SIZE, "localmoe_version": __version__,
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
    with pytest.raises(KeyboardInterrupt), writer_at(tmp_path / "draft") as writer:
        writer.add_layer(1, sample_layer(0))
        raise KeyboardInterrupt
    assert names_in(tmp_path) == set()


def test_a_draft_of_the_same_model_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    out = build(tmp_path / "draft")
    before = (out / "model.safetensors").read_bytes()
    with writer_at(out) as writer:
        writer.add_layer(1, sample_layer(0))
    assert (out / "model.safetensors").read_bytes() == before
    build(out, Source(num_experts=5))
    assert (out / "model.safetensors").stat().st_size > len(before)
    assert names_in(tmp_path) == {"draft"}


def test_a_swap_that_fails_half_way_puts_the_old_draft_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build(tmp_path / "draft")
    before = (out / "model.safetensors").read_bytes()
    rename = Path.rename

    def failing_rename(path: Path, target: Path) -> Path:
        if ".building-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(DraftError, match="Input/output error"):
        build(out)
    assert (out / "model.safetensors").read_bytes() == before
    assert names_in(tmp_path) == {"draft"}


def test_an_empty_folder_and_a_damaged_draft_may_be_taken(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    out = build(tmp_path / "draft")
    (out / "localmoe_draft.json").write_text("{")
    build(out)
    assert json.loads((out / "localmoe_draft.json").read_text())["base_model"] == "some/model"


def test_a_folder_or_file_of_someone_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder, file = tmp_path / "photos", tmp_path / "file"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"cat")
    file.write_bytes(b"text")
    draft_and_more = build(tmp_path / "draft")
    (draft_and_more / "notes.txt").write_text("mine")
    for out in (folder, file, draft_and_more):
        with pytest.raises(DraftError, match="not a draft"):
            writer_at(out)
    assert (folder / "cat.jpg").read_bytes() == b"cat" and file.read_bytes() == b"text"
    assert names_in(tmp_path) == {"photos", "file", "draft"}


def test_a_draft_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    out = build(tmp_path / "draft")
    with pytest.raises(DraftError, match="a draft of some/model, not of other/model"):
        writer_at(out, "other/model", "a" * 64)
    with writer_at(out, "renamed/model", FINGERPRINT), writer_at(tmp_path / "draft2"):
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


KILLED_BUILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from quant_samples import Source, build

class Hanging(Source):
    def matrices(self, layer, expert):
        if (layer, expert) == (1, 1):
            print("half way", flush=True)
            time.sleep(60)
        return super().matrices(layer, expert)

build(Path(sys.argv[1]), Hanging())
"""


def test_a_killed_build_leaves_no_draft_and_the_next_build_cleans_up(tmp_path: Path) -> None:
    out = tmp_path / "draft"
    other = tmp_path / ".draft2.building-1-1"  # of another draft: not ours to clean
    other.mkdir()
    command = [sys.executable, "-c", KILLED_BUILD, str(out), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "half way\n"
            with pytest.raises(DraftError, match=f"is being built by process {process.pid}"):
                build(out)
        finally:
            process.kill()
    leftovers = names_in(tmp_path) - {other.name}
    assert len(leftovers) == 1 and leftovers.pop().startswith(f".draft.building-{process.pid}-")
    assert not out.exists()
    build(out)
    assert names_in(tmp_path) == {"draft", other.name}


def test_a_leftover_whose_process_id_was_given_to_another_process_is_cleaned(tmp_path: Path) -> None:
    stale = tmp_path / f".draft.building-{os.getpid()}-1234"
    stale.mkdir()
    (tmp_path / f".draft.replaced-{os.getpid()}-1234").mkdir()
    build(tmp_path / "draft")
    assert names_in(tmp_path) == {"draft"}


def test_two_builds_of_one_draft_in_one_process_do_not_mix(tmp_path: Path) -> None:
    with writer_at(tmp_path / "draft") as writer:
        with pytest.raises(DraftError, match="being built"):
            writer_at(tmp_path / "draft")
        writer.add_layer(1, sample_layer(0))
        writer.publish()


def test_a_matrix_that_does_not_fit_the_format_leaves_nothing(tmp_path: Path) -> None:
    odd = quantize_rtn(gaussian(12, 16), GROUP_SIZE)
    with pytest.raises(ValueError, match="12 x 16"), writer_at(tmp_path / "draft") as writer:
        writer.add_layer(0, [(odd, odd, odd)])
    assert names_in(tmp_path) == set()
