"""Models published in NVFP4 become the same 16-bit weights, or keep their experts as they are, which gives
the same answers."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hub_home import REPO, hub_and_home, pull
from support.hub_server import files_of
from support.nvfp4_models import By, from_nvfp4, to_nvfp4, write_nvfp4_model
from support.tiny_models import CONTEXT, tiny_model
from test_fp8_models import check_answers, check_progress, check_same, loaded

from localmoe.core.config import EngineConfig
from localmoe.core.errors import CheckpointError
from localmoe.engine import Engine
from localmoe.engine.facts import local_facts, repo_facts
from localmoe.engine.planning import divide_memory
from localmoe.engine.settings import ComputeSettings
from localmoe.engine.sources import CheckpointSource
from localmoe.hardware.facts import Hardware
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.modelopt_config import with_quantisation
from localmoe.hub.nvfp4_tensors import with_fours
from localmoe.hub.safetensors_header import read_file_header
from localmoe.kernels.bf12_tiles import UnpackableError
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model import weight_reader
from localmoe.model.draft_model import DraftModel, DraftModelShape
from localmoe.model.footprint import checkpoint_dtype
from localmoe.model.weight_reader import WeightReader

COMPUTER = Hardware((), "", "a CPU", 8, 16, (), 64 << 30, 60 << 30, 500 << 30, 20e9, "Linux", "3.12", "2")
CONFIG = EngineConfig(device="cpu", context=CONTEXT, draft_length=0)


@pytest.mark.parametrize(
    ("architecture", "published", "eights"),
    [
        ("qwen3_moe", "modelopt", False), ("deepseek_v2", "compressed-tensors", False),
        ("qwen3_moe", "modelopt", True),
    ],
)  # fmt: skip
def test_weights_are_the_codes_times_their_scales(
    tmp_path: Path, architecture: str, published: By, eights: bool
) -> None:
    model = tiny_model(architecture, dtype=torch.bfloat16)
    four, sixteen = write_nvfp4_model(tmp_path, model, published=published, eights=eights)
    check_same(four, sixteen)
    checkpoint = Checkpoint.open(four)
    assert checkpoint_dtype(checkpoint) == torch.bfloat16
    assert sum(header.dtype == "F4" for header in checkpoint.tensors.values()) > 20
    assert any(header.dtype == "F8_E4M3" for header in checkpoint.tensors.values()) == eights
    assert not any("weight_scale" in name or "packed" in name for name in checkpoint.tensors)


@pytest.mark.parametrize(
    ("architecture", "published"),
    [
        ("qwen2_moe", "modelopt"), ("nemotron_h", "modelopt"), ("qwen3_5_moe_text", "compressed-tensors"),
        ("mixtral", "compressed-tensors"),
    ],
)  # fmt: skip
def test_records_keep_the_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, published: By
) -> None:
    monkeypatch.setattr("localmoe.model.parallel_reader.PACKED_BYTES", 2500)  # of 32 rows at a time
    model = tiny_model(architecture, dtype=torch.bfloat16)
    four, sixteen = write_nvfp4_model(tmp_path, model, published=published)
    # one over a scale that divides is rounded
    records = check_same(four, sixteen, WeightForm.NVFP4, all_bits=published == "modelopt")
    layout = records.layouts[0]
    assert layout.num_bytes(torch.bfloat16) < 0.7 * layout.elements
    footprint = local_facts(str(four)).footprint
    assert footprint.coded_form == footprint.in_codes().expert_form == "nvfp4"
    assert footprint.in_codes().expert_bytes == footprint.coded_expert_bytes == layout.coded_bytes
    assert local_facts(str(sixteen)).footprint.coded_expert_bytes == 0


@pytest.mark.parametrize("each", [False, True])
def test_experts_in_one_tensor_keep_the_codes(tmp_path: Path, each: bool) -> None:
    """With a scale for all of them, or one for each."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    four, sixteen = write_nvfp4_model(tmp_path, model)
    fours, sixteens = (load_file(folder / "model.safetensors") for folder in (four, sixteen))
    for tensors in (fours, sixteens):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
    for name, weights in model.named_parameters():
        if ".experts." in name:
            codes, scales, factor = to_nvfp4(weights.detach())
            factors = factor * torch.arange(1.0, len(codes) + 1) if each else torch.tensor([factor])
            parts = {"": codes, "_weight_scale": scales, "_weight_scale_2": factors}
            fours |= {f"{name}{end}": part for end, part in parts.items()}
            numbers = from_nvfp4(codes, torch.ones_like(scales, dtype=torch.float32), 1.0).float()
            by_group = scales.float() * factors[:, None, None]
            sixteens[name] = (numbers * by_group.repeat_interleave(16, -1)).to(torch.bfloat16)
    save_file(fours, four / "model.safetensors", {"format": "pt"})
    save_file(sixteens, sixteen / "model.safetensors", {"format": "pt"})
    check_same(four, sixteen)
    check_same(four, sixteen, WeightForm.NVFP4)


