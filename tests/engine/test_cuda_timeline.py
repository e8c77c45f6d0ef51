"""Steps on a real GPU as spans: read from events after the step, in order, without a change of the answer."""

from __future__ import annotations

import itertools
import statistics

import pytest
from support.engines import ask, load_with_slots

pytestmark = pytest.mark.gpu
PROMPT = "The fox said to the bear"


@pytest.mark.parametrize("length", [0, 3])
def test_draft_verify_and_copies_lie_in_their_steps_and_take_what_was_measured(length: int) -> None:
    with load_with_slots("demo", 48, device="cuda", strict=True) as engine:
        plain = ask(engine, PROMPT, 48, draft_length=length).tokens
        engine.reset()
        engine.live.record_timeline()
        watched = ask(engine, PROMPT, 48, draft_length=length)
        stats, (_, *steps) = watched.stats, engine.live.timeline()
        state = engine.live.state()
    assert watched.tokens == plain and len(steps) == stats.steps
    assert state.link_bytes_per_s is not None and state.link_bytes_per_s > 1e8 and state.heat.max() > 0
    for step in steps:
        ends = [at for s in step.spans if s.lane in ("draft", "verify") for at in (s.start_s, s.end_s)]
        assert ends == sorted(ends) and step.start_s <= ends[0] and ends[-1] <= step.end_s
        assert sum(span.lane == "verify" for span in step.spans) == 1
        assert sum(span.lane == "draft" for span in step.spans) == min(length, len(ends) // 2 - 1)
    spans = [span for step in steps for span in step.spans]
    drafted = sum(span.end_s - span.start_s for span in spans if span.lane == "draft")
    if length:
        assert drafted == pytest.approx(stats.draft_s, rel=0.05)
        copies = [span for span in spans if span.lane == "copies"]
        assert len(copies) <= stats.prefetched and (copies or not stats.prefetched)
        assert all(a.end_s <= b.end_s for a, b in itertools.pairwise(sorted(copies, key=lambda s: s.start_s)))
        rates = [span.num_bytes / (span.end_s - span.start_s) for span in copies]
        assert statistics.median(rates or [0.0]) < 2 * state.link_bytes_per_s  # a measured bound
    else:
        assert drafted == 0.0
