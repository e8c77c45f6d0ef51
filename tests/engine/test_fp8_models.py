"""Models published in FP8 become the same 16-bit weights, or keep their experts as they are, which gives the
same answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.engines import ask
from support.float8_models import KEPT_BLOCK, By, write_float8_model
from support.tiny_models import CONTEXT, tiny_model
from support.vision_models import vision_model, write_vision_model

from localmoe.core.config import EngineConfig
from localmoe.core.errors import CheckpointError
from localmoe.core.types import ExpertKey, Progress
from localmoe.engine import Engine
from localmoe.engine.facts import local_facts
from localmoe.engine.sources import CheckpointSource
from localmoe.experts.record_store import RecordStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model import loader
from localmoe.model.draft_model import DraftModel, DraftModelShape
from localmoe.model.footprint import checkpoint_dtype
from localmoe.model.skeleton import Skeleton, with_records
from localmoe.quant import float8
from localmoe.quant.float8 import decode_into, values

CPU = torch.device("cpu")


def loaded(folder: Path, form: WeightForm = WeightForm.PLAIN) -> tuple[Skeleton, RecordStore]:
    source = CheckpointSource.open(str(folder))
    skeleton = source.skeleton(torch.bfloat16)
    assert form is WeightForm.PLAIN or source.coded_form(skeleton) is form
    skeleton = with_records(skeleton, form)
    return skeleton, source.load_weights(skeleton, CPU, progress=None, cancel=None)


def check_same(
    one: Path, other: Path, form: WeightForm = WeightForm.PLAIN, *, all_bits: bool = True
) -> RecordStore:
    """all_bits: of experts, too, where others may have been rounded to the number next to it in a few."""
    (found, records), (wanted, others) = loaded(one, form), loaded(other)
    for (name, weight), (same, expected) in zip(
        found.model.named_parameters(), wanted.model.named_parameters(), strict=True
    ):
        assert name == same and weight.is_meta == expected.is_meta
        assert weight.is_meta or torch.equal(weight, expected), name
    for layer in range(records.num_layers):
        for expert in range(records.num_experts):
            key = ExpertKey(layer, expert)
            for weights, expected in zip(records.weights(key), others.weights(key), strict=True):
                same_bits = (weights == expected).double().mean()
                assert same_bits == 1 or (not all_bits and same_bits > 0.9), key
                assert torch.allclose(weights, expected, rtol=2.0**-7, atol=0), key
    return records


@settings(max_examples=60)
@given(
    st.integers(1, 3), st.integers(1, 70), st.integers(1, 300), st.integers(1, 40), st.integers(1, 130),
    st.integers(0, 2**31 - 1), st.booleans(),
)  # fmt: skip
def test_any_part_is_decoded_as_its_scales_say(
    matrices: int, rows: int, columns: int, height: int, width: int, seed: int, with_numba: bool
) -> None:
    chance = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (matrices, rows, columns), dtype=torch.uint8, generator=chance)
    scales = torch.rand(matrices, -(-rows // height), -(-columns // width), generator=chance)
    scales *= torch.logspace(-39, 30, scales.numel()).view_as(scales)
    each = scales.repeat_interleave(height, 1).repeat_interleave(width, 2)[:, :rows, :columns]
    wanted = (values()[codes.long()].double() * each.double()).float().to(torch.bfloat16).flatten()
    first = int(torch.randint(0, codes.numel(), (), generator=chance))
    count = int(torch.randint(0, codes.numel() - first + 1, (), generator=chance))
    out = torch.full((count + 2,), 7.0, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patched:
        if not with_numba:
            patched.setattr(float8, "_loops", lambda: None)
        part = codes.flatten()[first : first + count]
        decode_into(part, scales, first, columns, rows, (height, width), out[1:-1])
    found, expected = out[1:-1], wanted[first : first + count]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert out[0] == out[-1] == 7.0, "something beside it was written"


@pytest.mark.parametrize("with_numba", [True, False])
def test_a_scale_that_is_no_number_makes_no_zeros(monkeypatch: pytest.MonkeyPatch, with_numba: bool) -> None:
    """Whatever its bits: those of a damaged file are all ones, and answers would not show it."""
    if not with_numba:
        monkeypatch.setattr(float8, "_loops", lambda: None)
    for bits in (-1, 0x7FFFFFFF, 0x7FFFE000, 0x7F800001, -(1 << 22)):
        scales = torch.tensor([bits], dtype=torch.int32).view(torch.float32).view(1, 1, 1)
        out = torch.zeros(4, dtype=torch.bfloat16)
        decode_into(torch.tensor([0, 1, 0x38, 0xFE]).byte(), scales, 0, 4, 1, (1, 4), out)
        assert out.isnan().all(), (bits, out)


@pytest.mark.parametrize(
    ("architecture", "by", "dtype", "published"),
    [
        ("qwen3_moe", "block", torch.float32, "fp8"),
        ("deepseek_v2", "block", torch.bfloat16, "fp8"),
        ("olmoe", "block", torch.float8_e8m0fnu, "fp8"),
        ("qwen2_moe", "tensor", torch.float32, "fp8"),
        ("qwen3_5_moe_text", "channel", torch.bfloat16, "compressed-tensors"),
        ("mixtral", "block", torch.float32, "compressed-tensors"),
        ("gpt_oss", "channel", torch.float16, "compressed-tensors"),  # whose matrices are transposed
    ],
)
def test_weights_are_the_codes_times_their_scales(
    tmp_path: Path, architecture: str, by: By, dtype: torch.dtype, published: str
) -> None:
    model = tiny_model(architecture, dtype=torch.bfloat16)
    eight, sixteen = write_float8_model(tmp_path, model, by=by, dtype=dtype, published=published)
    check_same(eight, sixteen)
    checkpoint = Checkpoint.open(eight)
    assert checkpoint_dtype(checkpoint) == torch.bfloat16
    assert sum(header.scales is not None for header in checkpoint.tensors.values()) > 20
    assert not any("scale" in name for name in checkpoint.tensors)


def test_groups_of_columns_with_powers_of_two_as_bytes(tmp_path: Path) -> None:
    """As compressed-tensors stores MXFP8."""
    model = tiny_model("mixtral", dtype=torch.bfloat16)
    options: dict[str, Any] = {"dtype": torch.float8_e8m0fnu, "published": "compressed-tensors"}
    eight, sixteen = write_float8_model(tmp_path, model, block=(1, 32), **options)
    tensors = load_file(eight / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor
    save_file(tensors, eight / "model.safetensors", {"format": "pt"})
    config = json.loads((eight / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["weights"] |= {"strategy": "group", "group_size": 32, "block_structure": None}
    (eight / "config.json").write_text(json.dumps(config))
    check_same(eight, sixteen)


@pytest.mark.parametrize(
    ("architecture", "by", "published"),
    [("qwen2_moe", "block", "fp8"), ("qwen3_5_moe_text", "tensor", "fp8"),
     ("mixtral", "channel", "compressed-tensors"), ("nemotron_h", "block", "fp8")],
)  # fmt: skip
def test_records_keep_the_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, by: By, published: str
) -> None:
    monkeypatch.setattr("localmoe.model.parallel_reader.PACKED_BYTES", 5000)  # of 32 rows at a time
    model = tiny_model(architecture, dtype=torch.bfloat16)
    eight, sixteen = write_float8_model(tmp_path, model, by=by, published=published, block=KEPT_BLOCK)
    records = check_same(eight, sixteen, WeightForm.FP8)
    layout = records.layouts[0]
    assert layout.num_bytes(torch.bfloat16) < 1.1 * layout.elements
    footprint = local_facts(str(eight)).footprint
    assert footprint.coded_form == footprint.in_codes().expert_form == "fp8"
    assert footprint.in_codes().expert_bytes == footprint.coded_expert_bytes == layout.coded_bytes
    assert local_facts(str(sixteen)).footprint.coded_expert_bytes == 0


def test_experts_one_by_one_are_read_where_transformers_knows_them_together(tmp_path: Path) -> None:
    """As matrices that are quantised one by one may be published."""
    model = vision_model("qwen3_vl_moe", dtype=torch.bfloat16)
    folder = write_vision_model(tmp_path / "single", model)
    fused = CheckpointSource.open(str(write_vision_model(tmp_path / "fused", model)))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".mlp.experts." in name]:
        path, _, kind = name.rpartition(".")
        for expert, weight in enumerate(tensors.pop(name)):
            parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
            for (part, _), rows in zip(parts.items(), weight.chunk(len(parts)), strict=True):
                tensors[f"{path}.{expert}.{part}.weight"] = rows.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found, wanted = CheckpointSource.open(str(folder)), loaded(fused.model.folder)[1]
    records = found.load_weights(found.skeleton(torch.bfloat16), CPU, progress=None, cancel=None)
    for key in (ExpertKey(layer, expert) for layer in range(records.num_layers) for expert in range(8)):
        assert all(map(torch.equal, records.weights(key), wanted.weights(key)))


@pytest.mark.parametrize("form", [WeightForm.PLAIN, WeightForm.FP8])
def test_progress_is_of_the_bytes_in_the_files(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, form: WeightForm
) -> None:
    assert check_progress(folders[0], monkeypatch, form) > 0.9


def check_progress(folder: Path, monkeypatch: pytest.MonkeyPatch, form: WeightForm) -> float:
    """The share of the files' bytes that is read as weights."""
    monkeypatch.setattr(loader, "_PROGRESS_BYTES", 1)
    source, told = CheckpointSource.open(str(folder)), list[Progress]()
    skeleton = with_records(source.skeleton(torch.bfloat16), form)
    source.load_weights(skeleton, CPU, progress=told.append, cancel=None)
    *during, last = [(one.done, one.total) for one in told]
    assert last == (source.checkpoint.total_bytes, source.checkpoint.total_bytes)
    scales = sum(h.scales.header.num_bytes for h in source.checkpoint.tensors.values() if h.scales)
    read = sum(header.num_bytes for header in source.checkpoint.tensors.values())
    assert read + scales <= last[0] and during[-1][0] == read
    return read / last[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in FP8 and in 16 bits."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    return write_float8_model(tmp_path_factory.mktemp("fp8"), model, block=KEPT_BLOCK)


@pytest.mark.slow  # in a plain run NVFP4 goes the same way, see test_nvfp4_models
def test_answers_are_those_of_the_same_weights_in_16_bits(folders: tuple[Path, Path]) -> None:
    check_answers(folders, "fp8")


def check_answers(folders: tuple[Path, Path], form: str) -> None:
    """In RAM, where weights are not rounded to 16 bits, in slots, and drafted for."""
    answers = []
    for folder in folders:
        for options in ({}, {"vram_budget_bytes": 12 << 20}, {"draft_length": 3}):
            config = EngineConfig(device="cpu", context=CONTEXT, draft_bits=8, **options)
            with Engine.load(str(folder), config) as engine:
                kept = folder is folders[0] and "vram" not in str(options)
                assert (engine.footprint.expert_form == form) == kept
                answers.append(ask(engine, "one two three", 24).tokens)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("published", ["fp8", "compressed-tensors"])
def test_a_draft_model_in_fp8_is_the_one_in_16_bits(tmp_path: Path, published: str) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    loaded = [
        DraftModel.load(DraftModelShape.read("small", folder), CPU, torch.float32, CONTEXT)
        for folder in write_float8_model(tmp_path, model, published=published)
    ]
    for weight, expected in zip(*(one.model.parameters() for one in loaded), strict=True):
        assert weight.dtype == torch.float32 and torch.equal(weight, expected)
    assert loaded[0].num_bytes == loaded[1].num_bytes


def test_scales_that_records_cannot_have_are_multiplied_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which the first load finds and the next one knows."""
    eight, sixteen = write_float8_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16))
    config = EngineConfig(device="cpu", context=CONTEXT, draft_length=0)
    answers = []
    for folder in (eight, eight, sixteen):
        with caplog.at_level(logging.WARNING, logger="localmoe"), Engine.load(str(folder), config) as engine:
            assert engine.footprint.keeps_bf12
            answers.append(ask(engine, "one two three", 8).tokens)
        told = "do not stay in FP8", "is not stored in FP8 with scales of 128 columns"
        assert all((words in caplog.text) == (len(answers) == 1) for words in told)
        caplog.clear()
    assert answers[0] == answers[1] == answers[2]


def test_what_is_no_number_is_not_kept_as_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("mixtral", dtype=torch.bfloat16)
    eight, _ = write_float8_model(tmp_path, model, block=KEPT_BLOCK)
    tensors = load_file(eight / "model.safetensors")
    name = next(name for name in tensors if "experts" in name and tensors[name].dtype == torch.float8_e4m3fn)
    tensors[name].view(torch.uint8)[..., -1, -1] = 255
    save_file(tensors, eight / "model.safetensors", {"format": "pt"})
    config = EngineConfig(device="cpu", context=CONTEXT, draft_length=0)
    with caplog.at_level(logging.WARNING, logger="localmoe"), Engine.load(str(eight), config) as engine:
        assert engine.footprint.expert_form != "fp8"
    assert "weights that are no numbers" in caplog.text


def test_a_checkpoint_without_its_scales_is_refused(tmp_path: Path) -> None:
    eight, _ = write_float8_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16))
    tensors = load_file(eight / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith("_scale_inv"))]
    save_file(tensors, eight / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"without scales.*download the model again"):
        Engine.load(str(eight), EngineConfig(device="cpu", context=CONTEXT))
