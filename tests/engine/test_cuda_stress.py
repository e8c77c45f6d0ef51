"""Steps under a policy that does everything wrong, with tiny caches and delayed copies, against the same
steps with all experts in slots: the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.engines import device_runner_of, load_with_slots, runner_of

from localmoe.core.events import Event, PrefetchRequest, RoomWanted, StepFinished, StepStarted
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.prefill_stream import PrefillStream
from localmoe.model import device_prompts
from localmoe.prefetch.policy import CacheShape, KeepScores, PolicyBase

pytestmark = pytest.mark.gpu
Tiny16 = Callable[[str], Path]
STEPS = 1000


class ChaosPolicy(PolicyBase):
    """Prefetches and evicts at random."""

    name = "chaos"

    def __init__(self, shape: CacheShape, seed: int) -> None:
        super().__init__(shape)
        self._shape = shape
        self._chance = random.Random(seed)
        self._numbers = np.random.default_rng(seed)

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        keys = [
            ExpertKey(
                self._chance.randrange(self._shape.num_layers),
                self._chance.randrange(self._shape.num_experts),
            )
            for _ in range(self._chance.randrange(4))
        ]
        return [PrefetchRequest(key, self._chance.random()) for key in keys]

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        return self._chance.choice(room.candidates) if room.candidates else None

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        scores = self._numbers.random(last_use.shape).astype(np.float32)
        scores[self._numbers.random(last_use.shape) < 0.2] = np.inf
        return KeepScores(scores, per_layer=self._chance.random() < 0.5)


@contextmanager
def delayed_copies(memory: DeviceExpertMemory, seed: int) -> Iterator[list[int]]:
    """Hold the copy stream up before some copies, so that passes meet copies that are still running."""
    transfers, chance, original = memory.transfers, random.Random(seed), memory.transfers.copy_all
    delays: list[int] = []

    def copy(*args: Any) -> int:
        cycles = chance.choice((0, 0, 100_000, 1_000_000))
        delays.append(cycles)
        if cycles:
            with torch.cuda.stream(transfers._stream):  # type: ignore[attr-defined]
                torch.cuda._sleep(cycles)
        return original(*args)

    transfers.copy_all = copy  # type: ignore[method-assign, assignment]
    yield delays


def windows(seed: int) -> Iterator[tuple[list[int], int]]:
    """Windows of random tokens, and how many of each are kept."""
    chance = random.Random(seed)
    while True:
        count = chance.choice((1, 1, 2, 5, 9))
        yield [chance.randrange(10, 250) for _ in range(count)], chance.randrange(count) + 1


def logits_of(engine: Engine, steps: int) -> tuple[torch.Tensor, dict[str, int]]:
    """A digest of the logits of many verify windows in a row, and how their experts were found."""
    runner = runner_of(engine)
    scheduler = runner.passes.scheduler
    digests = []
    for (tokens, kept), step in zip(windows(3), range(steps), strict=False):
        if runner.sequence.length + len(tokens) > 480:
            runner.sequence.truncate(0)
        start = runner.sequence.length
        scheduler.notify(StepStarted(step, len(tokens) - 1))
        for i in range(len(tokens) % 3):  # some drafting, whose routing the policy is told
            runner.run([tokens[i]], "draft", last_only=True)
        runner.sequence.truncate(start)
        logits = runner.run(tokens, "verify", last_only=False)
        digests.append(logits.view(torch.int32).sum(dtype=torch.int64))
        runner.sequence.truncate(start + kept)
        runner.passes.lookahead.clear()
        scheduler.notify(StepFinished(0, 0))
    counters = runner.passes.counters
    return torch.stack(digests).cpu(), {
        "hits": counters.hits,
        "late": counters.late,
        "misses": counters.misses,
    }


@pytest.mark.parametrize("slots", [3, 5, 11])
def test_no_step_computes_with_a_wrong_or_half_copied_expert(slots: int, tiny16: Tiny16) -> None:
    folder = tiny16("qwen2_moe")
    with load_with_slots(folder, 24, device="cuda", dtype="bfloat16", context=512) as engine:
        expected, _ = logits_of(engine, STEPS)
    # without the CPU, which sums in another order
    config = {"device": "cuda", "dtype": "bfloat16", "context": 512, "lanes": "vram+link"}
    with load_with_slots(folder, slots, **config) as engine:
        memory = device_runner_of(engine).passes.memory
        runner_of(engine).passes.scheduler.use(ChaosPolicy(CacheShape(3, 8, 3, slots), seed=slots))
        with delayed_copies(memory, seed=slots) as delays:
            given, found = logits_of(engine, STEPS)
    assert torch.equal(given, expected)
    assert found["misses"] > STEPS and (slots == 3 or found["hits"] > STEPS)
    assert len(delays) > STEPS // 4 and found["late"] > 0, "copies were under way during passes"


@pytest.mark.parametrize("slots", [9, 12, 20])
def test_no_prompt_computes_with_a_wrong_or_half_copied_expert(
    slots: int, tiny16: Tiny16, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where slots are lent to what experts compute, too."""
    monkeypatch.setattr(device_prompts, "DEVICE_PREFILL_CHUNK", 32)
    chance = random.Random(slots)
    prompts = [[chance.randrange(10, 250) for _ in range(chance.randrange(73, 99))] for _ in range(80)]

    def after_each(engine: Engine) -> list[torch.Tensor]:
        runner, found = runner_of(engine), []
        for prompt in prompts:
            runner.sequence.truncate(0)
            runner.run(prompt, "prefill", last_only=True)
            found.append(runner.run([7], "verify", last_only=True).clone())
        return found

    folder = tiny16("qwen2_moe")
    config = {"device": "cuda", "dtype": "bfloat16", "context": 512, "lanes": "vram+link"}
    with load_with_slots(folder, 24, **config) as engine:
        expected = after_each(engine)
    lent: list[int] = []

    def watched(memory: DeviceExpertMemory, lent_bytes: int) -> PrefillStream:
        lent.append(lent_bytes // memory.slots.slot_bytes)
        return PrefillStream(memory, lent_bytes)

    with load_with_slots(folder, slots, **config) as engine:
        monkeypatch.setattr(device_prompts, "PrefillStream", watched)
        with delayed_copies(device_runner_of(engine).passes.memory, seed=slots) as delays:
            given = after_each(engine)
    assert all(torch.equal(*pair) for pair in zip(given, expected, strict=True))
    assert len(delays) > len(prompts) and min(lent) > 0
