"""Models published as integers of four bits become the same 16-bit weights, or keep their experts as they
are, which gives the same answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.int4_models import By, write_int4_model
from support.tiny_models import CONTEXT, tiny_model
from test_fp8_models import check_answers, check_progress, check_same, loaded
from test_nvfp4_models import COMPUTER

from localmoe.core.config import EngineConfig
from localmoe.core.errors import CheckpointError, UnsupportedModelError
from localmoe.engine import Engine
from localmoe.engine.facts import local_facts
from localmoe.engine.planning import divide_memory, prepare_model
from localmoe.engine.settings import ComputeSettings
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.int4_tensors import are_in_order, group_sizes, is_int4
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model import parallel_reader, pieces, weight_reader
from localmoe.model.draft_model import DraftModel, DraftModelShape
from localmoe.model.footprint import checkpoint_dtype

CONFIG = EngineConfig(device="cpu", context=CONTEXT, draft_length=0)
PUBLISHED: list[tuple[By, int, bool, bool]] = [
    ("gptq", 128, True, False), ("gptq", 32, False, True), ("gptq_v2", 64, False, False),
    ("awq", 32, False, False), ("auto-round", 128, True, False), ("compressed-tensors", 32, True, False),
    ("compressed-tensors", 16, False, False), ("compressed-tensors", 32, False, True),
    ("compressed-tensors", 0, True, False),
]  # fmt: skip


@pytest.mark.parametrize(("published", "group", "symmetric", "ordered"), PUBLISHED)
def test_weights_are_the_integers_less_their_zero_points_times_their_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: By, group: int, symmetric: bool, ordered: bool
) -> None:
    monkeypatch.setattr(weight_reader, "_DECODED", 1000)  # rows at a time, and parts of some
    model = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    four, sixteen = write_int4_model(
        tmp_path, model, published=published, group=group, symmetric=symmetric, ordered=ordered
    )
    check_same(four, sixteen)
    checkpoint = Checkpoint.open(four)
    assert checkpoint_dtype(checkpoint) == torch.bfloat16
    assert sum(header.dtype == "I4" for header in checkpoint.tensors.values()) > 20
    assert not any(name.endswith(("scales", "scale", "g_idx", "qzeros")) for name in checkpoint.tensors)


def test_what_is_said_of_the_text_part_alone_counts_too(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """As Kimi K2.5 has it."""
    for file in folders[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"text_config": {"quantization_config": config.pop("quantization_config")}}))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    found, wanted = Checkpoint.open(tmp_path), Checkpoint.open(folders[0])
    assert is_int4(found.config)
    assert {name: header.shape for name, header in found.tensors.items()} == {
        name: header.shape for name, header in wanted.tensors.items()
    }


@pytest.mark.parametrize("transposes", [False, True])
def test_a_matrix_is_read_by_one_thread_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transposes: bool
) -> None:
    """Each that reads a part has all of it in memory."""
    four, sixteen = write_int4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16), published="awq")
    header = max(Checkpoint.open(four).tensors.values(), key=lambda one: one.dtype == "I4" and one.num_bytes)
    wanted = load_file(sixteen / "model.safetensors")[header.name]
    monkeypatch.setattr(pieces, "PIECE_BYTES", 256)
    monkeypatch.setattr(pieces, "STAGED_BYTES", 256)
    monkeypatch.setattr(parallel_reader, "STAGED_BYTES", 256)
    read: list[object] = []
    codes_of = weight_reader.codes_of
    monkeypatch.setattr(weight_reader, "codes_of", lambda *given: read.append(given) or codes_of(*given))
    memory = torch.empty(header.shape[::-1] if transposes else header.shape, dtype=torch.bfloat16)
    found = memory.T if transposes else memory
    (whole,) = pieces.split_read(header, found)
    parallel_reader.read_pieces([whole])
    assert len(read) == 1 and torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("architecture", "published", "group", "symmetric", "form"),
    [
        ("qwen2_moe", "gptq", 128, True, WeightForm.INT4), ("mixtral", "awq", 0, False, WeightForm.INT4),
        ("nemotron_h", "auto-round", 128, False, WeightForm.INT4),
        ("qwen3_5_moe_text", "compressed-tensors", 32, False, WeightForm.INT4_32),
        ("deepseek_v2", "gptq_v2", 64, False, WeightForm.INT4_32),
    ],
)  # fmt: skip
def test_records_keep_the_integers(
    tmp_path: Path, architecture: str, published: By, group: int, symmetric: bool, form: WeightForm
) -> None:
    model = tiny_model(architecture, dtype=torch.bfloat16)
    four, sixteen = write_int4_model(tmp_path, model, published=published, group=group, symmetric=symmetric)
    layout = check_same(four, sixteen, form).layouts[0]
    footprint = local_facts(str(four)).footprint
    assert footprint.coded_form == form.value and footprint.in_codes().keeps_four_bits
    assert footprint.in_codes().expert_bytes == layout.num_bytes(torch.bfloat16) < 0.75 * layout.elements
    assert local_facts(str(sixteen)).footprint.coded_expert_bytes == 0


def test_float16_beside_integers_is_kept_in_16_bits_on_a_cpu(tmp_path: Path) -> None:
    """As AutoAWQ has it, whatever it made it of."""
    four, sixteen = write_int4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16), published="awq")
    tensors = load_file(four / "model.safetensors")
    halves = {name: one.half() if one.dtype == torch.bfloat16 else one for name, one in tensors.items()}
    save_file(halves, four / "model.safetensors", {"format": "pt"})
    assert _shared_bytes(four) == _shared_bytes(sixteen)
    (found, _), (wanted, _) = loaded(four, WeightForm.INT4), loaded(sixteen)
    for one, other in zip(found.model.parameters(), wanted.model.parameters(), strict=True):
        assert one.is_meta or torch.allclose(one, other, atol=2**-24, rtol=2**-8)


def _shared_bytes(folder: Path) -> int:
    plan = prepare_model(str(folder), CONFIG).plan
    return plan.shared_bytes + plan.host_embedding_bytes


def test_that_no_draft_is_planned_is_said_as_people_call_it(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    four, _ = write_int4_model(tmp_path, model, published="awq", group=32)
    footprint = local_facts(str(four)).footprint.in_codes()
    compute = ComputeSettings(torch.device("cuda"), torch.bfloat16, whole_passes=True)
    config = EngineConfig(context=CONTEXT, vram_budget_bytes=1 << 30)
    plan = divide_memory(footprint, config, compute, 2, hardware=COMPUTER)
    assert footprint.expert_form == "int4-32" and "kept in INT4," in plan.drafting_reason


def test_experts_that_were_left_in_16_bits_are_planned_so(tmp_path: Path) -> None:
    four, sixteen = write_int4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16))
    fours, sixteens = (load_file(folder / "model.safetensors") for folder in (four, sixteen))
    mixed = {name: weights for name, weights in fours.items() if ".experts." not in name}
    mixed |= {name: weights for name, weights in sixteens.items() if ".experts." in name}
    save_file(mixed, four / "model.safetensors", {"format": "pt"})
    assert not local_facts(str(four)).footprint.coded_form
    check_same(four, sixteen)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in INT4 and in 16 bits."""
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    return write_int4_model(tmp_path_factory.mktemp("int4"), model, published="gptq_v2", symmetric=False)


