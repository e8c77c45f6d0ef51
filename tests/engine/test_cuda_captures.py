"""Passes captured ahead on a real GPU: answers wait for none of them, and say what they would have said."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from typing import Literal

import pytest
import torch
from support.engines import device_runner_of, keep_slots, runner_of
from support.shapes import random_prompts, shallow

from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.errors import BudgetError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.engine import Engine
from localmoe.kernels.gpu.routed_experts import routed_experts
from localmoe.model import device_experts

pytestmark = pytest.mark.gpu
GIB = 1 << 30
SAMPLINGS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_p=0.9, seed=4),
    SamplingConfig(temperature=0.8, repetition_penalty=1.1, seed=4),
)


def tokens_of(engine: Engine, request: GenerationRequest) -> list[int]:
    return [token for event in engine.stream(request) for token in event.token_ids]


def load(name: str, slots_gib: int = 20, *, strict: bool = True, length: int | Literal["auto"] = 4) -> Engine:
    config = EngineConfig(
        device="cuda", vram_budget_bytes=slots_gib * GIB, context=2048, strict=strict, draft_length=length,
        drafter="auto" if length == "auto" else "self",
    )  # fmt: skip
    return Engine.load_shape(shallow(name, 3), config, SyntheticSettings())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["qwen1.5-moe-a2.7b", "gpt-oss-20b", "qwen3.5-35b-a3b", "gemma-4-26b-a4b"])
def test_answers_wait_for_no_pass_that_was_captured_ahead_and_say_the_same(name: str, strict: bool) -> None:
    with load(name, strict=strict) as plain, load(name, strict=strict) as engine:
        keep_slots(engine, 40)  # never all experts: passes that miss none are of other kinds
        runner = device_runner_of(engine)
        for sampling in SAMPLINGS:
            captured = 0
            while engine.captures.ahead(sampling):
                captured += 1
            assert captured >= 11 and runner.capture_s == 0.0
            # a short prompt's pass is captured too; the second one goes on from the first
            for request in random_prompts(engine, 2, 30):
                for length in (4, 1, 0):
                    asked = replace(request, sampling=sampling, draft_length=length, max_new_tokens=24)
                    tokens = tokens_of(engine, asked)
                    if strict:
                        assert tokens == tokens_of(plain, asked)
            assert runner.capture_s == 0.0
        assert not strict or runner_of(plain).capture_s > 0


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "glm-4.7-flash"])
def test_so_do_those_of_a_models_own_mtp_layer(name: str, strict: bool) -> None:
    with (
        load(name, strict=strict, length="auto") as plain,
        load(name, strict=strict, length="auto") as engine,
    ):
        assert engine.info().drafter == plain.info().drafter == "mtp"
        keep_slots(engine, 40)
        runner = device_runner_of(engine)
        for sampling in SAMPLINGS:
            while engine.captures.ahead(sampling):
                pass
            assert runner.capture_s == 0.0
            for request in random_prompts(engine, 2, 30):
                for length in ("auto", 2, 1, 0):
                    asked = replace(request, sampling=sampling, draft_length=length, max_new_tokens=24)
                    tokens = tokens_of(engine, asked)
                    if strict:
                        assert tokens == tokens_of(plain, asked), length
                    assert runner.capture_s == 0.0, length
        assert not strict or runner_of(plain).capture_s > 0


def test_a_text_that_grows_finds_its_passes_captured() -> None:
    with load("qwen1.5-moe-a2.7b", 3) as engine:
        runner = runner_of(engine)
        (request,) = random_prompts(engine, 1, 900)
        asked = replace(request, draft_length=4, max_new_tokens=40)
        tokens_of(engine, asked)
        while engine.captures.ahead():
            pass
        waited = runner.capture_s
        given = tokens_of(engine, replace(asked, max_new_tokens=300))
        assert len(given) == 300 and runner.sequence.length > 1024
        assert runner.capture_s == waited


def test_answers_that_come_while_passes_are_captured_are_not_refused_and_right() -> None:
    """In a thread, as an app has it done; memory is divided anew meanwhile, and the engine closed."""
    with load("qwen1.5-moe-a2.7b") as plain:
        questions = [
            replace(request, sampling=SAMPLINGS[number % 3], draft_length=4, max_new_tokens=20)
            for number, request in enumerate(random_prompts(plain, 8, 40))
        ]
        expected = [tokens_of(plain, question) for question in questions]
    began_beside = 0
    with load("qwen1.5-moe-a2.7b") as engine:
        for number, question in enumerate(questions):
            engine.captures.begin(SAMPLINGS[(number + number // 3) % 3])
            time.sleep(0.03 * number)
            began_beside += engine.captures._runs
            assert tokens_of(engine, question) == expected[number]
            engine.captures.begin()
            if number == 3:
                engine.resize(19 * GIB)
            if number == 4:
                engine.reset()
        engine.captures.begin(SAMPLINGS[1])
    assert began_beside > 0
    deadline = time.monotonic() + 10
    while engine.captures._runs:
        assert time.monotonic() < deadline, "the thread goes on"
        time.sleep(0.01)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 64 << 20


def test_what_other_threads_ask_of_the_driver_meanwhile_is_answered() -> None:
    over, failures = threading.Event(), []

    def ask_on() -> None:
        try:
            while not over.is_set():
                torch.cuda.mem_get_info()
                torch.empty(1 << 16, pin_memory=True).to("cuda", non_blocking=True).sum().item()
                torch.empty(32 << 20, device="cuda")
        except RuntimeError as error:
            failures.append(error)

    with load("qwen1.5-moe-a2.7b") as engine:
        thread = threading.Thread(target=ask_on)
        thread.start()
        captured = 0
        while engine.captures.ahead(SAMPLINGS[1]):
            captured += 1
        over.set()
        thread.join()
        assert captured >= 11 and not failures
        (request,) = random_prompts(engine, 1, 30)
        assert len(tokens_of(engine, replace(request, draft_length=4, max_new_tokens=20))) == 20


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_capture_that_fails_says_why_and_leaves_nothing(
    ahead: bool, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between shared experts, which run beside, and where they are waited for."""
    out_of_memory = torch.OutOfMemoryError if ahead else BudgetError
    expected: type[BaseException] = KeyboardInterrupt if interrupted else out_of_memory
    failed: list[bool] = []
    plainly = routed_experts

    def failing(*given: object, **more: object) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and len(failed) < 3:
            failed.append(True)
            if not interrupted:
                raise torch.OutOfMemoryError("no room for a branch")
            signal.raise_signal(signal.SIGINT)
        return plainly(*given, **more)  # type: ignore[arg-type]

    with load("qwen1.5-moe-a2.7b") as engine:
        keep_slots(engine, 40)
        (request,) = random_prompts(engine, 1, 30)
        asked = replace(request, draft_length=4, max_new_tokens=40)
        answer = tokens_of(engine, asked)
        engine.resize(19 * GIB)  # forgets what was captured
        keep_slots(engine, 40)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        monkeypatch.setattr(device_experts, "routed_experts", failing)
        while (before := len(failed)) < 3:
            try:
                if ahead:
                    assert engine.captures.ahead()  # a draft's pass has no such experts
                else:
                    tokens_of(engine, asked)
            except expected:
                assert len(failed) > before
            else:
                assert ahead and len(failed) == before
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= reserved + (32 << 20)
        assert tokens_of(engine, asked) == answer
        while engine.captures.ahead():
            pass
        assert tokens_of(engine, asked) == answer


def test_slots_are_full_before_the_first_answer_and_it_says_the_same() -> None:
    with load("qwen1.5-moe-a2.7b") as engine:
        keep_slots(engine, 60)
        (request,) = random_prompts(engine, 1, 30)
        asked = replace(request, draft_length=0, max_new_tokens=24)
        answer = tokens_of(engine, asked)
        engine.reset()
        assert not device_runner_of(engine).passes.memory.residency().any()
        while engine.captures.ahead():
            pass
        memory = device_runner_of(engine).passes.memory
        assert memory.residency().sum() == 60 and memory.held().tolist() == [20, 20, 20]
        events = list(engine.stream(asked))
        assert [token for event in events for token in event.token_ids] == answer
        assert events[-1].stats.hits > 0 and events[-1].stats.prefetched == 0
