"""The published statistics by hand-worked numbers, and None wherever nothing ran that could be measured."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.stats import GenerationCounters, GenerationStats

RATIOS = (
    "tpot_s", "tokens_per_s", "acceptance_rate", "mean_draft_length", "hit_rate", "token_hit_rate",
    "expert_match_rate", "expert_order_match_rate", "coverage_rate", "h2d_bytes_per_token",
    "disk_bytes_per_token",
)  # fmt: skip
DOCUMENTED = {
    "prompt_tokens", "new_tokens", "ttft_s", "tpot_s", "tokens_per_s", "steps", "drafted", "accepted",
    "acceptance_rate", "mean_draft_length", "expert_demands", "hits", "late", "misses", "hit_rate",
    "token_hit_rate", "expert_match_rate", "prefetched", "wasted", "h2d_bytes", "h2d_bytes_per_token",
    "draft_s", "verify_s", "stall_s", "peak_device_bytes", "vram_budget_bytes",
}  # fmt: skip


def test_an_answer_worked_by_hand() -> None:
    # 12 tokens after a prompt of 7; 4 steps drafted 5, 5, 3 and 3 tokens and kept 10 of them
    stats = GenerationCounters(
        prompt_tokens=7, reused_tokens=3, new_tokens=12, steps=4, drafted=16, left_out=2, accepted=10,
        looked_up=4,
        hits=30, late=6, misses=3, computed=1, token_hits=45, token_demands=60,
        routed_pairs=32, matched_pairs=24, ordered_pairs=8, covered=38,
        prefetched=20, wasted=5, prefill_h2d_bytes=1000, decode_h2d_bytes=3300,
        cpu_bytes=700, cpu_busy_s=0.25, cpu_jobs=9, cpu_waited=2, cpu_ahead_bytes=300,
        prefill_disk_bytes=600, decode_disk_bytes=330, disk_busy_s=0.4,
        ttft_s=0.5, decode_s=2.2, draft_s=0.7, verify_s=1.3, stall_s=0.1,
        peak_device_bytes=123, vram_budget_bytes=456,
    ).freeze()  # fmt: skip
    expected = {
        "prompt_tokens": 7, "reused_tokens": 3, "new_tokens": 12, "ttft_s": 0.5,
        "tpot_s": 0.2,  # 2.2 s for the 11 tokens after the first
        "tokens_per_s": 5.0, "steps": 4, "drafted": 16, "left_out": 2, "accepted": 10,
            "looked_up": 4,
        "acceptance_rate": 0.625, "mean_draft_length": 4.0,
        "expert_demands": 40, "hits": 30, "late": 6, "misses": 3, "computed": 1,
        "hit_rate": 0.75,  # a late expert is not a hit
        "token_hit_rate": 0.75, "expert_match_rate": 0.75, "expert_order_match_rate": 0.25,
        "coverage_rate": 0.95,  # 36 here or on their way, and 2 of the others named
        "prefetched": 20, "wasted": 5, "h2d_bytes": 4300, "prefill_h2d_bytes": 1000,
        "h2d_bytes_per_token": 300.0,  # decode copies only, over the tokens that decode steps made
        "cpu_bytes": 700, "cpu_busy_s": 0.25, "cpu_jobs": 9, "cpu_waited": 2, "cpu_ahead_bytes": 300,
        "disk_bytes": 930, "disk_bytes_per_token": 30.0, "disk_busy_s": 0.4,
        "draft_s": 0.7, "verify_s": 1.3, "stall_s": 0.1, "peak_device_bytes": 123, "vram_budget_bytes": 456,
        "approximate": False, "draft_aside": False,
    }  # fmt: skip
    assert stats.as_dict() == pytest.approx(expected)
    assert list(stats.as_dict()) == [field.name for field in fields(GenerationStats)]
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()


def test_every_documented_key_is_published() -> None:
    assert set(GenerationCounters().freeze().as_dict()) >= DOCUMENTED


def test_nothing_ran_so_no_ratio_is_known_and_no_count_is_unknown() -> None:
    stats = GenerationCounters().freeze().as_dict()
    assert {key for key, value in stats.items() if value is None} == set(RATIOS)
    assert all(stats[key] == 0 for key in stats if key not in RATIOS)


def test_one_token_has_no_time_per_token() -> None:
    stats = GenerationCounters(new_tokens=1, ttft_s=0.3, prefill_h2d_bytes=10).freeze()
    assert (stats.tpot_s, stats.tokens_per_s, stats.h2d_bytes_per_token) == (None, None, None)
    assert stats.h2d_bytes == 10


def test_plain_decoding_has_a_draft_length_of_zero_but_no_acceptance_rate() -> None:
    stats = GenerationCounters(new_tokens=5, steps=4, decode_s=0.4, misses=8, token_demands=8).freeze()
    assert stats.mean_draft_length == 0.0
    assert (stats.acceptance_rate, stats.expert_match_rate) == (None, None)
    assert (stats.hit_rate, stats.token_hit_rate) == (0.0, 0.0)


def test_a_clock_that_did_not_move_gives_no_infinite_rate() -> None:
    stats = GenerationCounters(new_tokens=2, decode_s=0.0).freeze()
    assert (stats.tpot_s, stats.tokens_per_s) == (0.0, None)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5), st.integers(0, 5))
def test_demands_are_the_sum_of_their_kinds_and_rates_are_shares(
    hits: int, late: int, misses: int, accepted: int, rejected: int
) -> None:
    stats = GenerationCounters(
        hits=hits, late=late, misses=misses, accepted=accepted, drafted=accepted + rejected
    ).freeze()
    assert stats.expert_demands == hits + late + misses
    assert stats.hit_rate is None or 0 <= stats.hit_rate <= 1
    assert (stats.hit_rate is None) == (stats.expert_demands == 0)
    assert (stats.acceptance_rate is None) == (stats.drafted == 0)
