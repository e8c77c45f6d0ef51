"""Reading drafts: round trips, and one sentence for everything that is wrong with one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_samples import FINGERPRINT, GROUP_SIZE, HIDDEN, INTERMEDIATE, NAMING, Source, build
from safetensors.torch import load_file, save_file

from localmoe.core.errors import DraftError
from localmoe.kernels.codes import BITS, quantize_rtn
from localmoe.kernels.cpu.rounding import round_bfloat16
from localmoe.quant import DraftCheckpoint, DraftProvenance, DraftWriter, ExpertNaming
from localmoe.quant.expert_reader import OpenFile
from localmoe.quant.packing import pack_matrix

UP_SHAPE = (INTERMEDIATE, HIDDEN)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return build(tmp_path / "draft")


def first_shard(draft: Path) -> Path:
    """The file of decoder layer 1."""
    return draft / "model-00001-of-00002.safetensors"


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_quantization(draft: Path, **values: object) -> None:
    edit_json(draft / "config.json", lambda config: config["quantization_config"].update(values))


def read_one(draft: Path, shape: tuple[int, int] = UP_SHAPE, decoder_layer: int = 1) -> None:
    DraftCheckpoint.open(draft).matrix(NAMING, decoder_layer, 0, "up", shape)


def one_sentence(error: pytest.ExceptionInfo[DraftError]) -> None:
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and "Traceback" not in text


def test_every_matrix_comes_back_as_it_was_quantised(draft: Path) -> None:
    checkpoint = DraftCheckpoint.open(draft)
    assert (checkpoint.bits, checkpoint.group_size) == (4, GROUP_SIZE)
    source = Source()
    for layer in range(source.num_layers):
        for expert in range(source.num_experts):
            for projection, weight in zip(
                ("gate", "up", "down"), source.matrices(layer, expert), strict=True
            ):
                expected = round_bfloat16(weight, 4, GROUP_SIZE)
                found = checkpoint.matrix(NAMING, layer + 1, expert, projection, tuple(weight.shape))
                assert torch.equal(found.codes, expected.codes)
                assert torch.equal(found.scales, expected.scales)
                assert found.in_features == weight.shape[1]


def test_the_draft_of_the_right_model_is_accepted_and_another_is_not(draft: Path) -> None:
    checkpoint = DraftCheckpoint.open(draft)
    checkpoint.check_base(FINGERPRINT, "some/model")
    checkpoint.check_base(FINGERPRINT, "the same under another name")
    with pytest.raises(DraftError, match=r"belongs to another model \(some/model") as error:
        checkpoint.check_base("0" * 64, "other/model")
    one_sentence(error)


def test_a_missing_draft_says_how_to_build_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(DraftError, match=r"no draft in .* 'localmoe draft MODEL'") as error:
            DraftCheckpoint.open(folder)
        one_sentence(error)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_noticed_on_opening(draft: Path, kept: int) -> None:
    file = first_shard(draft)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        DraftError, match=r"damaged .*model-00001-of-00002\.safetensors.*: build it again"
    ) as error:
        DraftCheckpoint.open(draft)
    one_sentence(error)
    assert "download" not in str(error.value)


def test_a_file_that_shrinks_after_opening_is_noticed(draft: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(draft, tmp_path / "whole"))
    checkpoint = DraftCheckpoint.open(draft)
    with (first_shard(draft)).open("r+b") as stream:
        stream.truncate(
            checkpoint._checkpoint.tensors["model.layers.1.mlp.experts.0.up_proj.qweight"].offset + 5
        )
    with pytest.raises(DraftError, match="has changed since it was opened: load"):
        checkpoint.matrix(NAMING, 1, 0, "up", UP_SHAPE)
    later = DraftCheckpoint.open(whole)._checkpoint.tensors
    with OpenFile(whole) as file:
        file.read(later["model.layers.1.mlp.experts.0.gate_proj.qweight"])
        os.truncate(first_shard(whole), later["model.layers.1.mlp.experts.0.up_proj.qweight"].offset + 5)
        with pytest.raises(DraftError, match="shorter"):
            file.read(later["model.layers.1.mlp.experts.0.up_proj.qweight"])
    (first_shard(draft)).unlink()
    with pytest.raises(DraftError, match="cannot be read"):
        checkpoint.matrix(NAMING, 1, 0, "up", UP_SHAPE)


def test_a_matrix_of_another_shape_is_refused(draft: Path) -> None:
    for shape in ((INTERMEDIATE, HIDDEN + 8), (INTERMEDIATE + 8, HIDDEN), (HIDDEN, INTERMEDIATE)):
        with pytest.raises(DraftError, match="does not fit the model") as error:
            read_one(draft, shape)
        one_sentence(error)


def test_a_missing_layer_or_other_names_are_refused(draft: Path) -> None:
    with pytest.raises(DraftError, match=r"no tensor model\.layers\.7\."):
        read_one(draft, decoder_layer=7)
    mixtral = ExpertNaming("model.layers.{layer}.block_sparse_moe.experts.{expert}", "w1", "w3", "w2")
    with pytest.raises(DraftError, match=r"block_sparse_moe\.experts\.0\.w3\.qweight"):
        DraftCheckpoint.open(draft).matrix(mixtral, 1, 0, "up", UP_SHAPE)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"bits": 5}, "has 5 bits"),
        ({"bits": 8}, "differ"),
        ({"bits": True}, "has True bits"),
        ({"sym": False}, "sym False"),
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"checkpoint_format": ["gptq"]}, "format"),
        ({"quant_method": "awq"}, "awq"),
        ({"checkpoint_format": "gptq_p"}, "format gptq_p"),
        ({"group_size": -1}, "differ"),
        ({"group_size": -2}, "group size -2"),
        ({"group_size": 300}, "group size 300"),
        ({"group_size": "128"}, "group size 128 is no number"),
        ({"group_size": 32}, "differ"),
    ],
)
def test_other_quantisations_are_refused(draft: Path, change: dict[str, object], word: str) -> None:
    edit_quantization(draft, **change)
    with pytest.raises(DraftError, match=word) as error:
        DraftCheckpoint.open(draft)
    one_sentence(error)


def test_a_plain_model_is_no_draft(draft: Path) -> None:
    edit_json(draft / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(DraftError, match="plain weights"):
        DraftCheckpoint.open(draft)


@pytest.mark.parametrize("text", ["{", "[]", '{"base_model": 3}'])
def test_a_damaged_provenance_is_refused(draft: Path, text: str) -> None:
    (draft / "localmoe_draft.json").write_text(text)
    with pytest.raises(DraftError, match=r"damaged .*localmoe_draft\.json") as error:
        DraftCheckpoint.open(draft)
    one_sentence(error)


def test_a_revision_that_differs_is_refused_and_one_that_is_unknown_is_not(draft: Path) -> None:
    DraftCheckpoint.open(draft).check_base(FINGERPRINT, "some/model", "b" * 40)  # the draft's is unknown
    edit_json(draft / "localmoe_draft.json", lambda values: values.update(base_revision="a" * 40))
    checkpoint = DraftCheckpoint.open(draft)
    checkpoint.check_base(FINGERPRINT, "some/model", "a" * 40)
    checkpoint.check_base(FINGERPRINT, "some/model", "")
    with pytest.raises(DraftError, match="revision aaaaaaaaaaaa of some/model and not to bbbb") as error:
        checkpoint.check_base(FINGERPRINT, "some/model", "b" * 40)
    one_sentence(error)


def test_drafts_of_older_versions_are_read(draft: Path) -> None:
    later = ("base_revision", "calibration_hash", "seed", "settings")
    edit_json(draft / "localmoe_draft.json", lambda values: [values.pop(key) for key in later])
    checkpoint = DraftCheckpoint.open(draft)
    assert checkpoint.provenance is not None and checkpoint.provenance.base_revision == ""
    assert (checkpoint.provenance.seed, checkpoint.provenance.settings) == (0, {})
    checkpoint.check_base(FINGERPRINT, "some/model", "a" * 40)


@pytest.mark.parametrize("change", [{"seed": "1"}, {"settings": []}, {"settings": {"a": [1]}}, {"bits": "4"}])
def test_a_provenance_with_a_value_of_another_type_is_refused(draft: Path, change: dict[str, Any]) -> None:
    edit_json(draft / "localmoe_draft.json", lambda values: values.update(change))
    with pytest.raises(DraftError, match=r"damaged .*localmoe_draft\.json"):
        DraftCheckpoint.open(draft)


@pytest.mark.parametrize("bits", BITS)
def test_drafts_of_all_bits_come_back_layer_by_layer(tmp_path: Path, bits: int) -> None:
    settings = {"damping": 0.01, "act_order": True}
    origin = DraftProvenance.now(
        "some/model", FINGERPRINT, "gptq", GROUP_SIZE, bits, base_revision="a" * 40,
        calibration_hash="c" * 64, seed=7, settings=settings,
    )  # fmt: skip
    source = Source(hidden=64, intermediate=32)  # fill whole words in all bits
    layers = [
        [tuple(quantize_rtn(w, bits, GROUP_SIZE) for w in source.matrices(layer, e)) for e in range(3)]
        for layer in (0, 1)
    ]
    with DraftWriter(tmp_path / "draft", {}, NAMING, origin, 1000) as writer:
        for layer, experts in enumerate(layers):
            writer.add_layer(layer + 1, experts)
        checkpoint = DraftCheckpoint.open(writer.publish())
    assert checkpoint.provenance == origin and checkpoint.naming() == NAMING
    assert (checkpoint.bits, checkpoint.group_size) == (bits, GROUP_SIZE)
    for layer, experts in enumerate(layers):
        found = list(checkpoint.reader(NAMING).layer(layer + 1, 3, (32, 64)))
        for matrices, expected in zip(found, experts, strict=True):
            for matrix, wanted in zip(matrices, expected, strict=True):
                assert matrix.bits == bits and matrix.columns is None
                assert torch.equal(matrix.codes, wanted.codes) and torch.equal(matrix.scales, wanted.scales)


@pytest.mark.parametrize("label", ["gptq_v2", "gptq", None])
def test_both_zero_point_formats_of_other_packers_are_read(draft: Path, label: str | None) -> None:
    weight = Source().matrices(0, 0)[1]
    packed = pack_matrix(quantize_rtn(weight, group_size=GROUP_SIZE), 2 if label == "gptq_v2" else 1)
    save_file(packed.named("model.layers.1.mlp.experts.0.up_proj"), draft / "model.safetensors")
    (draft / "model.safetensors.index.json").unlink()
    edit_json(draft / "config.json", lambda config: config["quantization_config"].pop("checkpoint_format"))
    if label is not None:
        edit_quantization(draft, checkpoint_format=label)
    found = DraftCheckpoint.open(draft).matrix(NAMING, 1, 0, "up", UP_SHAPE)
    assert torch.equal(found.codes, quantize_rtn(weight, group_size=GROUP_SIZE).codes)


@pytest.mark.parametrize(
    ("part", "value", "word"),
    [
        ("qzeros", 0x66666666, "not symmetric .* is 7 and should be 8"),
        ("g_idx", 0, "group 0 .* has 40 rows and should have 16"),
        ("scales", float("nan"), "not finite"),
    ],
)
def test_values_that_cannot_be_computed_with_are_refused(
    draft: Path, part: str, value: float, word: str
) -> None:
    tensors = load_file(first_shard(draft))
    tensors[f"model.layers.1.mlp.experts.0.up_proj.{part}"].fill_(value)
    save_file(tensors, first_shard(draft))
    with pytest.raises(DraftError, match=word) as error:
        read_one(draft)
    one_sentence(error)


def test_a_tensor_of_another_dtype_is_refused(draft: Path) -> None:
    tensors = load_file(first_shard(draft))
    name = "model.layers.1.mlp.experts.0.up_proj.scales"
    tensors[name] = tensors[name].float()
    save_file(tensors, first_shard(draft))
    with pytest.raises(DraftError, match=r"F32 .* should be F16"):
        read_one(draft)
