"""Chats on a real GPU as people lead them: on, back, anew, broken off, in turn with another one, held to a
grammar, with other settings each time. Every answer has the tokens, and leaves the cache, bit for bit, of an
engine that never saw the chat and drafts nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_more_architectures import ANSWERING
from support.engines import Answer, ask, budget_for_slots, device_runner_of, runner_of
from support.tiny_models import SLIDING_WINDOW, tiny_model, write_model
from torch import Tensor

from localmoe.chat import prompt_cache
from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.errors import BudgetError
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.hardware import needs
from localmoe.model import device_prompts
from localmoe.model.device_cache import DeviceKVLayer
from localmoe.speculative.sampling import TokenSampler

pytestmark = pytest.mark.gpu
MIB = 1 << 20
TURNS = 40


@pytest.fixture(autouse=True)
def chats_are_left_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "LEAST_TOKENS", 8)


def on_gpu(budget: int | None = None) -> EngineConfig:
    return EngineConfig(device="cuda", strict=True, dtype="bfloat16", context=1024, vram_budget_bytes=budget)


def left_in_cache(engine: Engine, tokens: int, windows: dict[int, int]) -> list[Tensor]:
    """Keys and values of each layer, (1, heads, tokens, dim); in layers that see a window, of that alone."""
    sequence = device_runner_of(engine).sequence
    assert sequence.length == tokens
    found = []
    for index, layer in enumerate(sequence.layers):
        assert isinstance(layer, DeviceKVLayer)
        if layer.keys is None:  # linear attention has none
            continue
        seen = torch.arange(max(0, tokens - windows.get(index, tokens) + 1), tokens) % layer.capacity
        found += [part[:, :, seen.to(part.device)] for part in (layer.keys, layer.values)]
    return found


@dataclass
class Chat:
    """One that is led at random."""

    chance: random.Random
    questions: list[str]
    lengths: tuple[int, ...] = (1, 2, 9, 40)  # tokens of an answer
    messages: list[Message] = field(default_factory=list)
    other: list[Message] = field(default_factory=list)  # of another chat

    def go_on(self) -> None:
        """Another question at the end or further up, or the last one again, in this chat or in the other."""
        if self.chance.random() < 0.3:
            self.messages, self.other = self.other, self.messages
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
        return {"sampling": sampling, "num_tokens": chance.choice(self.lengths)}


class NoThirds:
    """A grammar: no token is, with the one before it, a multiple of three; sevenths force two more."""

    def follows(self, last: int) -> int | None:
        if last % 7 == 0:
            return 8 if (last + 8) % 3 else 9
        return {8: 11, 9: 10}.get(last)

    def allowed(self, text: Sequence[int], count: int) -> Tensor:
        token = self.follows(text[-1])
        if token is not None:
            return torch.arange(count) == token
        return (torch.arange(count) + text[-1]) % 3 != 0

    def valid(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        pairs = zip([text[-1], *tokens], tokens, strict=False)
        return next((i for i, pair in enumerate(pairs) if not self.goes(*pair)), len(tokens))

    def goes(self, last: int, token: int) -> bool:
        return self.follows(last) in (None, token) and (last + token) % 3 != 0

    def free(self, text: Sequence[int]) -> bool:
        return False

    def forced(self, text: Sequence[int]) -> list[int]:
        tokens, token = [], self.follows(text[-1])
        while token is not None:
            tokens.append(token)
            token = self.follows(token)
        return tokens


@contextmanager
def held_to_a_grammar(*engines: Engine) -> Iterator[None]:
    """Their answers meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for engine in engines:
            sampler = lambda request, prompt: TokenSampler(request.sampling, NoThirds())  # noqa: E731
            patch.setattr(engine._sampling, "sampler", sampler)
        yield


def break_off(engine: Engine, chat: Chat, **how: Any) -> None:
    """Ask, and leave after a few events."""
    request = GenerationRequest(messages=tuple(chat.messages), max_new_tokens=40, **how)
    stream: Any = engine.stream(request)
    for _ in zip(range(chat.chance.randrange(6)), stream, strict=False):
        pass
    stream.close()


