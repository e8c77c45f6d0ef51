"""How much faster moe-speq is than drafting on demand with the same slots, and how much faster it could be:
predicted by the simulator over shapes, cards, routing, shares of experts in slots and draft lengths. The
figure of MoE-SpeQ's abstract to compare with is 2.34.

The most to gain is that of the same copies: on demand they run beside nothing, at best all of them run beside
drafts and passes.

    python benchmarks/lookahead_gain.py [--shapes NAME ...] [--acceptance 0.97] [--best 3]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localmoe.core.stats import GenerationStats
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import ModelFootprint
from localmoe.engine.random_source import RandomSource
from localmoe.hardware.cards import find_card
from localmoe.hardware.limits import Rates
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import find_shape
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_machine import predict_machine
from localmoe.prefetch.simulator_sources import windows

SHAPES = ("qwen1.5-moe-a2.7b", "deepseek-v2-lite", "mixtral-8x7b", "phi-3.5-moe", "qwen3-30b-a3b")
RATES = {
    "H200": Rates(4.3e12, 54e9),  # as measured, docs/log.md
    "RTX 5090": find_card("rtx-5090").rates,
    "RTX 4090": find_card("rtx-4090").rates,
}
ROUTINGS = ("sticky:0.5", "sticky:0.8")
SHARES = (0.3, 0.5, 0.7, 0.85, 0.93)
LENGTHS = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Gain:
    """One setting's figures. most: of the same copies."""

    setting: str
    on_demand: GenerationStats
    moe_speq: GenerationStats
    most: float

    @property
    def times(self) -> float:
        """How many times as fast."""
        return (self.moe_speq.tokens_per_s or 0.0) / (self.on_demand.tokens_per_s or 1.0)

    def __str__(self) -> str:
        hits = f"hit rate {self.on_demand.hit_rate:.2f} -> {self.moe_speq.hit_rate:.2f}"
        speeds = f"{self.on_demand.tokens_per_s:.1f} -> {self.moe_speq.tokens_per_s:.1f} tok/s"
        return f"{self.times:.2f} x (at most {self.most:.2f}): {self.setting}: {speeds}, {hits}"


def gains(footprint: ModelFootprint, acceptance: float) -> Iterator[Gain]:
    """Every setting's, of one shape."""
    for routing, share, length, (card, rates) in product(ROUTINGS, SHARES, LENGTHS, RATES.items()):
        settings = SyntheticSettings(parse_routing(routing), acceptance, acceptance)
        machine = predict_machine(footprint, int(footprint.total_experts * share), rates)
        model = SyntheticModel(
            settings, footprint.num_layers, footprint.num_experts, footprint.experts_per_token
        )
        tallies = [
            simulate(
                policy,
                machine,
                windows(
                    model, draft_length=length, answers=2, prompt_tokens=128, new_tokens=96, whole_window=True
                ),
            )
            for policy in ("on-demand", "moe-speq")
        ]
        on_demand = tallies[0].counters
        waits = (on_demand.stall_s or 0.0) / on_demand.decode_s
        setting = f"{card}, {share:.0%} of the experts in slots, {routing}, draft length {length}"
        stats = [tally.counters.freeze() for tally in tallies]
        yield Gain(setting, stats[0], stats[1], 1 / max(waits, 1 - waits))


def main() -> None:
    """The best settings of each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--acceptance", type=float, default=0.97)
    parser.add_argument("--best", type=int, default=3)
    args = parser.parse_args()
    for shape in args.shapes:
        source = RandomSource(find_shape(shape), SyntheticSettings())
        skeleton = source.skeleton(source.stored_dtype)
        footprint = measure_footprint(shape, source.stored_dtype, skeleton, None, "cuda")
        footprint = footprint.in_codes().in_whole_passes()  # as a GPU runs it
        found = sorted(gains(footprint, args.acceptance), key=lambda gain: gain.times, reverse=True)
        print(f"{shape} (predicted, synthetic routing, acceptance and match {args.acceptance:.0%})")
        for gain in found[: args.best]:
            print(f"  {gain}", flush=True)


if __name__ == "__main__":
    main()
