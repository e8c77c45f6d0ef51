"""A chat's next turn runs only what is new, and answers as an engine does that has never seen the chat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import ask, check_stats, load_with_slots
from support.tiny_models import reference_greedy, tiny_model, write_model
from support.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE

from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError
from localmoe.core.types import Message
from localmoe.engine import Engine

Tiny = Callable[[str], tuple[Path, Any]]
Engines = Callable[[str], Engine]
ARCHITECTURES = ("qwen2_moe", "deepseek_v2", "gpt_oss")
NUM_TOKENS = 10


def grow(engine: Engine, questions: list[str], draft_length: int) -> list[Message]:
    """A chat in which every question was asked and answered."""
    messages: list[Message] = []
    held: list[int] = []
    for question in questions:
        messages.append(Message("user", question))
        answer = ask(engine, messages, NUM_TOKENS, draft_length=draft_length)
        assert min(answer.tokens) >= len(SPECIAL_TOKENS), "choose a question whose answer is plain text"
        if held:
            assert answer.stats.reused_tokens == len(held) - 1, "all that was there, but the last token"
            assert answer.prompt[: len(held)] == held
        check_stats(answer)
        held = answer.prompt + answer.tokens
        messages.append(Message("assistant", answer.text))
    return messages


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("draft_length", [0, 4])
def test_every_turn_of_a_chat_reuses_all_that_was_there_and_answers_as_a_fresh_engine(
    architecture: str, draft_length: int, tiny: Tiny, tiny_engine: Engines
) -> None:
    chat = grow(tiny_engine(architecture), ["tell me", "go on and on", "why, and then?"], draft_length)
    with load_with_slots(tiny(architecture)[0], 6, draft_length=0) as fresh:
        for turn in (1, 3, 5):
            fresh.reset()
            answer = ask(fresh, chat[:turn], NUM_TOKENS)
            assert answer.stats.reused_tokens == 0
            assert answer.text == chat[turn].content


def test_editing_an_earlier_message_reuses_the_common_prefix_alone(tiny: Tiny, tiny_engine: Engines) -> None:
    engine = tiny_engine("qwen2_moe")
    chat = grow(engine, ["tell me a tale", "go on"], draft_length=4)
    edited = [Message("user", "tell me a joke"), *chat[1:3]]
    answer = ask(engine, edited, NUM_TOKENS)
    assert answer.stats.reused_tokens == len("sutell me a ")  # <s> and <user> are one token each
    with load_with_slots(tiny("qwen2_moe")[0], 24, draft_length=0) as fresh:
        assert ask(fresh, edited, NUM_TOKENS).tokens == answer.tokens


def test_what_a_padded_vocabulary_let_the_model_write_can_be_read_again(tmp_path: Path) -> None:
    """Rows behind the tokenizer's words have logits like others."""
    model = tiny_model("qwen2_moe", vocab_size=VOCAB_SIZE + 8)
    with torch.no_grad():
        model.lm_head.weight[:VOCAB_SIZE] *= 0.1  # so that the others are chosen
    with load_with_slots(write_model(tmp_path / "padded", model), 24) as engine:
        for draft_length in (0, 4):
            answer = ask(engine, "tell me", NUM_TOKENS, draft_length=draft_length)
            assert max(answer.tokens) >= VOCAB_SIZE
            read = (*answer.prompt, *answer.tokens)
            events = list(engine.stream(GenerationRequest(prompt_token_ids=read, max_new_tokens=4)))
            assert [t for e in events for t in e.token_ids] == reference_greedy(model, list(read), 4)
            with pytest.raises(ConfigError, match=f"0 to {VOCAB_SIZE + 7}"):
                next(iter(engine.stream(GenerationRequest(prompt_token_ids=(VOCAB_SIZE + 8,)))))


def test_asking_the_same_again_runs_the_last_prompt_token_alone(tiny_engine: Engines) -> None:
    engine = tiny_engine("qwen2_moe")
    first = ask(engine, [Message("user", "the same")], NUM_TOKENS, draft_length=4)
    again = ask(engine, [Message("user", "the same")], NUM_TOKENS, draft_length=0)
    assert again.tokens == first.tokens
    assert again.stats.reused_tokens == len(first.prompt) - 1


def test_two_chats_in_turns_do_not_leak_into_each_other(tiny_engine: Engines) -> None:
    engine = tiny_engine("qwen2_moe")
    alone = {}
    for name in ("first chat", "other chat"):
        engine.reset()
        alone[name] = ask(engine, [Message("user", name)], NUM_TOKENS).tokens
    for name in ("first chat", "other chat", "first chat"):
        assert ask(engine, [Message("user", name)], NUM_TOKENS).tokens == alone[name]
