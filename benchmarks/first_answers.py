"""What a model's first answers wait for passes to be captured, as they come and with passes captured ahead.

python benchmarks/first_answers.py [--shape qwen3-30b-a3b] [--budget 12GiB] [--answers 4] [--tokens 100]

Weights are random (localmoe bench --shape), and so is what they route and choose; with `--acceptance` what is
accepted of drafts is simulated. An answer here has a prompt of 30 tokens, as a chat's next question has: a
window, not a streamed prompt.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.units import parse_bytes
from localmoe.engine import Engine

SAMPLING = SamplingConfig(temperature=0.6, top_p=0.95, seed=1)


def captured_ahead(engine: Engine) -> str:
    """Capture all that is expected, and say how long that took."""
    times: list[float] = []
    while True:
        began = time.perf_counter()
        if not engine._loaded.runner.capture_ahead(SAMPLING):  # passes alone: no slots are filled
            break
        times.append(1e3 * (time.perf_counter() - began))
    total_s = sum(times) / 1e3
    return f"{len(times)} captured ahead in {total_s:.2f} s, at most {max(times, default=0.0):.0f} ms each"


def report(engine: Engine, number: int, tokens: int) -> None:
    """One answer."""
    ids = np.random.default_rng(number).integers(0, engine.footprint.vocab_size, 30).tolist()
    request = GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=tokens, sampling=SAMPLING)
    before, began = engine.live.capture_s(), time.perf_counter()
    slowest_ms, last = 0.0, began
    for event in engine.stream(request):
        now = time.perf_counter()
        if event.stats.new_tokens > 1:
            slowest_ms = max(slowest_ms, 1e3 * (now - last))
        last, stats = now, event.stats
    waited_ms = 1e3 * (engine.live.capture_s() - before)
    print(
        f"synthetic: answer {number}: {stats.new_tokens} tokens in {last - began:.2f} s, the first after "
        f"{1e3 * stats.ttft_s:.0f} ms; then {stats.tokens_per_s or 0:.1f} tok/s, the longest pause "
        f"{slowest_ms:.0f} ms; waited {waited_ms:.0f} ms for captures",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--budget", default="12GiB")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--acceptance", type=float)
    args = parser.parse_args()
    config = EngineConfig(vram_budget_bytes=parse_bytes(args.budget), context=4096)
    for ahead in (False, True):
        with Engine.load_shape(args.shape, config, SyntheticSettings(acceptance=args.acceptance)) as engine:
            print(f"synthetic: {args.shape} in {args.budget}, {engine.info().draft}", flush=True)
            for number in range(args.answers):
                if ahead:
                    print(f"synthetic: {captured_ahead(engine)}", flush=True)
                report(engine, number, args.tokens)


if __name__ == "__main__":
    main()
