"""Sixty real prompts, answered alike by the embedded model with and without drafts; how good these are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import ask, check_stats, load_with_slots

from localmoe.core.types import Message
from localmoe.engine import Engine

PROMPTS = Path(__file__).parents[1] / "data" / "eval_prompts.jsonl"
NUM_TOKENS = 12
NUM_SLOTS = 48  # of 96, so that experts come and go


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_with_slots("demo", NUM_SLOTS) as loaded:
        yield loaded


def prompts_of(source: str) -> dict[str, str]:
    """id -> prompt."""
    lines = map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines())
    return {line["id"]: line["prompt"] for line in lines if line["source"] == source}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["HumanEval", "GSM8K", "MT-Bench"])
def test_twenty_prompts_of_each_source_are_answered_alike_with_drafting_on_and_off(
    source: str, engine: Engine
) -> None:
    prompts, total, new_tokens = prompts_of(source), Counter[str](), 0
    assert len(prompts) == 20
    for number, (name, prompt) in enumerate(prompts.items()):
        question = [Message("user", prompt)]
        drafted = ask(engine, question, NUM_TOKENS, draft_length="auto" if number % 2 else 4)
        plain = ask(engine, question, NUM_TOKENS, draft_length=0)
        assert drafted.tokens == plain.tokens, name
        assert drafted.finish_reason == plain.finish_reason
        whole = engine._encoder.tokenizer.decode(plain.tokens, skip_special_tokens=True)
        assert drafted.text == plain.text == whole
        check_stats(drafted)
        new_tokens += len(plain.tokens)
        stats = drafted.stats
        if number % 2:
            continue  # how long "auto" drafts are, and so how good, depends on the machine
        total.update(
            drafted=stats.drafted, accepted=stats.accepted, demands=stats.expert_demands, hits=stats.hits
        )
        total["matches"] += round((stats.expert_match_rate or 0.0) * 1000) * stats.drafted
    assert new_tokens > 20 * NUM_TOKENS / 2, "the answers are too short to prove anything"
    acceptance, match = total["accepted"] / total["drafted"], total["matches"] / total["drafted"] / 1000
    hit_rate = total["hits"] / total["demands"]
    print(f"\n{source}: acceptance {acceptance:.3f}, expert match {match:.3f}, hit rate {hit_rate:.3f}")
    assert 0.7 < acceptance < 1.0
    assert 0.75 < match < 1.0
    assert 0.6 < hit_rate < 1.0
