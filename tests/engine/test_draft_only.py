"""Answers by the draft alone: what a chain of its own choices gives, and no trace of it in exact answers."""

from __future__ import annotations

import pytest
import torch
from support.engines import ROOMY, ask, runner_of

from localmoe.core.config import EngineConfig
from localmoe.core.errors import DraftError
from localmoe.core.types import Message
from localmoe.engine import Engine

QUESTION = [Message("user", "What is the capital of France?")]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> object:
    with Engine.load("demo", EngineConfig(device=request.param, strict=True, context=512)) as loaded:
        yield loaded


def test_the_tokens_are_the_draft_s_own_choices(engine: Engine) -> None:
    answer = ask(engine, QUESTION, 24, draft_only=True)
    stats = answer.stats
    assert stats.approximate and (stats.drafted, stats.acceptance_rate, stats.verify_s) == (0, None, 0.0)
    runner = runner_of(engine)
    with torch.inference_mode():
        runner.sequence.truncate(0)
        logits = runner.run(answer.prompt, "prefill", last_only=True)
        expected = []
        for _ in answer.tokens:
            expected.append(int(logits[0].argmax()))
            runner.begin_draft_token(0)
            logits = runner.run([expected[-1]], "draft", last_only=True)
    engine.reset()
    assert answer.tokens == expected and len(expected) > 8


def test_an_exact_answer_builds_on_nothing_that_the_draft_wrote(engine: Engine) -> None:
    engine.reset()
    wanted = ask(engine, QUESTION, 24).tokens
    engine.reset()
    answer = ask(engine, QUESTION, 24, draft_only=True)
    longer = [*QUESTION, Message("assistant", answer.text), Message("user", "And of Italy?")]
    follow_up = ask(engine, longer, 24)
    assert follow_up.stats.reused_tokens <= len(answer.prompt) and not follow_up.stats.approximate
    engine.reset()
    assert follow_up.tokens == ask(engine, longer, 24).tokens
    engine.reset()
    assert ask(engine, QUESTION, 24).tokens == wanted


def test_without_a_draft_it_is_refused() -> None:
    config = EngineConfig(device="cpu", vram_budget_bytes=ROOMY, draft_length=0)
    with Engine.load("demo", config) as plain, pytest.raises(DraftError, match="cannot answer alone"):
        ask(plain, QUESTION, 8, draft_only=True)
