"""Passes and steps of a model of a real shape on a GPU, each beside its floor.

python benchmarks/steps.py [--shape qwen1.5-moe-a2.7b] [--budget 60GiB]

Random weights, so prompts and routing are synthetic. Floors are the bytes that a pass has to read over the
memory bandwidth measured in the same run, or the experts' bytes over the link's. Prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.units import parse_bytes
from localmoe.engine import Engine
from localmoe.hardware.probe import probe_hardware
from localmoe.model import device_clock
from localmoe.model.device_runner import DeviceRunner

LENGTH = 1000  # tokens in the cache


def timed(call: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds on the GPU."""
    times = []
    for i in range(repeats + 3):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        call()
        b.record()
        b.synchronize()
        if i >= 3:
            times.append(a.elapsed_time(b))
    return float(statistics.median(times))


def read_bandwidth() -> float:
    """Bytes a second that a plain sum over a large tensor reads."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return data.nbytes / timed(lambda: data.sum()) * 1e3


def passes(engine: Engine, bandwidth: float) -> None:
    """Draft and verify passes alone, experts as they lie in slots."""
    runner, footprint = runner_of(engine), engine.footprint
    memory, issue, window = runner.passes.memory, runner.issue, runner.passes.window
    shared = footprint.shared_bytes - 2 * footprint.vocab_size * footprint.hidden_size  # but the embedding
    shared -= footprint.packed_away_bytes
    if engine.plan.drafting:
        experts = footprint.num_layers * footprint.experts_per_token * footprint.draft_expert_bytes

        def draft() -> None:
            window.set(LENGTH, 1, [7])
            issue.draft(LENGTH + 1)

        row("draft pass", timed(draft), (shared + experts) / bandwidth * 1e3)
    for count in (1, 2, 5, 9, 17, 33, 65):
        tokens = np.random.default_rng(count).integers(0, footprint.vocab_size, count).tolist()
        for _ in range(2):  # the second time all are in slots, if there is room
            window.set(LENGTH, count, tokens)
            issue.force("verify", LENGTH, count)
            memory.open_pass()
            output = issue.window(count, LENGTH)
            report = issue.read_window(output.report.cpu().numpy(), count, len(output.logits))
            found = memory.close_pass(report.log)
        memory.open_pass()
        ms = timed(partial(issue.window, count, LENGTH), 20 if not found.misses.any() else 5)
        distinct, missing = int(found.demanded.sum()), int(found.misses.sum())
        floor = (shared + (distinct - missing) * footprint.expert_bytes) / bandwidth * 1e3
        row(f"verify {count} tokens, {distinct} experts, {missing} over the link", ms, floor)


def prompt(engine: Engine, link: float) -> None:
    """A prompt of 1,000 tokens with empty slots."""
    runner, memory = runner_of(engine), runner_of(engine).passes.memory
    tokens = np.random.default_rng(0).integers(0, engine.footprint.vocab_size, LENGTH).tolist()
    seconds = []
    for _ in range(4):
        runner.sequence.truncate(0)
        memory.forget()
        torch.cuda.synchronize()
        started = time.perf_counter()
        runner.run(tokens, "prefill", last_only=True)
        seconds.append(time.perf_counter() - started)
    copied = memory.counters().h2d_bytes
    row(
        f"prompt of {LENGTH}, {copied / 1e9:.1f} GB over the link",
        min(seconds[1:]) * 1e3,
        copied / link * 1e3,
    )


def host_time(engine: Engine, length: int) -> None:
    """What the host does in a greedy step beside waiting."""
    waits: list[float] = []
    original = device_clock.Landing.wait

    def wait(self: device_clock.Landing) -> object:
        started = time.perf_counter()
        found = original(self)
        waits.append(time.perf_counter() - started)
        return found

    request = GenerationRequest(prompt_token_ids=tuple(range(64)), max_new_tokens=120, draft_length=length)
    list(engine.stream(request))
    device_clock.Landing.wait = wait  # type: ignore[method-assign, assignment]
    stats, started, first = None, 0.0, True
    for event in engine.stream(request):
        if first:
            started, first = time.perf_counter(), False
            waits.clear()
        stats = event.stats
    wall = time.perf_counter() - started
    device_clock.Landing.wait = original  # type: ignore[method-assign]
    assert stats is not None
    print(
        f"synthetic: step of length {length}: {wall / stats.steps * 1e3:.2f} ms; drafts "
        f"{stats.draft_s / stats.steps * 1e3:.2f}, verify {stats.verify_s / stats.steps * 1e3:.2f}, "
        f"between steps {(wall - stats.draft_s - stats.verify_s) / stats.steps * 1e3:.3f}; the host works "
        f"{(wall - sum(waits)) / stats.steps * 1e3:.3f} ms of it; hit rate {stats.hit_rate:.3f}"
    )


def runner_of(engine: Engine) -> DeviceRunner:
    runner = engine._loaded.runner
    assert isinstance(runner, DeviceRunner), "steps run whole on the GPU"
    return runner


def row(name: str, ms: float, floor_ms: float) -> None:
    print(f"synthetic: {name:52s} {ms:8.3f} ms, floor {floor_ms:8.3f} ms, {ms / floor_ms:.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budget", default="60GiB")
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    gpu = probe_hardware().gpus[0]
    bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    link = gpu.h2d_bytes_per_s or 1.0
    started = time.perf_counter()
    config = EngineConfig(
        device="cuda", context=args.context, vram_budget_bytes=parse_bytes(args.budget), drafter="self"
    )
    settings = SyntheticSettings(parse_routing("uniform"), 0.9, 0.9)
    with Engine.load_shape(args.shape, config, settings) as engine:
        print(
            f"synthetic: {args.shape}, {gpu.name}, torch {torch.__version__}: "
            f"memory {bandwidth / 1e12:.2f} TB/s read, link {link / 1e9:.1f} GB/s; "
            f"{engine.plan.num_slots} slots, made and ready in {time.perf_counter() - started:.1f} s"
        )
        with torch.inference_mode():
            prompt(engine, link)
            passes(engine, bandwidth)
        for length in (0, 4, 8) if engine.plan.drafting else (0,):
            engine.reset()
            host_time(engine, length)
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"synthetic: peak {peak / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} GiB reserved")


if __name__ == "__main__":
    main()
