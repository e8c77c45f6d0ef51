"""How near the automatic draft length comes to the best fixed one, on a simulated machine that is known.

    python benchmarks/governor_lengths.py [--seeds 24] [--steps 200]

A verify pass costs what its distinct experts cost (uniform routing, 4 of 60, as Qwen1.5-MoE's shape), times a
factor that falls from 1 + `cold` to 1 while slots fill: what is tried first meets empty slots. Shares are of
tokens a second from step 30 on. Chance alone makes them differ, so that the best length itself, kept from the
start, is given first; texts that change between two acceptance rates come last. Lengths are those of drafters
that cannot say how sure they are; draft_margins.py has the others.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localmoe.speculative import governor
from localmoe.speculative.governor import CANDIDATES, AutoGovernor, FixedGovernor, Governor
from localmoe.speculative.step_record import StepRecord

DRAFT_S, BASE_S, EXPERTS_S = 1.5e-3, 2e-3, 98e-3  # a drafted token; a pass; all experts of all layers
FILLS = 0.8  # what is left of the cold factor after a step
FROM_STEP = 30
STEADY = (0.8, 0.9, 0.97)  # acceptance rates
CHANGING, EVERY = ((0.6, 0.97), (0.8, 0.97), (0.85, 0.95), (0.9, 0.99)), 150


def verify_s(window: int) -> float:
    """A pass over so many tokens with full slots."""
    return BASE_S + EXPERTS_S * (1 - (1 - 4 / 60) ** window)


def rate_of(length: int, acceptance: float) -> float:
    """Tokens a second that may be expected."""
    return sum(acceptance**i for i in range(length + 1)) / (length * DRAFT_S + verify_s(length + 1))


def best_length(acceptance: float) -> int:
    """The best fixed one."""
    return max(CANDIDATES, key=lambda length: rate_of(length, acceptance))


def share_of_best(
    auto: Governor, acceptances: Sequence[float], every: int, cold: float, seed: int, steps: int
) -> float:
    """What a governor reaches of the best lengths' tokens, on texts that take turns every so many steps."""
    chance, tokens, best = random.Random(seed), 0, 0.0
    for step in range(steps):
        acceptance = acceptances[step // every % len(acceptances)]
        length, accepted = auto.choose(), 0
        while accepted < length and chance.random() < acceptance:
            accepted += 1
        took_s = (1 + cold * FILLS**step) * verify_s(length + 1) * chance.uniform(0.93, 1.07)
        auto.observe(StepRecord(length, accepted, DRAFT_S * length, took_s))
        if step >= FROM_STEP:
            tokens += accepted + 1
            best += rate_of(best_length(acceptance), acceptance) * (DRAFT_S * length + took_s)
    return tokens / best


def main() -> None:
    """The best length itself, first lengths tried once, and the governor as it is; then changing texts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    def show(
        what: str, make: Callable[[], Governor], acceptances: Sequence[float], cold: float, steps: int
    ) -> None:
        shares = [share_of_best(make(), acceptances, EVERY, cold, seed, steps) for seed in range(args.seeds)]
        print(
            f"{what}, acceptance {' and '.join(map(str, acceptances))}: mean "
            f"{statistics.mean(shares):.3f}, least {min(shares):.3f} of the best"
        )

    def auto() -> Governor:
        return AutoGovernor(CANDIDATES[-1])

    for acceptance in STEADY:
        best = best_length(acceptance)
        show(f"always {best}", partial(FixedGovernor, best), (acceptance,), 0.0, args.steps)
    usual: tuple[int, ...] = governor._WARM_UP_AT
    for tried_at in ((0,), usual):
        governor._WARM_UP_AT = tried_at  # type: ignore[assignment]
        for cold in (0.0, 4.0):
            for acceptance in STEADY:
                what = f"first lengths tried at steps {tried_at}, cold {cold:g}"
                show(what, auto, (acceptance,), cold, args.steps)
    for acceptances in CHANGING:
        show(f"{EVERY} steps each in turn", auto, acceptances, 0.0, 900)


if __name__ == "__main__":
    main()
