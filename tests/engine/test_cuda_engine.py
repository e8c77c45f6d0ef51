"""The engine on a real GPU: exact for every setting, without hidden waits, and inside its budget."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support.engines import ask, device_runner_of, keep_slots, load_with_slots, runner_of
from support.shapes import random_prompts, shallow
from support.tiny_models import ARCHITECTURES, STATEFUL_ARCHITECTURES

from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.errors import BudgetError
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import Message
from localmoe.engine import Engine, planning
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.prefill_stream import PrefillStream
from localmoe.model import device_prompts
from localmoe.model.runner import ModelRunner
from localmoe.model.shapes import SHAPES
from localmoe.model.step_graphs import MAX_GRAPHS

pytestmark = pytest.mark.gpu
GIB = 1 << 30
LENGTHS: tuple[int | Literal["auto"], ...] = (0, 1, 4, 8, 16, "auto")
POLICIES = ("on-demand", "moe-speq")
Tiny16 = Callable[[str], Path]


def on_gpu(budget: int | None = None, **settings: Any) -> EngineConfig:
    return EngineConfig(device="cuda", vram_budget_bytes=budget, **{"strict": True, **settings})


def tokens_of(engine: Engine, request: GenerationRequest) -> list[int]:
    return [token for event in engine.stream(request) for token in event.token_ids]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_embedded_model_answers_20_prompts_alike_for_every_setting(dtype: str) -> None:
    count = 20 if dtype == "bfloat16" else 3
    questions = [prompt.text for prompt in read_prompts(BUNDLED_PROMPTS, count)]
    lengths = LENGTHS if dtype == "bfloat16" else (0, 4, "auto")  # 32 bits have no whole passes
    expected: list[list[int]] | None = None
    for budget in (284 << 20, 254 << 20):
        gc.collect()  # what other tests in this process left is not the engine's
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with Engine.load("demo", on_gpu(budget, dtype=dtype, context=1024)) as engine:
            assert isinstance(runner_of(engine), ModelRunner) == (dtype == "float32")
            assert engine.info().exactness.startswith("exact")
            for policy in POLICIES:
                for length in lengths:
                    engine.reset()
                    given = [
                        ask(engine, [Message("user", q)], 32, policy=policy, draft_length=length).tokens
                        for q in questions
                    ]
                    expected = expected or given
                    assert given == expected, (budget, policy, length)
            assert torch.cuda.max_memory_allocated() <= budget
            assert torch.cuda.max_memory_reserved() <= budget


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.6, top_p=0.95, repetition_penalty=1.05, seed=7),
        SamplingConfig(temperature=1.0, seed=8),
        SamplingConfig(temperature=0.9, top_k=20, top_p=0.8, min_p=0.02, seed=9),
        SamplingConfig(repetition_penalty=1.3),
    ],
    ids=str,
)
def test_a_seed_means_the_same_sampled_answer_for_every_setting(sampling: SamplingConfig) -> None:
    questions = [prompt.text for prompt in read_prompts(BUNDLED_PROMPTS, 4)]
    expected: list[list[int]] | None = None
    for budget in (284 << 20, 254 << 20):
        with Engine.load("demo", on_gpu(budget, dtype="bfloat16", context=1024)) as engine:
            for policy in POLICIES:
                for length in LENGTHS:
                    engine.reset()
                    how = {"policy": policy, "draft_length": length, "sampling": sampling}
                    asked = [ask(engine, [Message("user", q)], 40, **how) for q in questions]
                    expected = expected or [answer.tokens for answer in asked]
                    assert [answer.tokens for answer in asked] == expected, (budget, policy, length)
                    if length == 8:
                        drafted = sum(answer.stats.drafted for answer in asked)
                        assert sum(answer.stats.accepted for answer in asked) > 0.3 * drafted > 0
    others = replace(sampling, seed=10)
    with Engine.load("demo", on_gpu(284 << 20, dtype="bfloat16", context=1024)) as engine:
        again = [ask(engine, [Message("user", q)], 40, sampling=others).tokens for q in questions]
    assert (again == expected) == sampling.greedy


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *STATEFUL_ARCHITECTURES])
def test_tiny_models_answer_alike_with_and_without_drafts(architecture: str, tiny16: Tiny16) -> None:
    config = {"device": "cuda", "dtype": "bfloat16", "context": 256, "strict": True}
    with load_with_slots(tiny16(architecture), 5, **config) as engine:
        plain = ask(engine, "Once upon a time", 48, draft_length=0).tokens
        for policy in POLICIES:
            for length in (1, 4, 8, 15, 40, "auto"):
                assert ask(engine, "Once upon a time", 48, draft_length=length, policy=policy).tokens == plain


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_models_of_real_shapes_answer_alike_for_every_setting(name: str) -> None:
    expected: list[list[int]] | None = None
    for slots in (9, 40):
        config = on_gpu(20 * GIB, context=1024, draft_length=4)  # also where no draft would be loaded
        with Engine.load_shape(shallow(name, 3), config, SyntheticSettings()) as engine:
            assert not isinstance(runner_of(engine), ModelRunner), "steps run whole on the GPU"
            assert engine.plan.drafting
            keep_slots(engine, slots)
            requests = [*random_prompts(engine, 3, 20), *random_prompts(engine, 1, 150)]
            for policy in POLICIES:
                for length in LENGTHS:
                    engine.reset()
                    given = [
                        tokens_of(engine, replace(r, policy=policy, draft_length=length)) for r in requests
                    ]
                    expected = expected or given
                    assert given == expected, (slots, policy, length)
                    assert engine._loaded.passes.memory.slots.num_slots == slots
        torch.cuda.empty_cache()


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *STATEFUL_ARCHITECTURES])
def test_a_prompt_leaves_the_same_bits_however_it_is_cut_into_passes(
    architecture: str, tiny16: Tiny16
) -> None:
    config = {"device": "cuda", "dtype": "bfloat16", "context": 512, "lanes": "vram+link"}
    with load_with_slots(tiny16(architecture), 6, **config) as engine:
        runner = runner_of(engine)
        tokens = np.random.default_rng(1).integers(10, 250, 300).tolist()
        after = []
        for width in (300, 150, 64, 17, 9, 1):
            runner.sequence.truncate(0)
            for start in range(0, len(tokens), width):
                runner.run(tokens[start : start + width], "prefill", last_only=True)
            after.append(runner.run([7], "verify", last_only=True).clone())
        assert all(torch.equal(logits, after[0]) for logits in after)


@pytest.mark.parametrize("length", [0, 4])
def test_what_steps_waited_for_is_measured(length: int) -> None:
    with load_with_slots("demo", 40, device="cuda", strict=True) as engine:
        for _ in range(2):  # the first one captures
            stats = ask(engine, "Once upon a time", 64, draft_length=length).stats
    assert stats.hit_rate is not None and stats.stall_s is not None
    assert stats.hit_rate < 0.9 and 0 < stats.stall_s < stats.verify_s
    with Engine.load("demo", on_gpu()) as engine:
        assert engine.plan.resident_share == 1
        ask(engine, "Once upon a time", 64, draft_length=length)
        assert ask(engine, "Once upon a time", 64, draft_length=length).stats.stall_s == 0.0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("length", [0, 4])
def test_greedy_steps_wait_for_nothing_but_their_own_report(length: int) -> None:
    with Engine.load("demo", on_gpu(254 << 20, context=512)) as engine:
        request = GenerationRequest(prompt="Once upon a time", max_new_tokens=40, draft_length=length)
        expected = tokens_of(engine, request)  # captures the graphs
        given: list[int] = []
        stream = iter(engine.stream(request))
        given += next(stream).token_ids  # the prompt
        try:
            torch.cuda.set_sync_debug_mode("error")
            for event in stream:
                given += event.token_ids
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert given == expected


def test_text_that_is_looked_up_is_the_same_and_takes_fewer_steps() -> None:
    """Random weights go round in circles after a while; what is drawn does not repeat."""
    config = on_gpu(8 * GIB, context=1024, drafter="prompt-lookup")
    sampled = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=5)
    with Engine.load_shape("olmoe-1b-7b", config, SyntheticSettings()) as engine:
        assert engine.info().looks_up
        (request,) = random_prompts(engine, 1, 64)
        for sampling, circles in ((SamplingConfig(), True), (sampled, False)):
            found = {}
            for length in (0, 3, "auto", "auto"):
                asked = replace(request, draft_length=length, sampling=sampling, max_new_tokens=96)
                events = list(engine.stream(asked))
                found[length] = [token for event in events for token in event.token_ids], events[-1].stats
            for tokens, _ in found.values():
                assert tokens == found[0][0]
            stats = found["auto"][1]
            assert stats is not None and (stats.steps < 60 and stats.accepted > 30) == circles


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_looked_up_takes_the_place_of_drafts_and_changes_no_token(strict: bool) -> None:
    config = on_gpu(8 * GIB, context=1024, strict=strict)
    sampled = SamplingConfig(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=5)
    with Engine.load_shape("olmoe-1b-7b", config, SyntheticSettings()) as engine:
        assert not engine.info().looks_up
        engine._loaded.passes.synthetic = None  # the text is the weights' own
        (request,) = random_prompts(engine, 1, 64)
        for sampling, circles in ((SamplingConfig(), True), (sampled, False)):
            found, looked_up = [], 0
            for length in (0, "auto", "auto", "auto"):
                asked = replace(request, draft_length=length, sampling=sampling, max_new_tokens=120)
                events = list(engine.stream(asked))
                found.append([token for event in events for token in event.token_ids])
                stats = events[-1].stats
                assert stats is not None and stats.looked_up <= stats.drafted
                looked_up += stats.looked_up
            if strict:
                assert all(tokens == found[0] for tokens in found)
            assert looked_up > 20 or not circles


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_long_pass_leaves_the_bits_of_short_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What experts compute of a prompt longer than 1,024 tokens lies in slots."""
    lent: list[int] = []

    def watched(memory: DeviceExpertMemory, lent_bytes: int) -> PrefillStream:
        lent.append(lent_bytes)
        return PrefillStream(memory, lent_bytes)

    monkeypatch.setattr(device_prompts, "PrefillStream", watched)
    monkeypatch.setattr(planning, "choose_chunk", lambda *plan, **more: 3072)
    config = on_gpu(20 * GIB, context=4096, draft_length=0)
    with Engine.load_shape(shallow(name, 3), config, SyntheticSettings()) as engine:
        store = engine._loaded.store
        keep_slots(engine, store.num_layers * store.num_experts // 2)
        runner, after = runner_of(engine), []
        tokens = np.random.default_rng(1).integers(0, engine.footprint.vocab_size, 3000).tolist()
        for width in (1024, 3000, 1700):
            runner.sequence.truncate(0)
            lent.clear()
            for start in range(0, len(tokens), width):
                runner.run(tokens[start : start + width], "prefill", last_only=True)
            assert [room > 0 for room in lent] == {1024: [0, 0, 0], 3000: [1], 1700: [1, 1]}[width]
            after.append(runner.run([7], "verify", last_only=True).clone())
        assert all(torch.equal(logits, after[0]) for logits in after)


def free_for_an_engine() -> int:
    """Bytes in the driver's view, before there is one."""
    torch._C._cuda_clearCublasWorkspaces()  # of other tests' products in this process
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory_allocated() < 4 << 20, "an engine before this one has not let go of its memory"
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


BUDGETED = (
    "qwen1.5-moe-a2.7b", "olmoe-1b-7b", "qwen3.5-35b-a3b", "lfm2-8b-a1b", "nemotron-3-nano",
    "gemma-4-26b-a4b",
)  # fmt: skip


@pytest.mark.parametrize("gib", [8, 12, 16, 24])
@pytest.mark.parametrize("name", BUDGETED)
def test_a_budget_is_kept_by_the_allocator_and_in_the_drivers_view(name: str, gib: int) -> None:
    free_before = free_for_an_engine()
    started = time.perf_counter()
    try:
        config = on_gpu(gib * GIB, context=min(9000, int(SHAPES[name].dimensions["max_position_embeddings"])))
        engine = Engine.load_shape(name, config, SyntheticSettings())
    except BudgetError as error:
        assert time.perf_counter() - started < 2.0
        assert "at least" in str(error)
        return
    with engine:
        least_free = torch.cuda.mem_get_info()[0]
        longest = min(engine.plan.prefill_chunk, engine.plan.context - 100)
        for request in (*random_prompts(engine, 1, 1100), *random_prompts(engine, 1, longest)):
            for length in (4, 8, 64) if len(request.prompt_token_ids or ()) == 1100 else (0,):
                tokens_of(engine, replace(request, draft_length=length if engine.plan.drafting else 0))
                while engine.captures.ahead():
                    pass
                least_free = min(least_free, torch.cuda.mem_get_info()[0])
        assert torch.cuda.max_memory_reserved() <= gib * GIB
        assert free_before - least_free <= gib * GIB


def test_a_budget_is_kept_by_answers_of_every_kind() -> None:
    """As many graphs as there may be: greedy and penalised, with the CPU and without, over short and longer
    texts, windows of many widths."""
    penalised = SamplingConfig(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=3)
    free_before, gib = free_for_an_engine(), 12
    config = on_gpu(gib * GIB, context=8192, strict=False, draft_length=4)
    accepted = SyntheticSettings(parse_routing("uniform"), 0.9, 0.9)  # else long windows take long
    with Engine.load_shape("qwen1.5-moe-a2.7b", config, accepted) as engine:
        least_free = torch.cuda.mem_get_info()[0]
        for prompt_length in (60, 1100):
            (request,) = random_prompts(engine, 1, prompt_length)
            for sampling in (SamplingConfig(), penalised):
                for strict in (True, False):
                    for length in (1, 8, 64):
                        tokens_of(
                            engine,
                            replace(
                                request, draft_length=length, strict=strict, sampling=sampling,
                                max_new_tokens=12 if length < 64 else 70,
                            ),
                        )  # fmt: skip
                        least_free = min(least_free, torch.cuda.mem_get_info()[0])
        assert len(device_runner_of(engine).issue._graphs) == MAX_GRAPHS
        assert torch.cuda.max_memory_reserved() <= gib * GIB
        assert free_before - least_free <= gib * GIB


def test_the_peak_that_is_told_is_of_the_model_at_hand_and_of_its_budget() -> None:
    peaks = []
    for gib in (6, 4):
        with Engine.load_shape("olmoe-1b-7b", on_gpu(gib * GIB, context=1024), SyntheticSettings()) as engine:
            for budget in (gib * GIB, (gib - 1) * GIB):
                if budget != engine.plan.budget_bytes:
                    engine.resize(budget)
                (request,) = random_prompts(engine, 1, 64)
                *_, last = engine.stream(replace(request, max_new_tokens=4))
                assert last.stats is not None and last.stats.vram_budget_bytes == budget
                assert budget / 2 < last.stats.peak_device_bytes <= budget
                peaks.append(last.stats.peak_device_bytes)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("name", "budgets"),
    [
        ("qwen1.5-moe-a2.7b", (16, 12, 14)), ("gemma-4-26b-a4b", (16, 10, 12)),
        ("glm-4.7-flash", (16, 8, 12)), ("gpt-oss-20b", (10, 6, 8)), ("nemotron-3-nano", (16, 8, 12)),
        ("lfm2-8b-a1b", (10, 6, 8)),
    ],
)  # fmt: skip
def test_a_changed_budget_is_kept_by_prompts_of_many_passes(name: str, budgets: tuple[int, ...]) -> None:
    """Passes are as long as each budget has room for."""
    free_before, longest = free_for_an_engine(), set()
    with Engine.load_shape(name, on_gpu(budgets[2] * GIB, context=8192), SyntheticSettings()) as engine:
        assert torch.cuda.max_memory_reserved() <= budgets[2] * GIB
        for gib in budgets:
            plan = engine.resize(gib * GIB)
            longest.add(plan.prefill_chunk)
            torch.cuda.reset_peak_memory_stats()
            least_free = torch.cuda.mem_get_info()[0]
            for length in (min(plan.prefill_chunk, 8000), 1100, 8000):
                (request,) = random_prompts(engine, 1, length)
                tokens_of(engine, replace(request, draft_length=4 if plan.drafting else 0))
                while engine.captures.ahead():
                    pass
                least_free = min(least_free, torch.cuda.mem_get_info()[0])
            assert torch.cuda.max_memory_reserved() <= gib * GIB
            assert free_before - least_free <= gib * GIB
    assert len(longest) > 1
