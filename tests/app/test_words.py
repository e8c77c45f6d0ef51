"""What the page says of drafting, and of the sampling that a model's makers recommend."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_engine import FakeEngine

from app import words
from app.engine_status import EngineStatus
from app.status_html import own_sampling_html
from app.texts import IN_CHINESE
from localmoe.core.config import DraftLength, EngineConfig, SamplingConfig


def status(
    *, draft_length: DraftLength = "auto", looks_up: bool = False, aside: bool = False
) -> EngineStatus:
    engine = FakeEngine("fake", EngineConfig(draft_length=draft_length))
    plan = replace(engine.plan, draft_aside=aside)
    info = replace(engine.info(), looks_up=looks_up)  # type: ignore[type-var]
    return EngineStatus(phase="ready", plan=plan, info=info)  # type: ignore[arg-type]


def test_it_says_who_drafts_or_why_nobody_does() -> None:
    assert words.drafting(status()) == "drafting on"
    assert words.drafting(status(aside=True)) == "draft laid aside"
    assert words.drafting(status(draft_length=0)) == "drafting off: turned off"
    assert words.drafting(status(draft_length=0, looks_up=True)) == "drafting by prompt lookup"
    lacking = replace(status(), drafter="mtp")
    assert words.drafting(lacking) == "drafting on; this model has no MTP layer that can draft"
    assert words.draft(lacking).endswith("group 128 (this model has no MTP layer that can draft)")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (SamplingConfig(1.0, 0.95, 64), "temperature 1, top-k 64, top-p 0.95"),
        (SamplingConfig(1.0), "temperature 1"), (SamplingConfig(), "always the likeliest token"),
        (SamplingConfig(top_k=20, repetition_penalty=1.05),
         "always the likeliest token, repetition penalty 1.05"),
        (SamplingConfig(0.6, min_p=0.05, repetition_penalty=1.1, seed=3),
         "temperature 0.6, min-p 0.05, repetition penalty 1.1"),
    ],
)  # fmt: skip
def test_sampling_is_said_without_what_is_off(config: SamplingConfig, said: str) -> None:
    assert words.sampling(config) == said


def test_the_page_says_what_the_loaded_model_recommends() -> None:
    assert own_sampling_html(EngineStatus(phase="loading", model="m")) == ""
    without = own_sampling_html(status())
    assert "fake-moe has no recommendation: the numbers below are used." in without
    ready = status()
    info = replace(ready.info, name="<b>", own_sampling=SamplingConfig(0.7, 0.9))  # type: ignore[type-var]
    ready = replace(ready, info=info)
    assert ">For &lt;b&gt;: temperature 0.7, top-p 0.9.<" in own_sampling_html(ready)
    assert "温度 0.7, top-p 0.9。<" in own_sampling_html(ready, IN_CHINESE)