def model_to_ask(name: str, folder: Path, chance: random.Random) -> tuple[str, list[str], list[int]]:
    """Its folder, what it can be asked, and budgets in which not all of its experts have room."""
    if name == "demo":
        questions = [prompt.text for prompt in read_prompts(BUNDLED_PROMPTS, 20)]
        return name, questions, [size * MIB for size in (234, 244, 254, 284)]
    changes = {**ANSWERING.get(name, {}), "max_position_embeddings": 2048}
    model = tiny_model(name, dtype=torch.bfloat16, **changes)
    path = str(write_model(folder / name, model))
    questions = ["".join(chance.choices("abc xyz", k=size)) for size in (3, 9, 20, 40, 70, 130)]
    config = {"device": "cuda", "dtype": "bfloat16", "context": 1024, "strict": True}
    return path, questions, [budget_for_slots(path, slots, **config) for slots in (4, 7, 12, 20)]


@pytest.mark.parametrize(
    ("name", "seed"), [*(("demo", seed) for seed in range(4)), ("qwen3_next", 4), ("qwen3_5_moe_text", 5)]
)
def test_a_chat_has_the_answers_of_an_engine_that_never_saw_it(name: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    model, questions, budgets = model_to_ask(name, tmp_path, chance)
    with Engine.load(model, on_gpu(budgets[2])) as engine, Engine.load(model, on_gpu()) as fresh:
        lead(Chat(chance, questions), engine, fresh, budgets)


@pytest.mark.parametrize(("name", "seed"), [("gpt_oss", 6), ("gpt_oss", 7), ("gemma4_text", 8)])
def test_a_chat_in_rings_has_the_answers_of_an_engine_that_keeps_all(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings hold a window, a short prompt's pass and what goes ahead; many answers are longer than that."""
    chance = random.Random(seed)
    model, questions, budgets = model_to_ask(name, tmp_path, chance)
    monkeypatch.setattr(device_prompts, "chunk_for", lambda *room: 128)
    with Engine.load(model, on_gpu()) as fresh:
        monkeypatch.setattr(needs, "ring_positions", lambda window: 384)
        with Engine.load(model, on_gpu(budgets[2])) as engine:
            used, of_all = (runner_of(part).sequence.num_bytes for part in (engine, fresh))
            assert used < of_all
            lead(Chat(chance, questions, lengths=(1, 9, 40, 250, 350)), engine, fresh, budgets)


def lead(chat: Chat, engine: Engine, fresh: Engine, budgets: list[int]) -> None:
    """Lead a chat with the one, and ask the other the same each time, as if there had been nothing before."""
    chance, reused = chat.chance, 0
    layers = enumerate(device_runner_of(engine).sequence.layers)
    windows = {index: SLIDING_WINDOW for index, layer in layers if getattr(layer, "ring", False)}
    for _ in range(TURNS):
        chat.go_on()
        how: dict[str, Any] = {
            "draft_length": chance.choice([0, 1, 4, 8, 16, "auto", "auto"]),
            "policy": chance.choice(["on-demand", "moe-speq", "sp-moe", "next-gate"]),
        }
        if chance.random() < 0.15:
            try:
                engine.resize(chance.choice(budgets))
            except BudgetError:
                assert engine.plan.num_slots > 0
        if chance.random() < 0.2:
            break_off(engine, chat, **how)
        if chance.random() < 0.1:
            ask(engine, chat.messages, 12, draft_only=True)
        settings = chat.settings()
        held = held_to_a_grammar(engine, fresh) if chance.random() < 0.25 else nullcontext()
        fresh.reset()
        if chance.random() < 0.3:  # in the pause before the next one
            while engine.captures.ahead(chance.choice([None, settings["sampling"]])):
                pass
        with held:
            given: Answer = ask(engine, chat.messages, **settings, **how)
            expected = ask(fresh, chat.messages, **settings, draft_length=0, policy="on-demand")
        assert given.tokens == expected.tokens, (settings, how)
        tokens = len(given.prompt) + len(given.tokens) - 1
        pairs = zip(
            left_in_cache(engine, tokens, windows), left_in_cache(fresh, tokens, windows), strict=True
        )
        assert all(torch.equal(left, right) for left, right in pairs), (settings, how)
        reused += given.stats.reused_tokens
        chat.messages.append(Message("assistant", given.text))
    assert reused > 0
