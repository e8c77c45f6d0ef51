"""Where steps run whole on a GPU, the output head is packed beside the experts, and slots get what that
saves; a head that does not allow it stays in 16 bits."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_more_architectures import ANSWERING
from safetensors.torch import load_file, save_file
from support.engines import runner_of
from support.shapes import ask_ids, shallow
from support.tiny_models import tiny_model, write_model
from test_packed_experts import as_on_a_gpu

pytest.importorskip("triton")

from localmoe.core.config import EngineConfig
from localmoe.core.draft_config import DraftForm
from localmoe.core.synthetic import SyntheticSettings
from localmoe.engine import Engine, packing, planning
from localmoe.engine.facts import local_facts
from localmoe.engine.fit import fit_model
from localmoe.engine.packing import load_parts
from localmoe.engine.planning import PreparedModel, prepare_model
from localmoe.engine.settings import ComputeSettings
from localmoe.engine.sources import CheckpointSource
from localmoe.engine.twin import Twin
from localmoe.engine.what_if import card_plan
from localmoe.hardware.cards import find_card
from localmoe.kernels.packed_weight import PackedWeight
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.packed_head import UnpackableHeadError, own_head, packed_embedding, packed_weight_of
from localmoe.model.shapes import SHAPES
from localmoe.model.skeleton import with_records

CPU, BF16 = torch.device("cpu"), torch.bfloat16
GIB = 1 << 30


def write(folder: Path, architecture: str = "mixtral", dtype: torch.dtype = BF16, **changes: Any) -> Path:
    return write_model(folder / architecture, tiny_model(architecture, dtype=dtype, **changes))


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("qwen2_moe", False), ("phimoe", False), ("gpt_oss", False), ("qwen2_moe", True), ("phimoe", True)],
)
def test_slots_get_what_a_packed_head_saves(
    architecture: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, architecture, tie_word_embeddings=tied)
    packed = as_on_a_gpu(folder, monkeypatch, draft_length=0)
    plain = as_on_a_gpu(folder, monkeypatch, draft_length=0, pack_experts=False)
    assert (packed.skeleton.packed_head, plain.skeleton.packed_head) == ("lm_head", None)
    assert packed.footprint.packs_head and not plain.footprint.packs_head
    saved = packed.footprint.head_saved_bytes
    assert plain.plan.shared_bytes - packed.plan.shared_bytes == saved > 0
    assert packed.footprint.in_16_bits().packed_away_bytes == 0
    facts = local_facts(str(folder))
    assert facts.footprint.in_codes().packed_away_bytes == saved
    assert facts.footprint.in_codes(packing=False).packed_away_bytes == 0
    tight = as_on_a_gpu(folder, monkeypatch, packed.plan.total_bytes - packed.plan.slot_bytes, draft_length=0)
    assert tight.skeleton.packed_head == "lm_head", "bits depend on no budget"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_weights_stay_as_they_are(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = as_on_a_gpu(write(tmp_path, dtype=dtype), monkeypatch, draft_length=0)
    assert prepared.skeleton.packed_head is None and prepared.footprint.packed_away_bytes == 0


@pytest.mark.parametrize("tied", [False, True])
def test_on_a_cpu_it_stays_as_it_is(tied: bool, tmp_path: Path) -> None:
    folder = str(write(tmp_path, tie_word_embeddings=tied))
    for config in (EngineConfig(device="cpu"), EngineConfig(device="cpu", vram_budget_bytes=1 << 28)):
        prepared = prepare_model(folder, config)
        assert prepared.skeleton.packed_head is None and not prepared.footprint.packs_head
        predicted = card_plan(prepared.footprint.in_codes(), find_card("rtx-4060"), 128, 2, drafting=False)
        plain = card_plan(prepared.footprint.in_16_bits(), find_card("rtx-4060"), 128, 2, drafting=False)
        assert plain.shared_bytes - predicted.shared_bytes == prepared.footprint.head_saved_bytes > 0


def test_what_fits_is_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path)
    prepared = as_on_a_gpu(folder, monkeypatch, draft_length=0)
    monkeypatch.setattr("localmoe.engine.fit._compute", lambda *asked: prepared.compute)
    config = EngineConfig(vram_budget_bytes=1 << 30, context=prepared.plan.context, draft_length=0)
    fit = fit_model(local_facts(str(folder)), planning.probe_hardware(measure=False), None, config)
    assert fit.plan is not None and fit.plan.shared_bytes == prepared.plan.shared_bytes


def with_rare_exponents(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if any(part in name for part in names) and tensor.dim() > 1:
            rows = tensor[0] if tensor.dim() == 3 else tensor
            rows[:16] = 2.0 ** (-torch.arange(rows.shape[1]) % 120).float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("experts_too", [False, True])
def test_one_that_cannot_be_packed_is_planned_and_loaded_in_16_bits_and_remembered(
    experts_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path)
    with_rare_exponents(folder, "lm_head", *(["experts"] if experts_too else []))
    loaded: list[PreparedModel] = []

    def read(prepared: PreparedModel, config: EngineConfig, **others: Any) -> PreparedModel:
        """Of a load what tells whether weights can be packed."""
        loaded.append(prepared)
        prepared.source.load_weights(prepared.skeleton, CPU, progress=None, cancel=None).close()
        return prepared

    monkeypatch.setattr(packing, "assemble", read)
    with caplog.at_level(logging.WARNING, logger="localmoe"):
        asked = EngineConfig(draft_length=0)
        parts, config, _ = load_parts(
            lambda config: as_on_a_gpu(folder, monkeypatch, draft_length=0, pack_experts=config.pack_experts),
            asked, progress=None, cancel=None,
        )  # fmt: skip
    assert isinstance(parts, PreparedModel) and parts is loaded[-1] and len(loaded) == 2 + experts_too
    assert config == asked, "what is remembered needs no other configuration"
    assert parts.skeleton.packed_head is None and parts.footprint.packed_away_bytes == 0
    form = WeightForm.PLAIN if experts_too else WeightForm.BF12
    assert parts.skeleton.experts[0].layout.form is form
    assert loaded[0].footprint.packs_head and loaded[0].plan.shared_bytes < parts.plan.shared_bytes
    assert "output head of" in caplog.text and ("the experts of" in caplog.text) == experts_too
    assert not local_facts(str(folder)).footprint.head_saved_bytes
    source = CheckpointSource.open(str(folder))
    assert not source.can_pack_head(source.skeleton(BF16))
    assert source.can_pack(source.skeleton(BF16)) != experts_too
    (folder / "model.safetensors").touch()  # other weights
    source = CheckpointSource.open(str(folder))
    assert source.can_pack_head(source.skeleton(BF16))


def test_where_it_cannot_be_remembered_nothing_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path)
    with_rare_exponents(folder, "lm_head")
    monkeypatch.setattr(CheckpointSource, "never_pack", lambda self, **what: None)
    monkeypatch.setattr(
        packing, "assemble",
        lambda prepared, config, **others: prepared.source.load_weights(
            prepared.skeleton, CPU, progress=None, cancel=None
        ),
    )  # fmt: skip
    parts, config, _ = load_parts(
        lambda config: as_on_a_gpu(folder, monkeypatch, draft_length=0, pack_experts=config.pack_experts),
        EngineConfig(draft_length=0), progress=None, cancel=None,
    )  # fmt: skip
    parts.close()
    assert not config.pack_experts


def prepared_for_kernels(
    folder: Path, architecture: str, draft_length: int = 0, *rare: str, **changes: Any
) -> PreparedModel:
    """As if passes ran whole on a GPU. rare: what cannot be packed."""
    config = EngineConfig(device="cpu", context=160, draft_length=draft_length)
    model = write(folder, architecture, num_hidden_layers=2, **changes)
    if rare:
        with_rare_exponents(model, *rare)
    prepared = prepare_model(str(model), config)
    skeleton = with_records(prepared.source.skeleton(BF16), prepared.skeleton.experts[0].layout.form)
    skeleton = replace(
        skeleton, host_embedding=prepared.skeleton.host_embedding, packed_head=own_head(skeleton.model),
        packed_embedding=packed_embedding(skeleton.model),
    )  # fmt: skip
    return replace(prepared, skeleton=skeleton, compute=ComputeSettings(CPU, BF16, whole_passes=True))


@pytest.mark.interpreted
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.slow(but=1)
def test_its_kernels_are_compiled_on_a_twin_and_its_memory_goes_with_the_model(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from localmoe.engine.loading import assemble

    launched: set[tuple[Any, ...]] = set()

    def warmup(self: Any, *args: Any, grid: Any, **options: Any) -> None:
        if "packed" in self.fn.__name__:
            tensors = tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
            launched.add((self.fn.__name__, tensors, *sorted(options.items())))

    monkeypatch.setattr(InterpretedFunction, "warmup", warmup)
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.compile())
    prepared = prepared_for_kernels(tmp_path, "mixtral", draft_length=4, tie_word_embeddings=tied)
    twin = Twin.of(prepared, DraftForm(), lane=False)
    parts = assemble(prepared, EngineConfig(draft_length=4), progress=None, cancel=None)
    head = prepared.skeleton.model.lm_head
    packed = packed_weight_of(head)
    assert packed is not None
    held = weakref.ref(packed.memory)
    assert parts.shared_bytes >= packed.memory.nbytes > 0
    del packed
    parts.close()
    del parts
    gc.collect()
    assert held() is None and head.localmoe_packed.is_meta
    wanted = set(launched)
    # few rows, and windows; the draft's row is one of these where it is no 2,048 columns long
    assert {dict(found[2:])["BM"] for found in wanted if found[0] != "_packed_rows"} == {16, 32}
    assert any(found[0] == "_packed_rows" for found in wanted) == tied
    launched.clear()
    twin.compile_passes(threading.Event())
    assert launched == wanted


def test_a_load_that_its_head_ends_gives_its_memory_back_though_the_error_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localmoe.engine.loading import assemble

    made: list[weakref.ref[torch.Tensor]] = []
    empty = PackedWeight.empty

    def noted(rows: int, columns: int, device: torch.device) -> PackedWeight:
        weight = empty(rows, columns, device)
        made.append(weakref.ref(weight.memory))
        return weight

    monkeypatch.setattr(PackedWeight, "empty", noted)
    prepared = prepared_for_kernels(tmp_path, "mixtral", 0, "lm_head")
    with pytest.raises(UnpackableHeadError) as refused:
        assemble(prepared, EngineConfig(draft_length=0), progress=None, cancel=None)
    gc.collect()
    assert made and all(memory() is None for memory in made)
    assert prepared.skeleton.model.lm_head.localmoe_packed.is_meta and refused.value.__traceback__ is not None


# -- on a real GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_loaded_head_takes_what_is_planned_and_gives_it_back(name: str) -> None:
    held, saved = {}, 0
    for pack in (True, False):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        config = EngineConfig(
            device="cuda", vram_budget_bytes=12 * GIB, context=1024, draft_length=0, pack_experts=pack
        )
        with Engine.load_shape(shallow(name, 3), config, SyntheticSettings()) as engine:
            assert isinstance(runner_of(engine), DeviceRunner), "steps run whole on the GPU"
            assert engine.footprint.packs_head == pack
            held[pack] = engine.device_memory()["shared"]
            assert held[pack] == pytest.approx(engine.plan.shared_bytes, rel=0.01)
            saved = engine.footprint.head_saved_bytes
            ask_ids(engine, (1, 2, 3), 8)
        assert torch.cuda.max_memory_reserved() - before <= 12 * GIB
        assert torch.cuda.memory_allocated() - before < 64 << 20, "less than any of these heads"
    assert held[False] - held[True] == saved > 0


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2_moe", "phimoe", "gpt_oss", "gemma4_text"])
def test_logits_are_those_of_the_head_in_16_bits(
    architecture: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All before it is the same, so they differ by what sums in another order do."""
    changes = {**ANSWERING.get(architecture, {}), "vocab_size": 4001, "tie_word_embeddings": tied}
    found, folder = [], str(write(tmp_path, architecture, **changes))
    for pack in (True, False):
        if not pack:
            monkeypatch.setattr(CheckpointSource, "can_pack_head", lambda self, skeleton: False)
        config = EngineConfig(device="cuda", strict=True, dtype="bfloat16", context=256)
        with Engine.load(folder, config) as engine:
            assert engine.footprint.packs_head == pack
            runner = runner_of(engine)
            for first in (5, 300, 1000):
                engine.reset()
                runner.sequence.truncate(0)
                tokens = list(range(first, first + 64))
                found.append(runner.run(tokens, "verify", last_only=False).double().cpu())
    packed, plain = torch.cat(found[:3]), torch.cat(found[3:])
    error = (packed - plain).norm() / plain.norm()
    assert float(error) < 2e-3, error  # neighbours among bfloat16 are 4e-3 to 8e-3 apart
    assert (packed.argmax(1) == plain.argmax(1)).float().mean() > 0.95


@pytest.mark.gpu
def test_a_load_that_begins_again_in_16_bits_keeps_its_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, vocab_size=300_000)
    with_rare_exponents(folder, "lm_head")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    config = EngineConfig(device="cuda", vram_budget_bytes=GIB, context=256, draft_length=0)
    with caplog.at_level(logging.WARNING, logger="localmoe"), Engine.load(str(folder), config) as engine:
        assert not engine.footprint.packs_head and engine.footprint.keeps_bf12
        assert engine.device_memory()["shared"] == pytest.approx(engine.plan.shared_bytes, rel=0.01)
        ask_ids(engine, (1, 2, 3), 8)
        assert torch.cuda.max_memory_reserved() - before <= GIB
    assert "the output head of" in caplog.text
    assert torch.cuda.memory_allocated() - before < 48 << 20, "less than this head"
