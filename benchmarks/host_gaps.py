"""What the GPU waits for the host: from a verify pass to the next step's first draft pass, from the last
draft's report to the verify pass (where a gate ends the drafts), and what starting copies takes the host.
Needs a GPU.

python benchmarks/host_gaps.py [--shape qwen1.5-moe-a2.7b] [--budget 16] [--routing sticky:0.5] [--tokens 192]

Weights, routing and acceptance are synthetic, prompts are random tokens; part of the time is the
simulation's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from localmoe.core.config import DraftLength, EngineConfig, GenerationRequest
from localmoe.core.stats import GenerationStats
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.model.device_clock import Landing
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.device_step import Step
from localmoe.model.device_step_passes import StepPasses
from localmoe.model.step_graphs import StepGraphs

Marks = list[tuple[str, float]]
WATCHED: tuple[tuple[type, str], ...] = (
    (Landing, "wait"),
    (DeviceRunner, "issue_window"),
    (StepGraphs, "run"),
)
COPIES = (1, 8, 26)


@contextmanager
def watched() -> Iterator[Marks]:
    """When each of these calls began (">" behind its name) and ended."""
    marks: Marks = []

    def watch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            marks.append((f"{name}>", time.perf_counter()))
            found = original(*args, **kwargs)
            marks.append((name, time.perf_counter()))
            return found

        return run

    originals = [(owner, name, getattr(owner, name)) for owner, name in WATCHED]
    for owner, name, original in originals:
        setattr(owner, name, watch(name, original))
    try:
        yield marks
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def steps_made() -> Iterator[list[Step]]:
    """Those that are begun inside, in order."""
    made: list[Step] = []
    owner: Any = StepPasses
    original = owner.new

    def new(*args: Any) -> Step:
        made.append(original(*args))
        return made[-1]

    owner.new = new
    try:
        yield made
    finally:
        owner.new = original


def between_steps(steps: list[Step]) -> list[float]:
    """Seconds of the GPU's clock from each verify pass's end to the next step's first draft."""
    pairs = [(a, b) for a, b in itertools.pairwise(steps) if a.window is not None and b.drafts]
    return [a.clock._points[-1].elapsed_time(b.clock.began) / 1e3 for a, b in pairs]  # type: ignore[union-attr, arg-type]


def to_verify(marks: Marks) -> list[float]:
    """Seconds from the last draft's report to the verify pass."""
    found, heard = [], 0.0
    for at, (name, now) in enumerate(marks):
        heard = now if name == "wait" else heard
        if name == "issue_window>" and heard:
            found += [ended - heard for after, ended in marks[at:] if after == "run"][:1]
    return found


def spread(seconds: list[float]) -> str:
    """Median and least in microseconds, and of how many."""
    if not seconds:
        return "never (nothing was drafted)"
    return f"{1e6 * np.median(seconds):.0f} us (least {1e6 * min(seconds):.0f}, {len(seconds)} steps)"


def answer(engine: Engine, seed: int, tokens: int, length: DraftLength) -> GenerationStats:
    """Statistics of an answer to random tokens."""
    ids = np.random.default_rng(seed).integers(0, engine.footprint.vocab_size, 80).tolist()
    request = GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=tokens, draft_length=length)
    for event in engine.stream(request):
        stats = event.stats
    return stats


def start_copies(memory: DeviceExpertMemory, count: int) -> str:
    """Microseconds for each of `count` copies of missing experts, of which others make room."""
    chance, took = np.random.default_rng(count), []
    for _ in range(40):
        memory.drop_prefetches()
        missing = np.argwhere(~memory.residency())
        for pair in missing[chance.permutation(len(missing))[:count]].tolist():
            memory.prefetch(ExpertKey(*pair), float(pair[0]))
        torch.cuda.synchronize()
        before, began = memory.transfers.issued, time.perf_counter()
        memory.pump()
        ended, issued = time.perf_counter(), memory.transfers.issued - before
        memory.transfers.drain()
        if issued:
            took.append(1e6 * (ended - began) / issued)
    return f"least {min(took):.1f}, median {np.median(took):.1f} us"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budget", type=float, default=16.0, help="GiB")
    parser.add_argument("--routing", default="sticky:0.5")
    parser.add_argument("--tokens", type=int, default=192)
    args = parser.parse_args()
    settings = SyntheticSettings(parse_routing(args.routing), 0.9, 0.97)
    config = EngineConfig(
        device="cuda", context=2048, vram_budget_bytes=int(args.budget * 2**30), drafter="self"
    )
    lengths: tuple[DraftLength, ...] = (4, 8, "auto")
    with Engine.load_shape(args.shape, config, settings) as engine:
        print(f"synthetic: {args.shape}, {args.routing}; {engine.info().lanes}")
        for length in lengths:
            for seed in range(3):  # captures passes, fills slots
                answer(engine, seed, args.tokens, length)
            with watched() as marks, steps_made() as steps:
                stats = answer(engine, 7, args.tokens, length)
            torch.cuda.synchronize()
            line = f"draft length {length}: {stats.tokens_per_s or 0:.1f} tok/s; "
            line += f"from the verify pass to the next draft {spread(between_steps(steps))}"
            if length == "auto":
                line += f", from the last draft's report to the verify pass {spread(to_verify(marks))}"
            print(f"synthetic: {line}", flush=True)
        memory = engine._loaded.passes.memory
        assert isinstance(memory, DeviceExpertMemory)
        for count in COPIES:
            print(f"synthetic: {count} copies at once, for each {start_copies(memory, count)}", flush=True)


if __name__ == "__main__":
    main()
