"""Experts of bfloat16 are kept in twelve bits where kernels compute from that, and are the same weights."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import ask
from support.shapes import tiny_shape
from support.tiny_models import CONTEXT, tiny_model, write_model
from torch import Tensor

from localmoe.core.config import EngineConfig
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine, planning
from localmoe.engine.drafts import HostExpertSource
from localmoe.engine.facts import local_facts
from localmoe.engine.planning import PreparedModel
from localmoe.engine.random_source import RandomSource
from localmoe.engine.settings import ComputeSettings
from localmoe.engine.sources import CheckpointSource
from localmoe.experts.host_store import HostStore
from localmoe.hardware.facts import Hardware
from localmoe.kernels import bf12_tiles
from localmoe.kernels.bf12_tiles import Bf12Matrix, UnpackableError
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.random_weights import SPREAD
from localmoe.model.skeleton import with_records

CPU = torch.device("cpu")
ARCHITECTURES = ("qwen2_moe", "mixtral", "deepseek_v2", "phimoe", "nemotron_h")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bfloat16."""
    place = tmp_path_factory.mktemp("packed") / str(request.param)
    return write_model(place, tiny_model(request.param, dtype=torch.bfloat16))


def test_records_hold_the_published_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localmoe.model.parallel_reader.PACKED_BYTES", 5000)  # of 16 rows at a time
    source = CheckpointSource.open(str(folder))
    skeleton = source.skeleton(torch.bfloat16)
    assert source.can_pack(skeleton)
    plain = source.load_weights(skeleton, CPU, progress=None, cancel=None)
    again = source.skeleton(torch.bfloat16)
    packed_skeleton = with_records(again, WeightForm.BF12)
    packed = source.load_weights(packed_skeleton, CPU, progress=None, cancel=None)
    matrices, wanted = HostExpertSource(packed_skeleton, packed), HostExpertSource(skeleton, plain)
    assert packed.num_bytes <= plain.num_bytes
    for layer in range(plain.num_layers):
        for expert in range(plain.num_experts):
            key = ExpertKey(layer, expert)
            assert packed.record(key).numel() < 0.86 * plain.record(key).numel() * 2
            for found, weights in zip(packed.weights(key), plain.weights(key), strict=True):
                assert torch.equal(found, weights)
            for found, weights in zip(
                matrices.matrices(layer, expert), wanted.matrices(layer, expert), strict=True
            ):
                assert torch.equal(found, weights)


