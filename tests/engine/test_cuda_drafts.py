"""GPTQ drafts on a real GPU: built inside a budget, and put into a running engine."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engines import ask, budget_for_slots

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.draft_config import GptqSettings, nf4_settings
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.engine.drafting import build_draft
from localmoe.engine.drafts import HostExpertSource
from localmoe.engine.random_source import RandomSource
from localmoe.experts.record_store import RecordStore
from localmoe.hub.catalogue import demo_folder
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.model.gptq_build import BATCH, GptqBuild, least_build_bytes
from localmoe.model.layerwise import LayerwiseModel
from localmoe.model.shapes import find_shape
from localmoe.model.skeleton import Skeleton
from localmoe.quant.builder import estimate_bytes
from localmoe.quant.draft_format import DraftProvenance
from localmoe.quant.draft_writer import DraftWriter
from localmoe.quant.expert_names import ExpertNaming

pytestmark = pytest.mark.gpu
GIB = 1 << 30
NAMING = ExpertNaming("model.layers.{layer}.mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")
QUESTIONS = ("tell me a story about a fox", "what is 3 + 4?", "who are you?")


def draft_words(engine: Engine) -> list[torch.Tensor]:
    """Each layer's packed gate_up."""
    layers = engine._loaded.passes.draft
    assert layers is not None
    found = []
    for layer in layers:
        assert isinstance(layer, LowBitExperts)
        found.append(layer.gate_up.words)
    return found


