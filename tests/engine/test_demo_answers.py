"""The embedded model, a trained one with a real tokenizer and chat template, answers as transformers does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers
from support.engines import ask, check_stats, load_with_slots
from support.tiny_models import reference_greedy

from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.hub.catalogue import demo_folder

FABLE = "tell me a story about a fox"
QUESTION = "Sam has 3 apples and buys 4 more. Then he eats 2 of them. How many apples does he have now?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_with_slots("demo", 32) as loaded:
        yield loaded


def test_greedy_answers_of_the_embedded_model_are_those_of_transformers(engine: Engine) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder(), dtype="float32").eval()
    ends = sorted(engine._end_tokens)
    for prompt in (QUESTION, FABLE, "hello"):
        answer = ask(engine, [Message("user", prompt)], 32, draft_length=4)
        assert answer.tokens == reference_greedy(model, answer.prompt, 32, eos_token_id=ends)
        check_stats(answer)


@pytest.mark.slow
def test_bfloat16_answers_are_the_same_with_and_without_drafts() -> None:
    with load_with_slots("demo", 32, dtype="bfloat16") as engine:
        assert engine.info().exactness.startswith("exact")
        assert engine.info().passes == "layer by layer through the host (there is no GPU)"
        for prompt in (QUESTION, FABLE):
            answers = [ask(engine, [Message("user", prompt)], 20, draft_length=n) for n in (0, 3, 8, "auto")]
            assert all(answer.tokens == answers[0].tokens for answer in answers)


def test_a_chat_with_the_embedded_model_reuses_what_it_has_read(engine: Engine) -> None:
    chat = [Message("user", FABLE)]
    first = ask(engine, chat, 24, draft_length=4)
    assert first.text.strip() and "\N{REPLACEMENT CHARACTER}" not in first.text
    chat += [Message("assistant", first.text), Message("user", "and then?")]
    second = ask(engine, chat, 24, draft_length=4)
    assert len(first.prompt) < second.stats.reused_tokens <= len(first.prompt) + len(first.tokens)
    engine.reset()
    assert ask(engine, chat, 24, draft_length=0).tokens == second.tokens