def as_on_a_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int = 1 << 30, **config: Any
) -> PreparedModel:
    """What is prepared on a machine with one."""
    compute = ComputeSettings(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(planning, "choose_compute", lambda *asked: compute)
    computer = Hardware((), "", "a CPU", 8, 16, (), 64 << 30, 60 << 30, 500 << 30, 20e9, "Linux", "3.12", "2")
    monkeypatch.setattr(planning, "probe_hardware", lambda measure: computer)
    asked = EngineConfig(vram_budget_bytes=budget, context=CONTEXT, **config)
    return planning._prepare(CheckpointSource.open(str(folder), asked.draft_bits), asked)


def test_a_gpu_has_room_for_more_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = as_on_a_gpu(folder, monkeypatch, draft_length=0, pack_experts=False)
    plan = roomy.plan
    tight = plan.total_bytes - plan.slot_bytes * (plan.num_slots - plan.num_slots // 2)
    packed = as_on_a_gpu(folder, monkeypatch, tight, draft_length=0)
    plain = as_on_a_gpu(folder, monkeypatch, tight, draft_length=0, pack_experts=False)
    assert packed.plan.num_slots > plain.plan.num_slots == plan.num_slots // 2
    layout = packed.skeleton.experts[0].layout
    roomy = as_on_a_gpu(folder, monkeypatch, draft_length=0)
    assert roomy.skeleton.experts[0].layout == layout, "bits depend on no budget"
    assert layout.form is WeightForm.BF12 and plain.skeleton.experts[0].layout.form is WeightForm.PLAIN
    assert packed.footprint.expert_bytes == packed.plan.slot_bytes == layout.bf12_bytes
    assert (
        packed.plan.host_bytes
        < plain.plan.host_bytes
        == 2 * plain.footprint.expert_params * plain.footprint.total_experts + plain.plan.host_embedding_bytes
    )
    assert packed.footprint.in_16_bits().expert_bytes == plain.footprint.expert_bytes
    facts = local_facts(str(folder))
    assert facts.footprint.in_codes().expert_bytes == packed.footprint.expert_bytes
    assert facts.footprint.in_codes(packing=False).expert_bytes == plain.footprint.expert_bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_weights_stay_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    source = CheckpointSource.open(str(write_model(tmp_path / "model", tiny_model("mixtral", dtype=dtype))))
    assert not source.can_pack(source.skeleton(dtype))


def test_alternating_and_transposed_matrices_stay_as_they_are(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss", dtype=torch.bfloat16)
    source = CheckpointSource.open(str(write_model(tmp_path / "model", model)))
    assert not source.can_pack(source.skeleton(torch.bfloat16))


def test_what_cannot_be_packed_is_loaded_in_16_bits_and_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "model", tiny_model("mixtral", dtype=torch.bfloat16))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts" in name and tensors[name].dim() >= 2)
    rows = tensors[name][0] if tensors[name].dim() == 3 else tensors[name]
    rows[:16] = 2.0 ** (-torch.arange(rows.shape[1]) % 120).float()
    save_file(tensors, file, metadata={"format": "pt"})
    config = EngineConfig(device="cpu", context=CONTEXT, draft_length=0)
    with caplog.at_level(logging.WARNING, logger="localmoe"), Engine.load(str(folder), config) as engine:
        assert engine.prepared.skeleton.experts[0].layout.form is WeightForm.PLAIN
        found = ask(engine, "one two three", 8).tokens
    assert "cannot be packed" in caplog.text and "loaded in 16 bits" in caplog.text
    with Engine.load(str(folder), replace(config, pack_experts=False)) as engine:
        assert ask(engine, "one two three", 8).tokens == found
    source = CheckpointSource.open(str(folder))
    assert not source.can_pack(source.skeleton(torch.bfloat16))
    file.touch()  # other weights
    source = CheckpointSource.open(str(folder))
    assert source.can_pack(source.skeleton(torch.bfloat16))


def test_random_experts_are_packed_and_all_differ() -> None:
    source = RandomSource(tiny_shape("qwen2_moe"), SyntheticSettings())
    skeleton = with_records(source.skeleton(torch.bfloat16), WeightForm.BF12)
    assert source.can_pack(skeleton)
    store = source.load_weights(skeleton, CPU, progress=None, cancel=None)
    keys = [ExpertKey(layer, expert) for layer in range(3) for expert in range(8)]
    experts = [torch.cat([part.flatten() for part in store.weights(key)]).float() for key in keys]
    assert all(0.9 * SPREAD < float(expert.std()) < 1.1 * SPREAD for expert in experts)
    assert len({expert.numpy().tobytes() for expert in experts}) == len(experts)


def test_without_numba_nothing_is_packed_and_nothing_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bf12_tiles, "_loops", lambda: None)
    folder = write_model(tmp_path / "model", tiny_model("mixtral", dtype=torch.bfloat16))
    source = CheckpointSource.open(str(folder))
    skeleton = with_records(source.skeleton(torch.bfloat16), WeightForm.BF12)
    with pytest.raises(UnpackableError, match="numba") as refused:
        source.load_weights(skeleton, CPU, progress=None, cancel=None)
    assert not refused.value.lasting
    config = EngineConfig(device="cpu", context=CONTEXT, draft_length=0)
    with caplog.at_level(logging.WARNING, logger="localmoe"), Engine.load(str(folder), config) as engine:
        assert engine.prepared.skeleton.experts[0].layout.form is WeightForm.PLAIN
    assert "numba does not work here" in caplog.text
    assert source.can_pack(source.skeleton(torch.bfloat16))


def test_records_as_large_as_those_of_16_bits_are_told_apart(tmp_path: Path) -> None:
    model = tiny_model("mixtral", dtype=torch.bfloat16, hidden_size=64, intermediate_size=64)
    folder = write_model(tmp_path / "model", model)
    config = EngineConfig(device="cpu", context=CONTEXT, draft_length=0)
    forms, answers = [], []
    for pack in (True, False):
        with Engine.load(str(folder), replace(config, pack_experts=pack)) as engine:
            forms.append(engine.prepared.skeleton.experts[0].layout.form)
            assert engine.footprint.keeps_bf12 == pack
            assert engine.footprint.expert_bytes == 24576
            answers.append(ask(engine, "one two three", 8).tokens)
    assert forms == [WeightForm.BF12, WeightForm.PLAIN] and answers[0] == answers[1]


def test_readers_that_fail_together_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits sees one error; what the others' frames hold goes too."""
    folder = write_model(tmp_path / "model", tiny_model("mixtral", dtype=torch.bfloat16))
    both = threading.Barrier(2)

    def fail(matrix: Bf12Matrix, first_row: int, weights: Tensor) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(10)
        raise UnpackableError("as it were")

    monkeypatch.setattr(Bf12Matrix, "put", fail)
    monkeypatch.setattr("localmoe.model.parallel_reader.num_threads", lambda: 2)
    stores: list[weakref.ref[Tensor]] = []
    making = HostStore.__init__

    def noted(store: HostStore, *arguments: Any, **options: Any) -> None:
        making(store, *arguments, **options)
        stores.extend(weakref.ref(layer) for layer in store._layers)

    monkeypatch.setattr(HostStore, "__init__", noted)
    source = CheckpointSource.open(str(folder))
    skeleton = with_records(source.skeleton(torch.bfloat16), WeightForm.BF12)
    gc.disable()
    try:
        with suppress(UnpackableError):
            source.load_weights(skeleton, CPU, progress=None, cancel=None)
        assert len(stores) == 3 and all(store() is None for store in stores)
    finally:
        gc.enable()
