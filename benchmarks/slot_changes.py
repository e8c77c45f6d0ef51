"""What completing experts that the CPU computes a part of would bring, by a clock of layers: no GPU.

python benchmarks/slot_changes.py [--cases gpt-oss-20b:8 ...] [--tokens 400]

Each layer has a cache of its own, in order of last use. A token's misses are divided between link and CPU as
kernels.gpu.lane_shares does; what the link reads whole enters, and what it shares with the CPU does if its
rest is worth the link's time (experts.slot_worth, the engine's own). A rest that is not copied when the next
layer begins delays the link there. Rates are those of a machine with an H100 or, named so, of cards as they
are sold. Prints microseconds a layer and hit rates: never, always, and as the engine decides; all predicted.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localmoe.experts.slot_worth import SlotWorth

LAYERS, WARM_UP = 8, 120
HANDOVER_US, PARTS = 30.0, 22


@dataclass(frozen=True, slots=True)
class Case:
    """A model's layers on a machine. cpu_us, link_us: of an expert. idle_us: of the link between two layers'
    experts."""

    experts: int
    top_k: int
    slots: int
    cpu_us: float
    link_us: float
    idle_us: float


CASES = {
    "gpt-oss-20b:8": Case(32, 4, 13, 220, 264, 140),
    "qwen1.5-moe:16": Case(60, 4, 30, 192, 333, 135),
    "qwen1.5-moe:24": Case(60, 4, 51, 216, 333, 135),
    "qwen3-30b:16": Case(128, 8, 30, 111, 188, 100),
    "phi-3.5-moe:32": Case(16, 2, 5, 1744, 3019, 160),
    "gpt-oss-20b:8 RTX 4060, DDR5": Case(32, 4, 13, 220, 1100, 400),
}
ROUTING = ("uniform", "0.3", "0.5", "0.66", "0.8", "popular")


class Router:
    """Experts of one layer, token after token: each kept with a probability, or favourites (as
    synthetic_engine.popular_trace)."""

    def __init__(self, case: Case, routing: str, chance: np.random.Generator) -> None:
        self._case, self._chance = case, chance
        stays = {"uniform": 0.0, "popular": 0.3}.get(routing)
        self._stays = float(routing) if stays is None else stays
        self._weights = np.zeros(case.experts)
        self._changes = 640 if routing == "popular" else 0
        self._tokens, self._last = 0, np.zeros(0, dtype=np.int64)

    def next(self) -> NDArray[np.int64]:
        case, chance = self._case, self._chance
        if self._changes and self._tokens % self._changes == 0:
            self._weights = -1.1 * np.log(chance.permutation(case.experts) + 1.0)
        keys = self._weights + chance.gumbel(size=case.experts)
        keys[self._last[chance.random(len(self._last)) < self._stays]] = np.inf
        self._tokens += 1
        self._last = np.argpartition(-keys, case.top_k - 1)[: case.top_k]
        return self._last


def divide(misses: int, case: Case, busy: float) -> list[float]:
    """The CPU's share of each miss, in their order. busy: experts that the link has to bring before."""
    shares, spent = [], 0.0
    for place in range(misses):
        left = (busy + misses - place) * case.link_us
        part = (left - spent - HANDOVER_US) / (case.cpu_us + case.link_us)
        shares.append(min(max(round(part * PARTS) / PARTS, 0.0), 1.0))
        spent += case.cpu_us
    return shares


def play(case: Case, routing: str, rule: str, tokens: int, seed: int = 0) -> tuple[float, float]:
    """Microseconds a layer, and the hit rate. rule: "never", "always", or "engine"."""
    chance = np.random.default_rng(seed)
    routers = [Router(case, routing, chance) for _ in range(LAYERS)]
    last_use = np.full((LAYERS, case.experts), -1)
    here = np.zeros((LAYERS, case.experts), dtype=np.bool_)
    here[:, : case.slots] = True
    worth, owed_us = SlotWorth(), 0.0
    spent_us, hits = [], []
    for token in range(tokens):
        entered, left, asked = [], [], np.zeros_like(here)
        limit = {"never": 0.0, "always": np.inf}.get(rule, worth.link_us(case.idle_us, case.link_us))
        for layer, router in enumerate(routers):
            chosen = router.next()
            asked[layer, chosen] = True
            missing = chance.permutation(chosen[~here[layer, chosen]])
            owed_us = max(0.0, owed_us - case.idle_us)
            shares = divide(len(missing), case, owed_us / case.link_us)
            cpu_us = sum(shares) * case.cpu_us + HANDOVER_US * (sum(shares) > 0)
            link_us = (len(shares) - sum(shares)) * case.link_us + owed_us
            took = max(cpu_us, link_us if any(share < 1 for share in shares) else 0.0)
            owed_us = max(0.0, link_us - took)
            spent_us.append(case.idle_us + took)
            hits.append(1 - len(missing) / case.top_k)
            last_use[layer, chosen] = token
            for expert, share in zip(missing.tolist(), shares, strict=True):
                rest_us = share * case.link_us
                if share == 1 or (share > 0 and rest_us > limit):
                    continue
                owed_us += rest_us
                out = np.where(here[layer] & ~asked[layer], last_use[layer], tokens)
                victim = int(out.argmin())
                here[layer, victim], here[layer, expert] = False, True
                entered.append(layer * case.experts + expert)
                left.append(layer * case.experts + victim)
        worth.observe(asked, np.array(entered, dtype=np.int64), np.array(left, dtype=np.int64))
    after = WARM_UP * LAYERS
    return float(np.mean(spent_us[after:])), float(np.mean(hits[after:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--routing", nargs="*", default=list(ROUTING))
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    for name in args.cases:
        print(f"predicted: {name}: {CASES[name]}")
        for routing in args.routing:
            cells = []
            for rule in ("never", "always", "engine"):
                took, hit = play(CASES[name], routing, rule, args.tokens)
                cells.append(f"{rule} {took:.0f} us, {100 * hit:.0f} % hit")
            print(f"predicted:   {routing}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
