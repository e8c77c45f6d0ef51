"""Models that are published in MXFP4 keep it on a GPU, in records and slots, and compute what the same
weights in 16 bits do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import ask, device_runner_of, keep_slots, load_with_slots
from support.mxfp4_models import say_mxfp4, write_mxfp4_model
from support.tiny_models import CONTEXT, tiny_model, write_model
from torch import Tensor

from localmoe.core.config import DraftLength, EngineConfig, Lanes
from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import CheckpointError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine, planning
from localmoe.engine.drafts import HostExpertSource
from localmoe.engine.facts import local_facts
from localmoe.engine.fit import fit_model
from localmoe.engine.lanes import why_not
from localmoe.engine.planning import PreparedModel
from localmoe.engine.random_source import RandomSource
from localmoe.engine.settings import ComputeSettings
from localmoe.engine.sources import CheckpointSource
from localmoe.engine.suggestions import SUGGESTIONS
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.host_store import HostStore
from localmoe.hardware.facts import Gpu, Hardware
from localmoe.kernels import mxfp4_tiles
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.footprint import can_keep_mxfp4, measure_footprint
from localmoe.model.shapes import ModelShape, find_shape
from localmoe.model.skeleton import Skeleton, skeleton_from_config, with_records

CPU = torch.device("cpu")
INNER, HIDDEN = 192, 128
RECORD_BYTES = (2 * INNER * HIDDEN + HIDDEN * INNER) // 2 + 4 * (2 * INNER + 2 * HIDDEN)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """In MXFP4, and the same weights in 16 bits."""
    model = tiny_model("gpt_oss", dtype=torch.bfloat16, intermediate_size=INNER, hidden_size=HIDDEN)
    folder = tmp_path_factory.mktemp("mxfp4")
    packed = write_mxfp4_model(folder / "gpt-oss", model)
    source = CheckpointSource.open(str(packed))
    store = source.load_weights(source.skeleton(torch.bfloat16), CPU, progress=None, cancel=None)
    state = model.state_dict()
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            for name, weights in zip(
                ("gate_up_proj", "down_proj"), store.views(ExpertKey(layer, expert)), strict=True
            ):
                state[f"model.layers.{layer}.mlp.experts.{name}"][expert] = weights
    model.load_state_dict(state)
    return packed, write_model(folder / "plain", model)


def kept(folder: Path) -> tuple[Skeleton, HostStore]:
    source = CheckpointSource.open(str(folder))
    skeleton = source.skeleton(torch.bfloat16)
    assert source.can_keep_mxfp4(skeleton)
    skeleton = with_records(skeleton, WeightForm.MXFP4)
    return skeleton, source.load_weights(skeleton, CPU, progress=None, cancel=None)


@pytest.mark.parametrize("with_numba", [True, False])
def test_records_hold_the_published_weights(
    folders: tuple[Path, Path], with_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_numba:
        monkeypatch.setattr(mxfp4_tiles, "_loops", lambda: None)
    monkeypatch.setattr("localmoe.model.pieces.DECODED_BYTES", 40 * HIDDEN)
    skeleton, store = kept(folders[0])
    source = CheckpointSource.open(str(folders[1]))
    plain_skeleton = source.skeleton(torch.bfloat16)
    plain = source.load_weights(plain_skeleton, CPU, progress=None, cancel=None)
    matrices, wanted = HostExpertSource(skeleton, store), HostExpertSource(plain_skeleton, plain)
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            key = ExpertKey(layer, expert)
            assert store.record(key).dtype == torch.uint8 and store.record(key).numel() == RECORD_BYTES
            for found, weights in zip(store.weights(key), plain.weights(key), strict=True):
                assert torch.equal(found, weights)
            for found, weights in zip(
                matrices.matrices(layer, expert), wanted.matrices(layer, expert), strict=True
            ):
                assert torch.equal(found, weights)


def prepare(
    folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int = 1 << 30, **config: Any
) -> tuple[PreparedModel, MemoryPlan]:
    """As on a machine with a GPU."""
    compute = ComputeSettings(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(planning, "choose_compute", lambda *asked: compute)
    computer = Hardware((), "", "a CPU", 8, 16, (), 64 << 30, 60 << 30, 500 << 30, 20e9, "Linux", "3.12", "2")
    monkeypatch.setattr(planning, "probe_hardware", lambda measure: computer)
    asked = EngineConfig(vram_budget_bytes=budget, context=CONTEXT, **config)
    found = planning._prepare(CheckpointSource.open(str(folder), asked.draft_bits), asked)
    assert found.compute.whole_passes
    return found, found.plan


def test_experts_are_planned_as_small_as_they_are_kept(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plan = prepare(folders[0], monkeypatch)
    assert found.footprint.keeps_mxfp4 and found.skeleton.experts[0].layout.mxfp4
    assert found.footprint.expert_bytes == plan.slot_bytes == RECORD_BYTES
    assert plan.host_bytes - plan.host_embedding_bytes == found.footprint.total_experts * RECORD_BYTES
    assert not plan.drafting and not plan.draft_bytes and "MXFP4" in plan.drafting_reason
    as_weights, other = prepare(folders[1], monkeypatch)
    assert other.slot_bytes == 2 * as_weights.footprint.expert_params and other.drafting


@pytest.mark.parametrize(
    ("config", "bits", "group"),
    [
        ({"draft_length": 4}, 4, 128),
        ({"draft_bits": 2}, 2, 128),
        ({"draft_bits": 2, "draft_length": 1}, 2, 128),
    ],
)
def test_a_draft_that_is_asked_for_is_of_integers(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], bits: int, group: int
) -> None:
    found, plan = prepare(folders[0], monkeypatch, **config)
    assert plan.drafting and found.skeleton.experts[0].layout.mxfp4
    form = DraftForm(bits, group)
    assert found.source.draft_form(None) == form
    wanted = measure_footprint("", torch.bfloat16, found.skeleton, form, "cuda")
    assert plan.draft_bytes == wanted.draft_bytes(0)


@pytest.mark.parametrize("lanes", ["all", "vram+cpu", "vram+link"])
def test_experts_are_kept_for_whichever_lanes_compute_them(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, lanes: str
) -> None:
    found, plan = prepare(folders[0], monkeypatch, lanes=lanes)
    layouts = [experts.layout for experts in found.skeleton.experts]
    assert all(layout.mxfp4 for layout in layouts) and plan.slot_bytes == RECORD_BYTES
    reason = "as set" if lanes == "vram+link" else ""
    assert why_not(torch.device("cuda"), layouts, EngineConfig(lanes=lanes)) == reason  # type: ignore[arg-type]


def test_shapes_that_are_no_whole_tiles_become_16_bit_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gpt_oss", dtype=torch.bfloat16, intermediate_size=96)
    found, plan = prepare(write_mxfp4_model(tmp_path / "odd", model), monkeypatch)
    assert found.footprint.mxfp4_expert_bytes == 0 and plan.drafting
    assert not found.skeleton.experts[0].layout.mxfp4


def test_a_config_that_says_mxfp4_of_16_bit_weights_is_not_believed(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders[1] / name).read_bytes())
    say_mxfp4(tmp_path)
    found, plan = prepare(tmp_path, monkeypatch)
    assert not found.skeleton.experts[0].layout.mxfp4 and plan.drafting


def test_beside_weights_of_another_form_experts_become_16_bit_weights(folders: tuple[Path, Path]) -> None:
    """The kernel makes bfloat16 of them."""
    skeleton = CheckpointSource.open(str(folders[0])).skeleton(torch.float16)
    assert can_keep_mxfp4(skeleton, torch.bfloat16) and not can_keep_mxfp4(skeleton, torch.float16)


def test_where_there_are_no_kernels_the_fit_is_that_of_16_bit_weights(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(0, "a GPU", 16 << 30, 15 << 30, None, (8, 9), 4, 16, None, None)
    computer = Hardware(
        (gpu,), "", "a CPU", 8, 16, (), 64 << 30, 60 << 30, 500 << 30, 20e9, "Windows", "3.12", "2"
    )
    monkeypatch.setattr("localmoe.engine.fit.why_no_kernels", lambda: "Triton is not installed")
    facts = local_facts(str(folders[0]))
    assert (
        fit_model(facts, computer, None).ram_bytes
        == facts.footprint.total_experts * facts.footprint.expert_bytes
    )


def test_weights_that_are_there_in_both_forms_are_refused_in_a_sentence(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors: dict[str, Tensor] = load_file(folders[0] / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = load_file(folders[1] / "model.safetensors")[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="has in MXFP4 too: download the model again") as caught:
        kept(tmp_path)
    assert "\n" not in str(caught.value)


def test_whether_it_fits_is_told_by_what_is_kept(folders: tuple[Path, Path]) -> None:
    gpu = Gpu(0, "a GPU", 16 << 30, 15 << 30, None, (8, 9), 4, 16, None, None)
    computer = Hardware(
        (gpu,), "", "a CPU", 8, 16, (), 64 << 30, 60 << 30, 500 << 30, 20e9, "Linux", "3.12", "2"
    )
    facts = local_facts(str(folders[0]))
    kept = facts.footprint.total_experts * RECORD_BYTES + 2 * facts.footprint.embedding_params
    assert fit_model(facts, computer, None).ram_bytes == kept
    assert fit_model(facts, computer, None, EngineConfig(lanes="all")).ram_bytes == kept
    (known,) = (one.facts for one in SUGGESTIONS if one.repo_id == "openai/gpt-oss-20b")
    computer = replace(computer, ram_total_bytes=32 << 30, ram_available_bytes=28 << 30)
    fit = fit_model(known, computer, None)
    assert fit.fits and fit.plan is not None and fit.plan.resident_share == 1.0 and not fit.drafting
    shape = RandomSource(find_shape("gpt-oss-20b"), SyntheticSettings())
    skeleton = shape.skeleton(torch.bfloat16)
    assert shape.can_keep_mxfp4(skeleton)
    layout = with_records(skeleton, WeightForm.MXFP4).experts[0].layout
    assert known.footprint.mxfp4_expert_bytes == layout.num_bytes(torch.bfloat16)


def test_random_weights_spread_as_others_do() -> None:
    config = tiny_model("gpt_oss", intermediate_size=INNER, hidden_size=HIDDEN).config.to_dict()
    dimensions = {
        key: value for key, value in config.items() if key not in ("model_type", "transformers_version")
    }
    shape = ModelShape("tiny", "gpt_oss", {**dimensions, "quantization_config": {"quant_method": "mxfp4"}})
    source = RandomSource(shape, SyntheticSettings())
    skeleton = skeleton_from_config(shape.config(), torch.bfloat16, "it")
    assert source.can_keep_mxfp4(skeleton)
    store = source.load_weights(with_records(skeleton, WeightForm.MXFP4), CPU, progress=None, cancel=None)
    weights = [store.weights(ExpertKey(1, expert))[0].float() for expert in range(2)]
    assert all(0.015 < float(matrix.std()) < 0.03 for matrix in weights)
    assert not torch.equal(*weights)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [6, 13, 0])
def test_answers_on_a_gpu_depend_on_nothing_and_are_those_of_the_weights(
    folders: tuple[Path, Path], slots: int
) -> None:
    """slots: 0 for all experts."""
    prompts = ["What is a block of", "1 + 2 = 3, and then", " ".join(["z 5 blocks of it"] * 30)]
    answers, logits = [], []
    cases: list[tuple[Path, DraftLength]] = [(folders[0], "auto"), (folders[0], 4), (folders[1], 0)]
    for folder, length in cases:
        config = EngineConfig(device="cuda", context=CONTEXT, strict=True, draft_length=length)
        with Engine.load(str(folder), config) as engine:
            assert engine.footprint.keeps_mxfp4 == (folder == folders[0])
            assert engine.plan.drafting == (length == 4)
            if slots:
                keep_slots(engine, slots)
            answers.append([ask(engine, prompt, 40).tokens for prompt in prompts])
            held = engine._loaded.passes.memory
            assert isinstance(held, DeviceExpertMemory)
            for key in held.resident_keys():
                record = held.store.record(key)
                place = held.slots._arena[int(held._slot_of[key])]
                assert torch.equal(place[: record.numel()].cpu(), record)
            runner = engine._loaded.runner
            runner.sequence.truncate(0)
            logits.append(runner.run(list(range(20)), "verify", last_only=False).cpu())
    assert answers[0] == answers[1] and len(set(answers[0][0])) > 4
    assert torch.equal(logits[0], logits[1])
    error = (logits[0] - logits[2]).norm(dim=1) / logits[2].norm(dim=1)  # sums are in another order
    assert float(error.max()) < 2e-2, error


@pytest.mark.gpu
def test_what_is_missing_crosses_the_link_as_it_is_kept(folders: tuple[Path, Path]) -> None:
    with load_with_slots(
        folders[0], 8, device="cuda", context=CONTEXT, draft_length=0, strict=True
    ) as engine:
        stats = ask(engine, "What is a block of", 40).stats
        missed = engine._loaded.passes.memory.counters().h2d_bytes
    assert stats.hit_rate is not None and stats.hit_rate < 1 and missed % RECORD_BYTES == 0


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", ["all", "vram+cpu"])
def test_the_cpu_lane_computes_with_what_is_kept(folders: tuple[Path, Path], lanes: Lanes) -> None:
    prompt = " ".join(["z 5 blocks of it"] * 4)
    logits, cpu_bytes = [], []
    for asked in ("vram+link", lanes):
        config = EngineConfig(device="cuda", context=CONTEXT, lanes=asked, draft_length=0)
        with Engine.load(str(folders[0]), config) as engine:
            keep_slots(engine, 6)
            assert engine.footprint.keeps_mxfp4
            ask(engine, prompt, 60)
            runner = device_runner_of(engine)
            lane = runner.passes.lane
            cpu_bytes.append(0 if lane is None else lane.counters().num_bytes)
            runner.sequence.truncate(0)
            logits.append(runner.run(list(range(20)), "verify", last_only=False).cpu())
    assert cpu_bytes[0] == 0 < cpu_bytes[1]
    error = (logits[0] - logits[1]).norm(dim=1) / logits[0].norm(dim=1)  # sums are in another order
    assert float(error.max()) < 2e-2, error
