"""What verify passes compute on a real GPU: every row's bits are those of the pass that an answer without
drafts runs at that place. Tokens alone would show a wrong row in one case of a hundred."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from support.engines import Answer, ask, keep_slots, runner_of
from support.shapes import ask_ids, random_prompts, shallow
from torch import Tensor

from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import Message
from localmoe.engine import Engine, device_support
from localmoe.model.device_runner import DeviceRunner, PendingWindow
from localmoe.model.runner import ModelRunner
from localmoe.model.shapes import SHAPES

pytestmark = pytest.mark.gpu
CONFIG = EngineConfig(device="cuda", strict=True, dtype="bfloat16", context=1024)


@dataclass
class Window:
    """A verify pass that ran: its place, the tokens that it read, and its logits, copied in stream order."""

    start: int
    tokens: Tensor
    logits: Tensor


@contextmanager
def watched(engine: Engine) -> Iterator[list[Window]]:
    runner: object = runner_of(engine)
    assert isinstance(runner, DeviceRunner), "steps run whole on the GPU"
    windows: list[Window] = []
    issue = runner.issue_window

    def issue_window(count: int, start: int, **how: Any) -> PendingWindow:
        pending = issue(count, start, **how)
        read = runner.passes.window.tokens[:count].clone()
        windows.append(Window(start, read, pending.output.logits[:count].clone()))
        return pending

    runner.issue_window = issue_window  # type: ignore[method-assign]
    try:
        yield windows
    finally:
        del runner.issue_window


def random_ids(vocab: int, count: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_rows(
    engine: Engine, ask: Callable[..., Answer], lengths: Sequence[int | str], chance: random.Random
) -> int:
    """Ask for one answer without drafts, and with drafts of these lengths; how many experts those missed."""
    misses = 0
    with watched(engine) as windows:
        engine.reset()
        plain = ask(draft_length=0)
        first = len(plain.prompt)
        said = dict(enumerate(plain.tokens[:-1], start=first))  # the last one is in no pass
        alone = {window.start: window.logits[0] for window in windows if window.start in said}
        for length in lengths:
            if not misses or chance.random() < 0.6:
                engine.reset()  # slots fill while it answers
            windows.clear()
            policy = chance.choice(["on-demand", "moe-speq"])
            answer = ask(draft_length=length, policy=policy)
            assert answer.tokens == plain.tokens
            misses += answer.stats.misses
            right = set()
            for window in windows:
                for place, token in enumerate(window.tokens.tolist(), start=window.start):
                    if said.get(place) != token:
                        break
                    row = window.logits[place - window.start]
                    assert torch.equal(row, alone[place]), (policy, length, place)
                    right.add(place)
            assert right == set(said)
    return misses


@pytest.mark.parametrize("slots", [12, 60, None])
def test_every_row_of_a_verify_pass_has_the_bits_of_a_pass_of_its_own(slots: int | None) -> None:
    chance = random.Random(slots)
    with Engine.load("demo", CONFIG) as engine:
        if slots is not None:
            keep_slots(engine, slots)
        misses = 0
        for seed, prompt in enumerate(read_prompts(BUNDLED_PROMPTS, 8)):
            sampling = SamplingConfig(temperature=0.9, top_p=0.9, seed=seed)
            one = partial(ask, engine, [Message("user", prompt.text)], 40, sampling=sampling)
            misses += check_rows(engine, one, ("auto", "auto", 1, 4, 8, 16), chance)
        assert misses > 0 or slots is None  # all are there from the first prompt on


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_so_it_is_for_models_of_real_shapes(name: str) -> None:
    chance, misses = random.Random(name), 0
    for slots in (9, 40):
        config = replace(CONFIG, draft_length=4)  # also where no draft would be loaded
        with Engine.load_shape(shallow(name, 3), config, SyntheticSettings()) as engine:
            keep_slots(engine, slots)
            for seed, request in enumerate(random_prompts(engine, 3, 20)):
                sampling = SamplingConfig(temperature=0.9, seed=seed)
                assert request.prompt_token_ids is not None
                one = partial(ask_ids, engine, request.prompt_token_ids, 24, sampling=sampling)
                misses += check_rows(engine, one, ("auto", 1, 3, 5, 8, 16), chance)
        torch.cuda.empty_cache()
    assert misses > 0  # a head that is the embedding says the same again, whose experts forty slots hold


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite", "phi-3.5-moe"])
def test_so_it_is_where_there_are_no_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are PyTorch's there, whose rows depend on how many there are, unless these are padded."""
    monkeypatch.setattr(device_support, "why_no_kernels", lambda: "Triton is not installed")
    text = random_ids(1000, 84, seed=len(name))
    with Engine.load_shape(shallow(name, 2), replace(CONFIG, draft_length=0), SyntheticSettings()) as engine:
        keep_slots(engine, 24)
        runner, padding = runner_of(engine), engine._loaded.row_padding
        assert isinstance(runner, ModelRunner) and padding is not None

        def logits(width: int) -> Tensor:
            """(64, V), of passes of so many tokens."""
            runner.sequence.truncate(0)
            runner.run(text[:20], "prefill", last_only=True)
            places = range(20, 84, width)
            return torch.cat([
                runner.run(text[at : at + width], "verify", last_only=False).clone() for at in places
            ])  # fmt: skip

        alone = logits(1)
        for width in (2, 3, 5, 8, 9, 16):
            assert torch.equal(logits(width), alone), (padding, width)
