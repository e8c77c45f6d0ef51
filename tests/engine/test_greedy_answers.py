"""Greedy answers are transformers' own, whatever drafts, prefetches or evicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import ask, check_consistent, check_stats, load_with_slots
from support.tiny_models import ARCHITECTURES, SLIDING_WINDOW, reference_greedy

from localmoe.core.config import DraftLength, SamplingConfig
from localmoe.engine import Engine
from localmoe.hardware.needs import PREFILL_CHUNK
from localmoe.kernels.attention import KV_BLOCK

PROMPTS = ("Hello there, how are", "1 + 2 = 3, and then", "z")
DRAFT_LENGTHS: tuple[DraftLength, ...] = (0, 1, 4, 8, "auto")
POLICIES = ("on-demand", "moe-speq")
Tiny = Callable[[str], tuple[Path, Any]]
Engines = Callable[[str], Engine]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers_for_every_draft_length_and_policy(
    architecture: str, tiny: Tiny, tiny_engine: Engines
) -> None:
    engine, model = tiny_engine(architecture), tiny(architecture)[1]
    assert engine.plan.resident_share < 0.34, "the budget has to force evictions"
    rejected = 0
    for number, prompt in enumerate(PROMPTS):
        expected: list[int] = []
        # every length with every prompt and with every policy: a policy sees experts alone, not the prompt
        for place, draft_length in enumerate(DRAFT_LENGTHS):
            policy = POLICIES[(number + place) % len(POLICIES)]
            answer = ask(engine, prompt, 12, policy=policy, draft_length=draft_length)
            expected = expected or reference_greedy(model, answer.prompt, 12)
            assert answer.tokens == expected, (prompt, policy, draft_length)
            assert answer.finish_reason == "length"
            check_stats(answer)
            assert answer.stats.misses + answer.stats.late + answer.stats.prefetched > 0
            rejected += answer.stats.drafted - answer.stats.accepted
    assert rejected > 0, "no draft was ever rejected, so rolling back was not tested"
    check_consistent(engine)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v2", "gpt_oss"])
def test_a_text_of_several_chunks_cache_blocks_and_sliding_windows_is_kept_in_mind(
    architecture: str, tiny: Tiny, tiny_engine: Engines
) -> None:
    engine, model = tiny_engine(architecture), tiny(architecture)[1]
    prompt = ("The window is shorter than this sentence, which goes on and on. " * 6)[: 3 * KV_BLOCK - 10]
    assert len(prompt) > PREFILL_CHUNK > 2 * SLIDING_WINDOW
    answers = [ask(engine, prompt, 16, draft_length=length) for length in (0, 4, 8)]
    expected = reference_greedy(model, answers[0].prompt, 16)
    assert [answer.tokens for answer in answers] == [expected] * 3


def test_an_answer_of_one_token_has_no_rates(tiny: Tiny, tiny_engine: Engines) -> None:
    answer = ask(tiny_engine("qwen2_moe"), PROMPTS[0], 1, draft_length=4)
    assert answer.tokens == reference_greedy(tiny("qwen2_moe")[1], answer.prompt, 1)
    check_stats(answer)
    stats = answer.stats
    assert stats.steps == 0 and stats.ttft_s > 0
    for rate in (
        "tpot_s",
        "tokens_per_s",
        "acceptance_rate",
        "hit_rate",
        "token_hit_rate",
        "expert_match_rate",
    ):
        assert getattr(stats, rate) is None, rate


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral", "gpt_oss"])
def test_greedy_tokens_with_a_repetition_penalty_are_those_of_transformers(
    architecture: str, tiny: Tiny, tiny_engine: Engines
) -> None:
    engine, model = tiny_engine(architecture), tiny(architecture)[1]
    sampling = SamplingConfig(repetition_penalty=1.3)
    plain = ask(engine, PROMPTS[0], 24, draft_length=0)
    answers = [ask(engine, PROMPTS[0], 24, draft_length=n, sampling=sampling) for n in (0, 4, "auto")]
    expected = reference_greedy(model, plain.prompt, 24, repetition_penalty=1.3)
    assert [answer.tokens for answer in answers] == [expected] * len(answers)
    assert expected != plain.tokens, "the penalty has to matter"


def test_an_end_token_inside_a_drafted_window_ends_the_answer_where_transformers_ends_it(
    tiny: Tiny, tmp_path: Path
) -> None:
    source, model = tiny("qwen2_moe")
    plain = reference_greedy(model, [40, 41, 42], 24)
    end = next(token for i, token in enumerate(plain) if i >= 8 and token not in plain[:i])
    folder = _copy_with_end_token(source, tmp_path / "ends", end)
    with load_with_slots(folder, 8) as engine:
        prompt = engine._encoder.tokenizer.decode([40, 41, 42])
        for draft_length in DRAFT_LENGTHS:
            answer = ask(engine, prompt, 24, draft_length=draft_length)
            assert answer.prompt == [40, 41, 42]
            assert answer.tokens == reference_greedy(model, answer.prompt, 24, eos_token_id=end)
            assert answer.finish_reason == "stop"
            check_stats(answer)


def _copy_with_end_token(source: Path, target: Path, end: int) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    (target / "generation_config.json").write_text(f'{{"eos_token_id": [{end}]}}')
    return target


def test_an_answer_fills_the_context_to_the_last_token_with_and_without_drafts(tiny: Tiny) -> None:
    with load_with_slots(tiny("qwen3_moe")[0], 8, context=40) as engine:
        answers = [ask(engine, "twenty-four characters..", 1000, draft_length=n) for n in (0, 3, 8)]
        assert [len(answer.tokens) for answer in answers] == [16, 16, 16]
        assert {answer.finish_reason for answer in answers} == {"length"}
        assert answers[0].tokens == answers[1].tokens == answers[2].tokens