def test_a_part_of_all_experts_is_read_with_its_own_scales_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all would take half of what the codes do, in each thread that reads."""
    monkeypatch.setattr(weight_reader, "_DECODED", 200)
    whole = torch.randn(5, 6, 64)
    codes, scales, factor = to_nvfp4(whole)
    factors = factor * torch.arange(1.0, 6)
    tensors = {"a": codes, "a_weight_scale": scales, "a_weight_scale_2": factors}
    save_file(tensors, tmp_path / "model.safetensors")
    headers = {one.name: one for one in read_file_header(tmp_path / "model.safetensors").tensors}
    header = with_fours(
        headers, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    )["a"]
    wanted = torch.stack([from_nvfp4(*each) for each in zip(codes, scales, factors.tolist(), strict=True)])
    read, sizes = WeightReader._read, list[int]()
    monkeypatch.setattr(
        WeightReader, "_read", lambda *given: (sizes.append(given[3].numel()), read(*given))[1]
    )
    part = torch.empty(500, dtype=torch.bfloat16)
    with WeightReader() as reader:
        reader.read_part(header, 802, part)
    torch.testing.assert_close(part, wanted.flatten()[802:1302].bfloat16(), rtol=0.01, atol=0)
    assert max(sizes) <= 100, "bytes, of codes"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in NVFP4 and in 16 bits."""
    return write_nvfp4_model(tmp_path_factory.mktemp("nvfp4"), tiny_model("qwen3_moe", dtype=torch.bfloat16))


@pytest.mark.parametrize("form", [WeightForm.PLAIN, WeightForm.NVFP4])
def test_progress_is_of_the_bytes_in_the_files(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, form: WeightForm
) -> None:
    assert check_progress(folders[0], monkeypatch, form) > 0.8


def test_answers_are_those_of_the_same_weights_in_16_bits(folders: tuple[Path, Path]) -> None:
    check_answers(folders, "nvfp4")


def test_a_draft_model_in_nvfp4_is_the_one_in_16_bits(folders: tuple[Path, Path]) -> None:
    loaded = [
        DraftModel.load(DraftModelShape.read("small", folder), torch.device("cpu"), torch.float32, CONTEXT)
        for folder in folders
    ]
    for weight, expected in zip(*(one.model.parameters() for one in loaded), strict=True):
        assert weight.dtype == torch.float32 and torch.equal(weight, expected)


def test_no_draft_as_large_as_the_experts_is_planned_unasked(folders: tuple[Path, Path]) -> None:
    footprint = local_facts(str(folders[0])).footprint
    compute = ComputeSettings(torch.device("cuda"), torch.bfloat16, whole_passes=True)
    for length, drafting in (("auto", False), (4, True)):
        config = EngineConfig(context=CONTEXT, vram_budget_bytes=1 << 30, draft_length=length)
        plan = divide_memory(footprint.in_codes(), config, compute, 2, hardware=COMPUTER)
        assert plan.drafting == drafting
        assert ("kept in NVFP4" in plan.drafting_reason) != drafting


