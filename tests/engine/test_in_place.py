"""Without a GPU, experts and linear layers of 16-bit models are computed where they lie: the same answers, in
the memory of the weights alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.engines import ROOMY, ask, check_stats
from support.mxfp4_models import write_mxfp4_model
from support.tiny_models import (
    ARCHITECTURES,
    UNGATED_ARCHITECTURE,
    reference_greedy,
    tied_model_storing,
    tiny_model,
    write_model,
)

from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.errors import ConfigError, DraftError, LocalMoeError
from localmoe.core.switches import Switches
from localmoe.engine import Engine, plan_model
from localmoe.experts import cpu_lane
from localmoe.experts.in_place import InPlaceMemory

PROMPTS = ("Hello there, how are", "z")
POLICIES = ("on-demand", "moe-speq", "sp-moe")


@pytest.fixture(autouse=True)
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny jobs too are every thread's."""
    monkeypatch.setattr(cpu_lane, "_ALONE_BYTES", 0)


def load(folder: Path | str, **config: Any) -> Engine:
    return Engine.load(str(folder), EngineConfig(device="cpu", cpu_threads=2, context=256, **config))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("number", "architecture"), [*enumerate((*ARCHITECTURES, UNGATED_ARCHITECTURE))])
def test_greedy_tokens_are_those_of_transformers_in_float32(
    number: int, architecture: str, tmp_path: Path
) -> None:
    """Every length with every architecture, and with every policy, of which none has anything to do here."""
    folder = write_model(tmp_path / architecture, tiny_model(architecture, dtype=torch.bfloat16))
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with load(folder, draft_length=4) as engine:
        assert engine.plan.in_place and isinstance(engine._loaded.passes.memory, InPlaceMemory)
        for prompt in PROMPTS:
            expected: list[int] = []
            for place, length in enumerate((0, 1, 5, "auto") if engine.footprint.can_rollback else (0,)):
                policy = POLICIES[(number + place + 2 * (prompt == "z")) % len(POLICIES)]
                answer = ask(engine, prompt, 12, policy=policy, draft_length=length)
                expected = expected or reference_greedy(exact, answer.prompt, 12)
                assert answer.tokens == expected, (prompt, policy, length)
                check_stats(answer)
                assert answer.stats.hit_rate == 1 and answer.stats.h2d_bytes == 0
                assert answer.stats.cpu_bytes > 0 and answer.stats.cpu_jobs > 0


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("stored", ["two values", "one value twice", "the head alone"])
def test_what_the_files_have_twice_or_elsewhere_is_used_as_by_transformers(
    stored: str, tmp_path: Path
) -> None:
    folder = tied_model_storing(tmp_path / "tied", stored, torch.bfloat16)
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for config in ({}, {"vram_budget_bytes": ROOMY}):  # in place, and through slots
        with load(folder, **config) as engine:
            answer = ask(engine, PROMPTS[0], 12)
            assert answer.tokens == reference_greedy(exact, answer.prompt, 12), config
            assert engine.plan.in_place == (not config)


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with load("demo") as engine:
        yield engine


def test_memory_is_what_the_plan_says(demo: Engine) -> None:
    plan, held = demo.plan, demo.device_memory()
    assert plan.in_place and plan.resident_share == 1 and held["slots"] == 0
    assert plan.host_bytes == demo._loaded.store.num_bytes
    assert held["shared"] == pytest.approx(plan.shared_bytes, rel=0.01)
    through_slots = plan_model("demo", EngineConfig(device="cpu", context=256, lanes="vram+link"))[1]
    assert not through_slots.in_place and through_slots.num_slots == plan.num_slots
    assert plan.total_bytes < through_slots.total_bytes - 2 * plan.host_bytes
    assert "where they lie" in demo.info().lanes and "VRAM budget" not in demo.info().exactness


