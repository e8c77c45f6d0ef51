"""What the status line says of drafting."""

from __future__ import annotations

from dataclasses import replace

from fake_engine import FakeEngine

from app import words
from app.engine_status import EngineStatus
from localmoe.core.config import DraftLength, EngineConfig


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
