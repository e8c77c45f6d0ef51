"""How soon the first token of a short prompt comes, with all missing experts streamed past it, in a pass that
asks for those that it uses, and as is chosen by what either took (model/prompt_ways.py); and how fast the
answer is then.

python benchmarks/short_prompts.py [--shape qwen3-30b-a3b] [--gib 12] [--prompts 80,128] [--routing uniform]

Weights are random, and so are the prompts: with `--routing uniform` tokens choose experts at random, which is
the worst case; without it as random routers do, which like some experts better than a text's do. Slots are
full of what the answers before asked for.
"""

from __future__ import annotations

import argparse
import math
import statistics

import numpy as np

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.experts.lane_balance import LanePass
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.prompt_ways import PromptWays

WARM_UP = (60, 130, 200, 400, 72, 700, 130, 60, 200)  # tokens: passes are captured, ways learnt
ANSWER = 24  # tokens


class Forced(PromptWays):
    """Passes that are longer than a window stream, or ask as far as they can."""

    def __init__(self, most: int, *, asks: bool) -> None:
        super().__init__(tries=asks, most=most)
        self._asks = asks

    def rows(self, left: int, longest: int, missing: int) -> int:
        return min(left, self.most if self._asks else longest)

    def guess(self, tokens: int) -> float:
        return 0.0 if self._asks else math.inf

    def asks(self, tokens: int, missing: int) -> bool:
        return self._asks and tokens <= self.most


def answer(engine: Engine, ids: tuple[int, ...]) -> tuple[float, float]:
    """Seconds to the first token, and tokens a second."""
    told = [
        event.stats for event in engine.stream(GenerationRequest(prompt_token_ids=ids, max_new_tokens=ANSWER))
    ]
    return next(stats.ttft_s for stats in told if stats.ttft_s), told[-1].tokens_per_s or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--gib", type=float, default=12.0, help="VRAM budget")
    parser.add_argument("--prompts", default="80,128,192,256,384,512,768,1024", help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--routing", help="as `localmoe bench --routing`")
    parser.add_argument("--strict", action="store_true")
    args = parser.parse_args()
    config = EngineConfig(
        device="cuda", context=4096, vram_budget_bytes=int(args.gib * 2**30), strict=args.strict
    )
    routing = parse_routing(args.routing) if args.routing else None
    chance = np.random.default_rng(0)
    with Engine.load_shape(args.shape, config, SyntheticSettings(routing=routing, acceptance=0.9)) as engine:
        runner = engine._loaded.runner
        assert isinstance(runner, DeviceRunner), "steps run whole on the GPU"
        passes, lane = runner._prompt, runner.passes.lane
        chosen, most = passes.ways, min(ways.most for ways in passes.ways.values())
        kinds: tuple[LanePass | None, ...] = (None,)
        if lane is not None and not args.strict:
            kinds = lane.prompt_kinds

        def forced(asking: LanePass | str | None) -> dict[LanePass | None, PromptWays]:
            return {kind: Forced(most, asks=kind is asking) for kind in chosen}

        ways = {"streamed": forced("nobody")}
        ways |= {f"asked ({'no CPU' if kind is None else kind.value})": forced(kind) for kind in kinds}
        ways["chosen"] = chosen

        def measure(tokens: int, way: str) -> tuple[float, float]:
            passes.ways = ways[way]
            return answer(engine, tuple(chance.integers(0, engine.footprint.vocab_size, tokens).tolist()))

        for tokens in WARM_UP:
            for way in ways:
                measure(tokens, way)
        share = 100 * engine.plan.resident_share
        print(f"synthetic: {args.shape}, {args.gib:g} GiB, {share:.0f} % of the experts in slots, "
              f"{engine.info().lanes}", flush=True)  # fmt: skip
        for tokens in map(int, args.prompts.split(",")):
            rounds = [[measure(tokens, way) for way in ways] for _ in range(args.rounds)]
            for way, found in zip(ways, zip(*rounds, strict=True), strict=True):
                first_s, rate = (statistics.median(column) for column in zip(*found, strict=True))
                print(f"  {tokens} tokens {way}: {1e3 * first_s:.1f} ms, then {rate:.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