@pytest.mark.parametrize("form", [WeightForm.PLAIN, WeightForm.INT4])
def test_progress_is_of_the_bytes_in_the_files(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, form: WeightForm
) -> None:
    assert check_progress(folders[0], monkeypatch, form) > 0.8


def test_answers_are_those_of_the_same_weights_in_16_bits(folders: tuple[Path, Path]) -> None:
    check_answers(folders, "int4")


@pytest.mark.slow  # code of its own is compiled
def test_answers_with_scales_of_few_columns_are_too(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    check_answers(write_int4_model(tmp_path, model, published="awq", group=32, symmetric=False), "int4-32")


def test_a_draft_model_in_int4_is_the_one_in_16_bits(folders: tuple[Path, Path]) -> None:
    models = [
        DraftModel.load(DraftModelShape.read("small", folder), torch.device("cpu"), torch.float32, CONTEXT)
        for folder in folders
    ]
    for weight, expected in zip(*(one.model.parameters() for one in models), strict=True):
        assert weight.dtype == torch.float32 and torch.equal(weight, expected)


def _changed(folder: Path, end: str, change: object) -> str:
    """Change an expert's tensor whose name ends so."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if "experts" in name and name.endswith(end))
    if callable(change):
        tensors[name] = change(tensors[name])
    else:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("ordered", "scale", "why"),
    [
        (True, None, "groups that 32 columns are not"),
        (False, 1 / 3, "scales of more than 16 bits"),
        (False, torch.inf, "or that are no numbers"),
    ],
)
def test_what_records_have_no_room_for_is_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ordered: bool, scale: float | None, why: str
) -> None:
    """Which the first load finds and the next one knows."""
    model = tiny_model("mixtral", dtype=torch.bfloat16)
    four, _ = write_int4_model(tmp_path, model, group=32 if ordered else 0, ordered=ordered)
    config = four / "config.json"
    config.write_text(config.read_text().replace('"desc_act": true', '"desc_act": false'))
    if scale is not None:
        _changed(four, "scales", lambda scales: scales.float().fill_(scale))
    for told in (True, False):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="localmoe"), Engine.load(str(four), CONFIG) as engine:
            assert not engine.footprint.keeps_four_bits
        assert ("do not stay in INT4" in caplog.text) == told
        assert (why in caplog.text) == told


@pytest.mark.parametrize("published", ["gptq", "compressed-tensors"])
def test_columns_that_activations_have_ordered_are_known_by_the_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, published: By
) -> None:
    model = tiny_model("mixtral", dtype=torch.bfloat16)
    four, _ = write_int4_model(tmp_path, model, published=published, group=32, ordered=True)
    assert not local_facts(str(four)).footprint.coded_form
    with caplog.at_level(logging.WARNING, logger="localmoe"), Engine.load(str(four), CONFIG) as engine:
        assert engine.footprint.keeps_bf12 and not caplog.text
    config = json.loads((four / "config.json").read_text())["quantization_config"]
    assert are_in_order({"quantization_config": config | {"static_groups": True}}) == (published == "gptq")
    assert are_in_order({"quantization_config": config | {"group_size": -1}}) == (published == "gptq")


def test_some_weights_may_have_groups_of_another_size_or_stay_in_16_bits(folders: tuple[Path, Path]) -> None:
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {
        "+:.*q_proj": {"group_size": 32}, "-:.*mtp.*": {"bits": 8}, "lm_head": {"bits": 16, "group_size": 64},
    }  # fmt: skip
    assert is_int4(config) and group_sizes(config) == [32, 128]


@pytest.mark.parametrize(
    ("end", "change", "why"),
    [
        ("scales", None, "without all of their scales.*download the model again"),
        ("qzeros", None, "without all of their scales.*download the model again"),
        ("g_idx", None, "without all of their scales.*download the model again"),
        ("scales", lambda scales: torch.cat((scales, scales)), "do not belong together"),
        ("qzeros", lambda zeros: zeros[:, 1:].contiguous(), "do not belong together"),
        ("g_idx", lambda places: places[1:].contiguous(), "do not belong together"),
        ("g_idx", lambda places: places + 1, "groups that have no scale"),
        ("qweight", lambda words: torch.cat((words, words)), "do not belong together"),  # as of eight bits
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, end: str, change: object, why: str) -> None:
    four, _ = write_int4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16), group=32, ordered=True)
    _changed(four, end, change)
    with pytest.raises(CheckpointError, match=why):
        Engine.load(str(four), CONFIG)


def test_zero_points_that_are_not_in_the_middle_have_to_be_there(tmp_path: Path) -> None:
    model = tiny_model("mixtral", dtype=torch.bfloat16)
    four, _ = write_int4_model(tmp_path, model, published="compressed-tensors", group=32, symmetric=False)
    _changed(four, "weight_zero_point", None)
    with pytest.raises(CheckpointError, match="without all of their scales, zero points"):
        Checkpoint.open(four)


def test_no_weights_with_a_scale_a_row_are_refused(tmp_path: Path) -> None:
    four, _ = write_int4_model(tmp_path, tiny_model("mixtral", dtype=torch.bfloat16), group=0)
    _changed(four, "qweight", lambda words: words[:0].contiguous())
    with pytest.raises(CheckpointError, match="do not belong together"):
        Checkpoint.open(four)


_FOURS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}}
_MIXED = _FOURS | {"group_1": _FOURS["group_0"] | {"format": "int-quantized"}}


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 8}, {"checkpoint_format": "marlin"}, {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "auto-round", "packing_format": "auto_round:tritonv2_zp"}, {"quant_method": "hqq"},
        {"dynamic": {r"+:.*\.self_attn\..*": {"bits": 8}}}, {"rotation": "hadamard"},
        {"extra_config": {"model.layers.0.mlp.gate": {"bits": 8}}},
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": _FOURS},
        {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": _MIXED},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_stored_in_another_way_is_refused_by_the_config(
    tmp_path: Path, folders: tuple[Path, Path], changes: dict[str, object]
) -> None:
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] |= changes
    for file in folders[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"are quantised \("):
        Engine.load(str(tmp_path), CONFIG)