def test_pytorch_keeps_to_one_thread_in_passes_alone(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen, compute = torch.get_num_threads(), [], InPlaceMemory.compute
    monkeypatch.setattr(demo._loaded.passes.memory, "_pytorch_threads", 3)
    torch.set_num_threads(3)

    def watched(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return compute(*args)

    monkeypatch.setattr(InPlaceMemory, "compute", watched)
    try:
        ask(demo, "The sea", 3)
        assert seen and set(seen) == {1} and torch.get_num_threads() == 3
        monkeypatch.setattr(InPlaceMemory, "compute", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(demo, "The sea", 3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_demo_answers_as_through_slots(demo: Engine) -> None:
    with load("demo", lanes="vram+link") as slots:
        for prompt in ("Once upon a time", "The capital of"):
            given = [
                ask(engine, prompt, 48, draft_length=n).tokens for engine in (demo, slots) for n in (0, 6)
            ]
            assert given[0] == given[1] == given[2] == given[3]


def test_answers_do_not_depend_on_a_default_that_other_threads_change(demo: Engine) -> None:
    sampled = SamplingConfig(temperature=1.0, seed=3)
    found = []
    for default in (torch.float32, torch.bfloat16):
        demo.reset()
        torch.set_default_dtype(default)  # as transformers does for the whole process while it builds a model
        try:
            kinds: tuple[SamplingConfig, ...] = (SamplingConfig(), sampled)
            found.append([ask(demo, PROMPTS[0], 24, draft_length=2, sampling=one).tokens for one in kinds])
        finally:
            torch.set_default_dtype(torch.float32)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "config",
    [
        {"strict": True},
        {"lanes": "vram+link"},
        {"vram_budget_bytes": 1 << 30},
        {"emulated_link_bytes_per_s": 1e9},
    ],
    ids=str,
)
def test_slots_are_used_where_a_setting_asks_for_them(config: dict[str, Any]) -> None:
    plan = plan_model("demo", EngineConfig(device="cpu", **config))[1]
    assert not plan.in_place and plan.slot_bytes * plan.num_slots > plan.host_bytes


def test_weights_of_32_bits_go_through_slots(tiny: Callable[[str], tuple[Path, Any]]) -> None:
    assert not plan_model(str(tiny("qwen2_moe")[0]), EngineConfig(device="cpu"))[1].in_place


def test_a_budget_for_what_lies_in_place_is_refused_and_nothing_changes(demo: Engine) -> None:
    before = demo.plan
    with pytest.raises(ConfigError, match="load the model again to give it a memory budget"):
        demo.resize(1 << 30)
    assert demo.plan == before == demo.resize(None)
    demo.reset()
    assert ask(demo, "Once upon a time", 4).stats.hit_rate == 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen2_moe"])
def test_without_a_draft_the_text_is_looked_up_and_answers_stay(architecture: str, tmp_path: Path) -> None:
    """Greedily texts of tiny models go round in circles; drawn, a seed says them."""
    model = tiny_model(architecture, dtype=torch.bfloat16, seed=7)  # nobody builds a draft of it
    folder = write_model(tmp_path / architecture, model)
    samplings = (
        SamplingConfig(),
        SamplingConfig(temperature=0.2, top_p=0.9, repetition_penalty=1.02, seed=5),
    )
    with load(folder) as engine:
        for sampling in samplings:
            drafted = accepted = 0
            for prompt in (*PROMPTS, "one two three four. " * 6):
                plain = ask(engine, prompt, 60, sampling=sampling, draft_length=0)
                looked_up = ask(engine, prompt, 60, sampling=sampling)
                assert looked_up.tokens == plain.tokens and not plain.stats.drafted
                check_stats(looked_up)
                drafted += looked_up.stats.drafted
                accepted += looked_up.stats.accepted
            assert drafted > 0 and accepted > 0, sampling
        assert ask(engine, "z", 4, draft_length=0).stats.drafted == 0
        without = ask(engine, prompt, 60, switches=Switches(look_up=False))
        assert without.stats.drafted == 0 and without.tokens == ask(engine, prompt, 60).tokens
        with pytest.raises(DraftError, match="No draft is loaded"):
            ask(engine, "z", 4, draft_length=2)
    with load(folder, draft_length=0) as engine:
        assert not engine.info().looks_up and "switched off" in engine.info().draft
        assert ask(engine, "one two three. " * 6, 30, draft_length="auto").stats.drafted == 0


@pytest.mark.slow
def test_no_draft_is_built_that_nobody_asked_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "undrafted", tiny_model("qwen3_moe", dtype=torch.bfloat16))
    with load(folder) as engine:
        assert not engine.plan.drafting and "none is built" in engine.plan.drafting_reason
        info = engine.info()
        assert info.looks_up and "prompt lookup" in info.draft and "none is built" in info.draft
    with load(folder, draft_length=3) as engine:
        assert engine.plan.drafting and ask(engine, "z", 8).stats.drafted > 0
    with load(folder) as engine:
        assert engine.plan.drafting, "now there is one"
    other = tiny_model("qwen3_moe", dtype=torch.bfloat16, seed=1)
    with load(write_model(tmp_path / "other" / "undrafted", other)) as engine:
        assert not engine.plan.drafting and not engine.device_memory()["draft"], "it is of other weights"
        assert "no draft of these weights" in engine.info().draft
    with load("demo") as engine:
        assert engine.plan.drafting, "its draft comes with it"


@pytest.mark.slow
def test_published_codes_stay_what_they_are(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss", dtype=torch.bfloat16, hidden_size=128, intermediate_size=128)
    folder = write_mxfp4_model(tmp_path / "gpt-oss", model)
    with load(folder) as packed, load(folder, lanes="vram+link") as decoded:
        assert packed.plan.in_place and not decoded.plan.in_place
        assert packed.plan.host_bytes < 0.3 * decoded.plan.host_bytes
        assert packed._loaded.store.layouts[0].mxfp4 and not decoded._loaded.store.layouts[0].mxfp4
        for prompt in PROMPTS:
            assert ask(packed, prompt, 16).tokens == ask(decoded, prompt, 16).tokens


def test_weights_of_more_than_16_bits_keep_them(tmp_path: Path) -> None:
    """One router in float32 among bfloat16: experts lie in place, linear layers take what they need."""
    folder = write_model(tmp_path / "wide", tiny_model("mixtral", dtype=torch.bfloat16))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("gate.weight"))
    tensors[name] = tensors[name].float() * 1.001
    save_file(tensors, file, metadata={"format": "pt"})
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with load(folder) as engine:
        assert engine.plan.in_place and engine.prepared.linears is None
        assert engine.device_memory()["shared"] == pytest.approx(engine.plan.shared_bytes, rel=0.01)
        answer = ask(engine, "Hello there", 16)
        assert answer.tokens == reference_greedy(exact, answer.prompt, 16)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2_moe", "gpt_oss"])
def test_in_16_bits_answers_depend_on_neither_draft_nor_policy(architecture: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / architecture, tiny_model(architecture, dtype=torch.bfloat16))
    with load(folder, dtype="bfloat16", draft_length=4) as engine:
        assert engine.plan.in_place and engine.prepared.linears is None
        given = [
            ask(engine, "Hello there", 24, policy=policy, draft_length=length).tokens
            for policy in POLICIES
            for length in (0, 3, 8)
        ]
        assert all(tokens == given[0] for tokens in given) and len(set(given[0])) > 2


def test_a_context_shorter_than_what_padding_is_measured_with(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "short", tiny_model("olmoe", dtype=torch.bfloat16))
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = EngineConfig(device="cpu", cpu_threads=2, context=48)
    with Engine.load(str(folder), config) as engine:
        answer = ask(engine, "z" * 30, 12)
        assert answer.tokens == reference_greedy(exact, answer.prompt, 12)
        assert "exact" in engine.info().exactness


def test_closing_ends_an_answer_and_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    engine = load("demo")
    failed: list[LocalMoeError] = []

    def answer() -> None:
        try:
            ask(engine, "Once upon a time", 240, draft_length=0)
        except LocalMoeError as error:
            failed.append(error)

    asking = threading.Thread(target=answer)
    asking.start()
    while not engine._loaded.passes.counters.steps:
        threading.Event().wait(0.001)
    engine.close()
    asking.join(20)
    assert not asking.is_alive()
    assert [str(error) for error in failed] == ["The engine was closed while an answer was being written."]
    assert not set(threading.enumerate()) - before
