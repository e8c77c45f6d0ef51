"""A model with a draft at hand: what is looked up in the text takes a draft's place where that is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from engine.test_output_independence import ARCHITECTURE, PROMPT, Tiny
from support.engines import ask, load_with_slots

from localmoe.core.events import Event, PrefetchRequest, RatesMeasured
from localmoe.core.switches import Switches
from localmoe.engine import Engine
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy

TOKENS = 120


@pytest.fixture(scope="module", params=["its own draft", "another model"])
def engine(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[Engine]:
    folder = tiny(ARCHITECTURE)[0]
    other: dict[str, Any] = {"drafter": "model", "draft_model": str(folder)}
    made = load_with_slots(folder, 12, **(other if request.param == "another model" else {}))
    yield made
    made.close()


@pytest.mark.slow(but=1)
def test_text_in_circles_is_looked_up_and_stays_as_it_was(engine: Engine) -> None:
    plain = ask(engine, PROMPT, TOKENS, draft_length=0)
    engine.live.record_timeline(3 * TOKENS)
    answers = [ask(engine, PROMPT, TOKENS, draft_length="auto") for _ in range(3)]
    for answer in answers:
        assert answer.tokens == plain.tokens
        assert answer.stats.looked_up <= answer.stats.drafted
    spans = [span for step in engine.live.timeline() for span in step.spans if span.lane == "draft"]
    engine.live.record_timeline(None)
    all_stats = [answer.stats for answer in answers if not answer.stats.draft_aside]
    counts = [stats.drafted - stats.looked_up + stats.left_out for stats in all_stats]
    assert sum(counts) == sum(span.name.startswith("token") for span in spans), "by the draft's passes"
    assert sum(answer.stats.looked_up for answer in answers) > 20
    assert not engine.info().looks_up or engine.plan.draft_aside, "which by the clock it may be"


@pytest.mark.slow(but=1)
def test_whoever_asks_for_a_length_or_for_no_lookups_gets_drafts_alone(engine: Engine) -> None:
    plain = ask(engine, PROMPT, TOKENS, draft_length=0)
    for how in ({"draft_length": 4}, {"draft_length": "auto", "switches": Switches(look_up=False)}):
        answer = ask(engine, PROMPT, TOKENS, **how)
        assert answer.tokens == plain.tokens and answer.stats.looked_up == 0
    assert plain.stats.looked_up == plain.stats.drafted == 0


@pytest.mark.slow(but=1)
def test_policies_hear_of_lookups_as_of_no_drafts_that_take_next_to_no_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe, told = MoeSpeqPolicy.observe, list[float]()

    def listen(policy: MoeSpeqPolicy, event: Event) -> Sequence[PrefetchRequest]:
        if isinstance(event, RatesMeasured) and event.rates.draft_token_s is not None:
            told.append(event.rates.draft_token_s)
        return observe(policy, event)

    monkeypatch.setattr(MoeSpeqPolicy, "observe", listen)
    engine.reset()
    ask(engine, PROMPT, TOKENS, draft_length=4)
    least_s, answers = min(told), [ask(engine, PROMPT, TOKENS, draft_length="auto") for _ in range(3)]
    assert sum(answer.stats.looked_up for answer in answers) > 20
    assert min(told) > least_s / 8, "a lookup takes a fiftieth of a pass"
