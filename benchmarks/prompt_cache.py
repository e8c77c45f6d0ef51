"""Two chats in turn, each of which goes on where it was: seconds to the first token with the texts that were
left in host RAM, and without. Tokens have to be the same. Texts are random, and weights of a shape.

    python benchmarks/prompt_cache.py [--model demo] [--tokens 800] [--rounds 3]
    python benchmarks/prompt_cache.py --shape olmoe-1b-7b --tokens 1000
    python benchmarks/prompt_cache.py --shape qwen3-30b-a3b --device cuda --gib 12 --tokens 8000
"""

from __future__ import annotations

import argparse
import random
import time

from localmoe.chat.prompt_cache import PromptCache
from localmoe.chat.session import Session
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.units import format_bytes
from localmoe.engine import Engine
from localmoe.hardware.cpu import ram_bytes
from localmoe.hardware.host_room import texts_room

_MORE = 40  # tokens of a further question


def answer(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], float, int]:
    """What follows it, seconds to the first token, tokens that were had already."""
    request = GenerationRequest(prompt_token_ids=tuple(prompt), max_new_tokens=count, strict=True)
    started, first, events = time.perf_counter(), 0.0, []
    for event in engine.stream(request):
        first = first or time.perf_counter() - started
        events.append(event)
    tokens = [token for event in events for token in event.token_ids]
    return tokens, first, events[-1].stats.reused_tokens


def measure(engine: Engine, cache: PromptCache | None, length: int, rounds: int) -> list[list[int]]:
    """One row a round and chat; all that was answered."""
    engine.reset()
    engine._session.text = Session(engine._loaded.runner.sequence, cache)
    chance, said = random.Random(1), []
    vocab = min(engine.footprint.vocab_size, 4000)
    chats = [[chance.randrange(6, vocab) for _ in range(length)] for _ in range(2)]
    for turn in range(1, rounds + 1):
        for name, chat in zip("AB", chats, strict=True):
            tokens, first, reused = answer(engine, chat, 8)
            said.append(tokens)
            held = "" if cache is None else f", {len(cache)} left: {format_bytes(cache.num_bytes)}"
            print(f"  chat {name}, turn {turn}: {len(chat)} tokens, {reused} had already, "
                  f"first token after {first:.3f} s{held}")  # fmt: skip
            chat += [*tokens, *(chance.randrange(6, vocab) for _ in range(_MORE))]
    return said


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape", help="random weights of that shape, instead of a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gib", type=float, help="VRAM budget")
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = EngineConfig(
        device=args.device, context=args.tokens + args.rounds * (_MORE + 8) + 16, strict=True, draft_length=0,
        vram_budget_bytes=None if args.gib is None else int(args.gib * 2**30),
    )  # fmt: skip
    with Engine.load_shape(args.shape, config) if args.shape else Engine.load(args.model, config) as engine:
        print(engine.info().name, engine.info().passes)
        texts = []
        answer(engine, list(range(6, 6 + args.tokens)), 8)  # what is compiled with the first of each kind
        answer(engine, list(range(6, 6 + _MORE)), 8)
        cache = PromptCache(lambda held: texts_room(*ram_bytes(), held, None))
        for name, used in (("without", None), ("with the texts that were left", cache)):
            print(f"{name}:")
            texts.append(measure(engine, used, args.tokens, args.rounds))
        print("the same tokens" if texts[0] == texts[1] else "TOKENS DIFFER")


if __name__ == "__main__":
    main()
