"""What prompt lookup can gain where a text repeats itself, and what it costs where it does not.
Weights are random, so no text quotes another: first, what a step takes that verifies 0, 1, 3, .. random
tokens, with uniform routing, and how many times as fast text is whose looked-up tokens are all right. Then
whole answers without and with lookup: chosen greedily they go round in circles of a few tokens, the best that
there can be, and drawn at temperature 1 they repeat nothing. Tokens have to be the same with and without,
but for those to which a CPU beside a GPU adds in another order. With --draft the model drafts in both, and
what is looked up takes a draft's place.

    python benchmarks/prompt_lookup.py [--shapes olmoe-1b-7b gpt-oss-20b] [--tokens 64] [--rounds 2]
    python benchmarks/prompt_lookup.py --device cuda --gib 8 [--strict] [--draft] ...
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import torch

from localmoe.core.config import DraftLength, EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.stats import GenerationStats
from localmoe.core.switches import Switches
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine, stepping
from localmoe.model.shapes import SHAPES
from localmoe.speculative.drafters import Proposal
from localmoe.speculative.prompt_lookup import PromptLookupDrafter

TEXTS = {"repeats itself": SamplingConfig(), "does not": SamplingConfig(temperature=1.0, seed=1)}
ROWS = (0, 1, 3, 7, 15)
STEPS = 12


class RandomDrafter(PromptLookupDrafter):
    """Proposes tokens that are never right."""

    vocab = 1

    def look_up(self, history: Sequence[int], count: int) -> Proposal:
        return Proposal([random.randrange(self.vocab) for _ in range(count)], [])


def answer(
    engine: Engine, length: DraftLength, tokens: int, sampling: SamplingConfig, *, look_up: bool = True
) -> tuple[list[int], GenerationStats]:
    """What follows a prompt of random tokens."""
    ids = torch.randint(0, engine.footprint.vocab_size, (64,), generator=torch.Generator().manual_seed(1))
    request = GenerationRequest(
        prompt_token_ids=tuple(ids.tolist()), max_new_tokens=tokens, sampling=sampling, draft_length=length,
        switches=Switches(look_up=look_up),
    )  # fmt: skip
    events = list(engine.stream(request))
    stats = events[-1].stats
    assert stats is not None
    return [token for event in events for token in event.token_ids], stats


def measure_rows(shape: str, engine: Engine) -> None:
    """Steps by the tokens that they verify."""
    RandomDrafter.vocab = engine.footprint.vocab_size
    setattr(stepping, "PromptLookupDrafter", RandomDrafter)  # noqa: B010
    try:
        plain_s = 0.0
        for rows in ROWS:
            _, stats = answer(engine, rows, STEPS, TEXTS["does not"])
            step_s = stats.verify_s / max(1, stats.steps)
            plain_s = plain_s or step_s
            print(
                f"synthetic: {shape}: {rows:2d} tokens verified beside the next one {1e3 * step_s:7.1f} ms a "
                f"step, {(rows + 1) * plain_s / step_s:.2f} x as fast if all are right, as fast if "
                f"{step_s / plain_s - 1:.2f} of {rows} are",
                flush=True,
            )
    finally:
        setattr(stepping, "PromptLookupDrafter", PromptLookupDrafter)  # noqa: B010


def measure_answers(shape: str, engine: Engine, tokens: int, *, drafts: bool) -> None:
    """Without and with lookup, in turn."""
    for name, sampling in TEXTS.items():
        found: list[list[int]] = []
        for looks in (False, True):
            length: DraftLength = "auto" if looks or drafts else 0
            written, stats = answer(engine, length, tokens, sampling, look_up=looks)
            found.append(written)
            print(
                f"synthetic: {shape}, text {name}, draft length {length}, looked up {looks}: "
                f"{1e3 * (stats.tpot_s or 0.0):.2f} ms a token, {stats.steps} steps, {stats.accepted} of "
                f"{stats.drafted} tokens accepted, {stats.looked_up} in the place of drafts",
                flush=True,
            )
        same = found[0] == found[1]
        assert same or not engine.config.strict, "looking up changed the answer"
        if not same:
            print(f"synthetic: {shape}, text {name}: the CPU's sums made other tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["olmoe-1b-7b"], choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gib", type=float, help="VRAM budget")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--draft", action="store_true", help="the model drafts")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    config = EngineConfig(
        device=args.device, drafter="self" if args.draft else "prompt-lookup", context=1024,
        strict=args.strict or not on_gpu,
        vram_budget_bytes=int(args.gib * 2**30) if args.gib else None,
    )  # fmt: skip
    for shape in args.shapes:
        uniform = SyntheticSettings(parse_routing("uniform"))  # the hardest, and drawn anew for each answer
        if not args.draft:
            with Engine.load_shape(SHAPES[shape], config, uniform) as engine:
                measure_rows(shape, engine)
        with Engine.load_shape(SHAPES[shape], config, SyntheticSettings()) as engine:
            # the text is the weights' own: nothing of it is simulated
            engine._loaded.passes.synthetic = None
            engine._draft_place._stays = True  # what random weights seldom agree with would be laid aside
            for _ in range(args.rounds):
                measure_answers(shape, engine, args.tokens, drafts=args.draft)


if __name__ == "__main__":
    main()