def test_scales_that_are_no_numbers_are_not_kept_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which the first load finds and the next one knows."""
    four, _ = write_nvfp4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16))
    tensors = load_file(four / "model.safetensors")
    name = next(name for name in tensors if "experts" in name and name.endswith("weight_scale"))
    tensors[name].view(torch.uint8)[..., -1, -1] = 255
    save_file(tensors, four / "model.safetensors", {"format": "pt"})
    for told in (True, False):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="localmoe"), Engine.load(str(four), CONFIG) as engine:
            assert engine.footprint.expert_form != "nvfp4"
        assert ("do not stay in NVFP4" in caplog.text) == told
        assert ("scales that are no numbers" in caplog.text) == told


@pytest.mark.parametrize("divisor", [0.0, 1e-42])
def test_what_is_divided_by_next_to_nothing_is_not_kept_as_zeros(tmp_path: Path, divisor: float) -> None:
    model = tiny_model("mixtral", dtype=torch.bfloat16)
    four, _ = write_nvfp4_model(tmp_path, model, published="compressed-tensors")
    tensors = load_file(four / "model.safetensors")
    name = next(name for name in tensors if "experts" in name and name.endswith("weight_global_scale"))
    tensors[name].fill_(divisor)
    save_file(tensors, four / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnpackableError, match="scales that are no numbers"):
        loaded(four, WeightForm.NVFP4)


def test_a_file_of_modelopt_may_say_how_weights_are_stored(tmp_path: Path) -> None:
    """As of its versions that wrote nothing into config.json, here and on the Hub."""
    four, _ = write_nvfp4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16))
    wanted = local_facts(str(four)).footprint
    config = json.loads((four / "config.json").read_text())
    said = config.pop("quantization_config")
    del said["quant_method"]
    (four / "config.json").write_text(json.dumps(config))
    (four / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    assert local_facts(str(four)).footprint == wanted and wanted.coded_expert_bytes
    with hub_and_home(tmp_path) as hub:
        hub.commit(REPO, files_of(four))
        assert replace(repo_facts(REPO).footprint, name="") == replace(wanted, name="")
        pulled = pull()
    with Engine.load(str(pulled), CONFIG) as engine:
        assert engine.footprint.expert_form == "nvfp4"


def test_what_is_said_of_tens_of_thousands_of_layers_is_kept_once_a_kind(tmp_path: Path) -> None:
    four, _ = write_nvfp4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16), eights=True)
    wanted = local_facts(str(four)).footprint
    config = json.loads((four / "config.json").read_text())
    layers = config["quantization_config"]["quantized_layers"]
    layers |= {f"layers.0.experts.{expert}.up": dict(layers["experts"]) for expert in range(40_000)}
    (four / "config.json").write_text(json.dumps(config))
    source = CheckpointSource.open(str(four))
    skeleton = source.skeleton(torch.bfloat16)
    assert len(skeleton.config.quantization_config["quantized_layers"]) == 2
    assert source.coded_form(skeleton) is WeightForm.NVFP4 and local_facts(str(four)).footprint == wanted


@pytest.mark.parametrize("file", [{}, {"quantization": None}, {"quantization": {"group_size": 16}}], ids=str)
def test_a_file_of_modelopt_that_says_nothing_counts_for_nothing(file: dict[str, object]) -> None:
    assert with_quantisation({"model_type": "mixtral"}, file) == {"model_type": "mixtral"}


def test_a_config_that_does_not_tell_scales_is_said_so(tmp_path: Path) -> None:
    four, _ = write_nvfp4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16))
    config = json.loads((four / "config.json").read_text())
    del config["quantization_config"]
    (four / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"few bits \(F8_E4M3\), and config.json does not say"):
        Engine.load(str(four), CONFIG)


@pytest.mark.parametrize("end", ["weight_scale", "weight_scale_2"])
def test_a_checkpoint_without_its_scales_is_refused(tmp_path: Path, end: str) -> None:
    four, _ = write_nvfp4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16))
    tensors = load_file(four / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith(end))]
    save_file(tensors, four / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"without both their scales.*download the model again"):
        Engine.load(str(four), CONFIG)
