"""What choosing tokens costs the host: of a step with drafts, of which each drafted token and each verified
one asks for a distribution, by the likeliest tokens and by the whole vocabulary.

python benchmarks/sampling_cost.py [--vocab 151936] [--draft-length 4] [--history 2000] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localmoe.core.config import SamplingConfig
from localmoe.speculative import sampling
from localmoe.speculative.acceptance import accept_sampled
from localmoe.speculative.sampling import TokenSampler

SETTINGS = (
    {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05},  # the page's own
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0},
)
ROUNDS = 15


def step_s(config: SamplingConfig, logits: torch.Tensor, history: list[int]) -> float:
    """Seconds of a step: draw each drafted token, then accept. The draft's logits are the target's."""
    sampler = TokenSampler(config)
    drafted: list[int] = []
    draft: list[torch.Tensor] = []
    started = time.perf_counter()
    for row in logits[:-1]:
        q = sampler.distribution(row, [*history, *drafted])
        draft.append(q)
        drafted.append(sampler.draw(q))
    accept_sampled(
        lambda i: sampler.distribution(logits[i], [*history, *drafted[:i]]), draft, drafted, sampler.uniform,
        sampler.draw,
    )  # fmt: skip
    return time.perf_counter() - started


def main() -> None:
    """Measure all settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--history", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(args.draft_length + 1, args.vocab, generator=generator)
    history = torch.randint(0, args.vocab, (args.history,), generator=generator).tolist()
    lists: Any = sampling  # whose constant is changed
    shortlists = lists.SHORTLISTS
    print(
        f"ms of a step with {args.draft_length} drafted tokens, vocabulary {args.vocab}, median of {ROUNDS}"
    )
    for options in SETTINGS:
        config = SamplingConfig(seed=1, **options)  # type: ignore[arg-type]
        found: list[float] = []
        for tried in (shortlists, ()):
            lists.SHORTLISTS = tried
            found.append(1e3 * statistics.median(step_s(config, logits, history) for _ in range(ROUNDS)))
        print(f"  {options}: {found[0]:.1f} by the likeliest, {found[1]:.1f} by the whole vocabulary")
    lists.SHORTLISTS = shortlists


if __name__ == "__main__":
    main()