def in_ram(source: RandomSource) -> tuple[Skeleton, RecordStore]:
    """Random weights, drawn on the GPU because a CPU takes minutes."""
    skeleton = source.skeleton(torch.bfloat16)
    store = source.load_weights(skeleton, torch.device("cuda"), progress=None, cancel=None)
    for module in skeleton.model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and not weight.is_meta:
                module._parameters[name] = torch.nn.Parameter(weight.cpu(), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.cpu()
    return skeleton, store


@pytest.mark.parametrize(("name", "gib"), [("qwen1.5-moe-a2.7b", 3), ("phi-3.5-moe", 5), ("mixtral-8x7b", 8)])
def test_a_build_keeps_within_its_budget(name: str, gib: float, tmp_path: Path) -> None:
    shape = find_shape(name)
    shape = replace(shape, dimensions={**shape.dimensions, "num_hidden_layers": 1})
    source = RandomSource(shape, SyntheticSettings())
    skeleton, store = in_ram(source)
    settings = GptqSettings()
    assert least_build_bytes(skeleton, settings, 2) < gib * GIB
    tokens = torch.randint(1000, (settings.num_tokens // 512 // BATCH * BATCH, 512))
    provenance = DraftProvenance.now(name, "0" * 64, "gptq", 128)
    estimate = estimate_bytes(HostExpertSource(skeleton, store), 4, 128)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with store, DraftWriter(tmp_path / "draft", {}, NAMING, provenance, estimate) as writer:
        GptqBuild(skeleton, store, tokens, settings, torch.device("cuda"), int(gib * GIB)).run(writer)
        writer.publish()
    assert torch.cuda.max_memory_reserved() - before <= gib * GIB


def own_demo(tmp_path: Path) -> Path:
    """The embedded model without its draft."""
    return shutil.copytree(demo_folder(), tmp_path / "own", ignore=shutil.ignore_patterns("draft*"))


def answers(engine: Engine) -> list[list[int]]:
    engine.reset()
    found = []
    for question in QUESTIONS:
        request = GenerationRequest(messages=(Message("user", question),), max_new_tokens=48, draft_length=4)
        found.append([token for event in engine.stream(request) for token in event.token_ids])
    return found


@pytest.mark.parametrize("first", ["INT4 RTN, group 128", "NF4, group 64"])
def test_a_better_draft_takes_over_while_the_engine_answers(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    model = own_demo(tmp_path)
    if first.startswith("NF4"):
        pytest.importorskip("bitsandbytes")
        build_draft(str(model), settings=nf4_settings())
    budget = 3 * GIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = EngineConfig(device="cuda", vram_budget_bytes=budget, strict=True)
    with Engine.load(str(model), config) as engine:
        expected, slots = answers(engine), engine.plan.num_slots
        assert engine.info().draft == first and not engine.why_no_better_draft()
        addresses = [words.data_ptr() for words in draft_words(engine)]
        codes = [words.clone() for words in draft_words(engine)]
        thread = threading.Thread(target=engine.improve_draft)
        thread.start()
        while thread.is_alive():
            assert answers(engine) == expected
            thread.join(0.05)  # the build goes on in the pauses between answers
        words = draft_words(engine)
        assert engine.info().draft == "INT4 GPTQ, group 128"
        assert [each.data_ptr() for each in words] == addresses
        assert not any(torch.equal(a, b) for a, b in zip(codes, words, strict=True))
        assert answers(engine) == expected and engine.plan.num_slots == slots
        assert torch.cuda.max_memory_reserved() <= budget
    with Engine.load(str(model), config) as engine:
        assert engine.info().draft == "INT4 GPTQ, group 128" and answers(engine) == expected


def test_experts_get_the_drafts_memory_and_give_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    model, question = str(own_demo(tmp_path)), "Once upon a time"
    budget = budget_for_slots(model, 40, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = EngineConfig(device="cuda", vram_budget_bytes=budget, strict=True)
    with Engine.load(model, config) as engine:
        place, before = engine._draft_place, engine.plan
        expected = ask(engine, question, 64).tokens
        held = engine.device_memory()["draft"]
        for _ in range(2):
            place._know_slots()
            place._worth.drafted_per_s, place._worth.plain_per_s, place._worth.judged = 50.0, 100.0, True
            assert ask(engine, question, 64).tokens == expected
            assert engine.plan.draft_aside and engine.plan.num_slots > before.num_slots
            assert engine.device_memory()["draft"] == 0
            place._worth.plain_per_s, place._worth.judged = 1.0, True
            assert ask(engine, question, 64).tokens == expected and engine.plan == before
            assert 0 < engine.device_memory()["draft"] == held <= before.draft_bytes
            assert ask(engine, question, 64, draft_length=4).tokens == expected
        assert torch.cuda.max_memory_allocated() <= budget
    with Engine.load(model, config) as engine:  # goes by what the last one knew
        assert ask(engine, question, 8).tokens == expected[:8] and not engine.plan.draft_aside
        assert engine._draft_place.rates == "1 tokens/s without it, 50 with it"


def test_layers_run_on_the_gpu_and_their_weights_go_back(tmp_path: Path) -> None:
    shape = find_shape("olmoe-1b-7b")
    shape = replace(shape, dimensions={**shape.dimensions, "num_hidden_layers": 2, "vocab_size": 1000})
    source = RandomSource(shape, SyntheticSettings())
    skeleton, store = in_ram(source)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with store:
        model = LayerwiseModel(skeleton, torch.device("cuda"))
        hidden = model.embed(torch.randint(1000, (BATCH, 64)), BATCH)
        routed = model.routed(0, hidden)
        assert routed is not None and routed.hidden.is_cuda
        model.advance(0, hidden, torch.zeros_like(routed.hidden, dtype=torch.float32))
        assert all(not part.is_cuda for part in hidden)
        assert all(not weight.is_cuda for weight in skeleton.model.parameters())
        del routed, model, hidden
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_another_model_drafts_within_the_budget(tmp_path: Path) -> None:
    model = str(own_demo(tmp_path))
    circles = GenerationRequest(messages=(Message("user", "say" + 9 * " la"),), max_new_tokens=200)
    budget = 3 * GIB
    config = EngineConfig(device="cuda", vram_budget_bytes=budget, strict=True, policy="sp-moe")
    with Engine.load(model, replace(config, draft_length=0)) as engine:
        engine.reset()
        expected = [
            [token for event in engine.stream(request) for token in event.token_ids]
            for question in QUESTIONS
            for request in (GenerationRequest(messages=(Message("user", question),), max_new_tokens=48),)
        ]
        plain = [token for event in engine.stream(circles) for token in event.token_ids]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with Engine.load(model, replace(config, drafter="model", draft_model=model)) as engine:
        assert engine.info().draft == "the model own"
        assert answers(engine) == expected
        request = GenerationRequest(
            messages=(Message("user", QUESTIONS[0]),), max_new_tokens=32, draft_length=4
        )
        stats = list(engine.stream(request))[-1].stats
        assert (stats.acceptance_rate or 0) > 0.9 and (stats.expert_match_rate or 0) > 0.9
        looked_up = 0
        for _ in range(4):
            events = list(engine.stream(circles))
            assert [token for event in events for token in event.token_ids] == plain
            looked_up += events[-1].stats.looked_up
        assert looked_up > 20, "faster than any draft where a text goes in circles"
        assert torch.cuda.max_memory_reserved() <= budget
