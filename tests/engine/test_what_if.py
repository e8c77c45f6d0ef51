"""Benchmarks of a loaded engine, and predictions: what is observed, cancelled, predicted for other cards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.stats import GenerationCounters
from localmoe.core.stream import StreamEvent
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.engine.benchmark import BenchmarkCancelledError, measure_setting, same_tokens
from localmoe.engine.observation import Agreement, observe
from localmoe.engine.what_if import card_plan, predict
from localmoe.hardware.cards import CARDS


def test_acceptance_counts_only_tokens_that_were_judged() -> None:
    counts = Agreement()
    counts.begin()
    for drafted, accepted in ((0, 0), (4, 4), (8, 5), (12, 5)):  # all four; one, then a refusal; a refusal
        counts.add(drafted, accepted)
    counts.begin()
    counts.add(4, 2)  # two, then a refusal
    assert counts.acceptance == 7 / (7 + 3)
    assert Agreement().acceptance is None and Agreement().match is None


class Capturing:
    """An engine whose answers of 5 tokens take 1 s a token after the first, and so long to capture passes:
    before the first token, and before the third."""

    def __init__(self, *captures_s: tuple[float, float]) -> None:
        self.live = self
        self._captures_s = iter(captures_s)
        self._captured_s = 7.0  # before anything is measured

    def capture_s(self) -> float:
        return self._captured_s

    def reset(self, *, ram: bool = False) -> None:
        """Nothing is kept."""

    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]:
        first_s, later_s = next(self._captures_s)
        counters = GenerationCounters()
        for token in range(5):
            self._captured_s += {0: first_s, 2: later_s}.get(token, 0.0)
            counters.new_tokens, counters.decode_s = token + 1, token + (later_s if token >= 2 else 0.0)
            counters.decode_h2d_bytes = 8
            yield StreamEvent("", (token,), 0, None, counters.freeze())


def test_time_in_which_passes_are_captured_is_left_out_of_a_setting_s_rates() -> None:
    engine, request = Capturing((0.5, 3.0), (0.25, 0.0)), GenerationRequest(prompt_token_ids=(1,))
    row = measure_setting(engine, [request, request], "on-demand", 0)
    assert [stats.tpot_s for stats in row.stats] == [7.0 / 4, 1.0], "what an answer took is not touched"
    summary = row.summary()
    assert row.captured_s == summary["captured_s"] == 3.0
    assert (summary["tpot_s"], summary["tokens_per_s"], summary["h2d_bytes_per_s"]) == (1.0, 1.0, 2.0)


def test_a_loaded_model_is_measured_observed_and_predicted_for_cards() -> None:
    requests = [
        GenerationRequest(messages=(Message("user", text),), max_new_tokens=tokens)
        for text, tokens in (("Write a story.", 12), ("Count to ten.", 8))
    ]
    with Engine.load("demo", EngineConfig(device="cpu", context=128)) as engine:
        never, seen = threading.Event(), []
        rows = [
            measure_setting(
                engine, requests, policy, length, stop=never, on_event=lambda *at: seen.append(at)
            )
            for policy, length in (("on-demand", 0), ("moe-speq", 3))
        ]
        assert same_tokens(rows) and [len(row) for row in rows[0].tokens] == [12, 8]
        assert rows[1].summary()["acceptance_rate"] and seen[0] == (0, 1) and seen[-1] == (1, 8)
        rows[0].tokens[0] = (*rows[0].tokens[0][:-1], -1)
        assert not same_tokens(rows)

        done: list[int] = []
        observed = observe(engine, requests, "demo", stop=never, on_answer=done.append)
        assert done == [1, 2, 3, 4]
        answer_rows = sum(observed.prompt_tokens) + (12 - 1) + (8 - 1)  # the last token is never read
        assert observed.trace.experts.shape[0] == answer_rows
        assert observed.acceptance is not None and 0.5 < observed.acceptance <= 1.0
        assert engine.footprint.num_layers == observed.trace.experts.shape[1]

        stop = threading.Event()
        stop.set()
        with pytest.raises(BenchmarkCancelledError):
            measure_setting(engine, requests, "on-demand", 0, stop=stop)
        with pytest.raises(BenchmarkCancelledError):
            observe(engine, requests, "demo", stop=stop)
        footprint = engine.footprint
    card = CARDS["rtx-4060"]
    large = card_plan(footprint, card, 128, 2, drafting=True)
    less = large.total_bytes - large.slot_bytes * (footprint.total_experts // 2)
    small = card_plan(footprint, card, 128, 2, drafting=True, budget_bytes=less)
    assert small.num_slots < footprint.total_experts == large.num_slots
    told: list[None] = []
    cramped, roomy = (
        predict(
            observed, footprint, card, plan, ("on-demand", "moe-speq"), (0, 4),
            stop=never, on_row=lambda: told.append(None),
        )
        for plan in (small, large)
    )  # fmt: skip
    assert len(told) == 8 and [row["draft_length"] for row in cramped] == [0, 0, 4, 4]
    assert all(a["hit_rate"] < b["hit_rate"] for a, b in zip(cramped, roomy, strict=True))  # type: ignore[operator]
    assert all(a["tokens_per_s"] <= b["tokens_per_s"] for a, b in zip(cramped, roomy, strict=True))  # type: ignore[operator]
    undrafted = card_plan(footprint, card, 128, 2, drafting=False)
    assert [
        row["draft_length"]
        for row in predict(observed, footprint, card, undrafted, ("on-demand",), (0, 4), stop=never)
    ] == [0]
    with pytest.raises(BenchmarkCancelledError):
        predict(observed, footprint, card, large, ("on-demand",), (0,), stop=stop)
