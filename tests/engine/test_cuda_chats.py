"""Chats on a real GPU as people lead them: on, back, anew, broken off, with other settings each time. Every
answer has the tokens, and leaves the cache, bit for bit, of an engine that never saw the chat and drafts
nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.engines import Answer, ask, runner_of
from torch import Tensor

from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.errors import BudgetError
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.core.types import Message
from localmoe.engine import Engine

pytestmark = pytest.mark.gpu
MIB = 1 << 20
TURNS = 40


def on_gpu(budget: int | None = None) -> EngineConfig:
    return EngineConfig(device="cuda", strict=True, dtype="bfloat16", context=1024, vram_budget_bytes=budget)


def left_in_cache(engine: Engine, tokens: int) -> list[Tensor]:
    """Keys and values of each layer, (1, heads, tokens, dim)."""
    sequence = runner_of(engine).sequence
    assert sequence.length == tokens
    return [part[:, :, :tokens] for layer in sequence.layers for part in (layer.keys, layer.values)]


@dataclass
class Chat:
    """One that is led at random."""

    chance: random.Random
    questions: list[str]
    messages: list[Message] = field(default_factory=list)

    def go_on(self) -> None:
        """Another question at the end or further up, or the last one again."""
        if not self.messages or self.chance.random() < 0.5:
            if len(self.messages) > 4:  # the context has room for no more
                self.messages.clear()
        elif self.chance.random() < 0.5:
            del self.messages[2 * self.chance.randrange(len(self.messages) // 2) :]
        else:
            question = self.messages[-2]
            del self.messages[-2:]
            self.messages.append(question)
            return
        self.messages.append(Message("user", self.chance.choice(self.questions)))

    def settings(self) -> dict[str, Any]:
        """Of an answer; how it is chosen, and what must not matter."""
        chance = self.chance
        sampling = chance.choice(
            [
                SamplingConfig(),
                SamplingConfig(repetition_penalty=1.2),
                SamplingConfig(temperature=1.0, seed=chance.randrange(99)),
                SamplingConfig(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=chance.randrange(99)),
            ]
        )
        return {"sampling": sampling, "num_tokens": chance.choice([1, 2, 9, 40])}


def break_off(engine: Engine, chat: Chat, **how: Any) -> None:
    """Ask, and leave after a few events."""
    request = GenerationRequest(messages=tuple(chat.messages), max_new_tokens=40, **how)
    stream: Any = engine.stream(request)
    for _ in zip(range(chat.chance.randrange(6)), stream, strict=False):
        pass
    stream.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_chat_has_the_answers_of_an_engine_that_never_saw_it(seed: int) -> None:
    chance = random.Random(seed)
    chat = Chat(chance, [prompt.text for prompt in read_prompts(BUNDLED_PROMPTS, 20)])
    reused = 0
    with Engine.load("demo", on_gpu(190 * MIB)) as engine, Engine.load("demo", on_gpu()) as fresh:
        for _ in range(TURNS):
            chat.go_on()
            how = {
                "draft_length": chance.choice([0, 1, 4, 8, 16, "auto", "auto"]),
                "policy": chance.choice(["on-demand", "moe-speq", "sp-moe", "next-gate"]),
            }
            if chance.random() < 0.15:
                try:
                    engine.resize(chance.choice([170, 180, 190, 220]) * MIB)
                except BudgetError:
                    assert engine.plan.num_slots > 0
            if chance.random() < 0.2:
                break_off(engine, chat, **how)
            if chance.random() < 0.1:
                ask(engine, chat.messages, 12, draft_only=True)
            settings = chat.settings()
            given: Answer = ask(engine, chat.messages, **settings, **how)
            fresh.reset()
            expected = ask(fresh, chat.messages, **settings, draft_length=0, policy="on-demand")
            assert given.tokens == expected.tokens, (settings, how)
            tokens = len(given.prompt) + len(given.tokens) - 1
            pairs = zip(left_in_cache(engine, tokens), left_in_cache(fresh, tokens), strict=True)
            assert all(torch.equal(left, right) for left, right in pairs), (settings, how)
            reused += given.stats.reused_tokens
            chat.messages.append(Message("assistant", given.text))
    assert reused > 0
