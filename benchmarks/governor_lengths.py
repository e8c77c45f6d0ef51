"""How near the automatic draft length comes to the best fixed one, on a simulated machine that is known.

    python benchmarks/governor_lengths.py [--seeds 24] [--steps 200]

A verify pass costs what its distinct experts cost (uniform routing, 4 of 60, as Qwen1.5-MoE's shape), times a
factor that falls from 1 + `cold` to 1 while slots fill: what is tried first meets empty slots. Shares are of
tokens a second from step 30 on; the best length known from the start reaches 0.87 to 0.97 at least, by chance
alone. Then texts that change between two acceptance rates, beside the best length of each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localmoe.speculative import governor
from localmoe.speculative.governor import CANDIDATES, AutoGovernor

DRAFT_S, BASE_S, EXPERTS_S = 1.5e-3, 2e-3, 98e-3  # a drafted token; a pass; all experts of all layers
FILLS = 0.8  # what is left of the cold factor after a step
FROM_STEP = 30


def verify_s(window: int) -> float:
    """A pass over so many tokens with full slots."""
    return BASE_S + EXPERTS_S * (1 - (1 - 4 / 60) ** window)


def best_rate(acceptance: float) -> float:
    """Tokens a second of the best fixed length."""
    return max(
        sum(acceptance**i for i in range(length + 1)) / (length * DRAFT_S + verify_s(length + 1))
        for length in CANDIDATES
    )


def share_of_best(acceptance: float, cold: float, seed: int, steps: int) -> float:
    """What the governor reaches of it."""
    auto, chance, tokens, seconds = AutoGovernor(CANDIDATES[-1]), random.Random(seed), 0, 0.0
    for step in range(steps):
        length, accepted = auto.choose(), 0
        while accepted < length and chance.random() < acceptance:
            accepted += 1
        took_s = (1 + cold * FILLS**step) * verify_s(length + 1) * chance.uniform(0.93, 1.07)
        auto.observe(length, accepted, DRAFT_S * length, took_s)
        if step >= FROM_STEP:
            tokens += accepted + 1
            seconds += DRAFT_S * length + took_s
    return tokens / seconds / best_rate(acceptance)


def share_where_texts_change(rates: tuple[float, float], every: int, seed: int, steps: int) -> float:
    """As `share_of_best`, with full slots and another acceptance rate every so many steps."""
    auto, chance, tokens, best = AutoGovernor(CANDIDATES[-1]), random.Random(seed), 0, 0.0
    for step in range(steps):
        length, accepted, rate = auto.choose(), 0, rates[step // every % 2]
        while accepted < length and chance.random() < rate:
            accepted += 1
        took_s = verify_s(length + 1) * chance.uniform(0.93, 1.07)
        auto.observe(length, accepted, DRAFT_S * length, took_s)
        if step >= FROM_STEP:
            tokens += accepted + 1
            best += best_rate(rate) * (DRAFT_S * length + took_s)
    return tokens / best


def main() -> None:
    """With the first lengths tried once, and as it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    usual = governor._WARM_UP_AT
    for tried_at in ((0,), usual):
        governor._WARM_UP_AT = tried_at
        for cold in (0.0, 4.0):
            for acceptance in (0.8, 0.9, 0.97):
                shares = [share_of_best(acceptance, cold, seed, args.steps) for seed in range(args.seeds)]
                print(
                    f"first lengths tried at steps {tried_at}, cold {cold:g}, acceptance {acceptance}: "
                    f"mean {statistics.mean(shares):.3f}, least {min(shares):.3f} of the best"
                )
    for rates, every in (((0.6, 0.97), 150), ((0.85, 0.95), 150), ((0.9, 0.99), 150), ((0.8, 0.97), 100)):
        shares = [share_where_texts_change(rates, every, seed, 900) for seed in range(args.seeds)]
        print(
            f"acceptance {rates[0]} and {rates[1]} in turn, {every} steps each: mean "
            f"{statistics.mean(shares):.3f}, least {min(shares):.3f} of the best"
        )


if __name__ == "__main__":
    main()
