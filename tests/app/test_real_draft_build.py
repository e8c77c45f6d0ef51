"""The better draft of the embedded model, built by the real engine behind the page's holder: answers stay the
same before, during and after it, and nobody restarts anything."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from app_process import ROOT, wait_for

from app.engine_holder import EngineHolder
from app.engine_status import EngineStatus
from app.main import load_engine
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.draft_config import DraftSettings, GptqSettings
from localmoe.core.errors import LocalMoeError
from localmoe.core.types import Message
from localmoe.engine import draft_upgrade
from localmoe.engine.loading import EngineParts

QUESTION = GenerationRequest((Message("user", "Tell me a story about a fox."),), max_new_tokens=32)
BUILD_S = 90.0  # it takes a few seconds on two cores that have nothing else to do


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The embedded model without its draft, and an empty home for drafts."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    few = replace(GptqSettings(), num_tokens=8192)  # an eighth of what is built with otherwise
    monkeypatch.setattr(draft_upgrade, "DraftSettings", lambda method, gptq: DraftSettings(method, few))
    folder = tmp_path / "demo"
    shutil.copytree(ROOT / "assets" / "demo-moe", folder, ignore=shutil.ignore_patterns("draft-*"))
    return folder


@pytest.fixture
def holder() -> Iterator[EngineHolder]:
    made = EngineHolder(load_engine)
    yield made
    made.close()
    assert builders() == []


def builders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "better-draft"]


def load(holder: EngineHolder, model: Path, config: EngineConfig) -> None:
    holder.load(str(model), config)
    wait_for(lambda: holder.status().phase != "loading", 60, "the model")
    assert holder.status().error == ""


def ask(holder: EngineHolder) -> list[int]:
    return [token for event in holder.engine().stream(QUESTION) for token in event.token_ids]


def done(status: EngineStatus) -> int:
    """Experts of the better draft that are finished."""
    assert status.improvement_note == ""
    report = status.improvement
    return report.done if report is not None and report.unit == "experts" else 0


def draft(status: EngineStatus) -> str:
    assert status.info is not None
    return status.info.draft


@pytest.mark.slow
def test_a_cancelled_build_leaves_the_engine_alone_until_an_answer_has_ended(
    holder: EngineHolder, model: Path
) -> None:
    load(holder, model, EngineConfig(lanes="vram+link"))
    engine, cancelled, ended = holder.engine(), threading.Event(), threading.Event()
    cancelled.set()

    def build(cancel: threading.Event | None, begun: threading.Event) -> None:
        with pytest.raises(LocalMoeError, match="cancelled"):
            engine.improve_draft(progress=lambda _: begun.set(), cancel=cancel)
        ended.set()

    stream = engine.stream(QUESTION)
    next(stream)
    threading.Thread(target=build, args=(cancelled, threading.Event())).start()
    assert not ended.wait(0.3)
    stream.close()
    assert ended.wait(30)

    ended.clear()
    begun = threading.Event()
    threading.Thread(target=build, args=(None, begun)).start()
    assert begun.wait(30)
    holder.close()  # closing ends one that nobody cancels
    assert ended.wait(10)


@pytest.mark.slow
def test_what_a_build_borrows_of_the_budget_is_shown_and_returned_between_answers(
    holder: EngineHolder, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the place where it computes is taken from the slots."""

    @contextlib.contextmanager
    def borrow(
        parts: EngineParts, settings: DraftSettings, reserve: Callable[[int], None]
    ) -> Iterator[DraftSettings]:
        reserve(4 << 20)
        try:
            yield replace(settings, device="cpu")
        finally:
            reserve(0)

    monkeypatch.setattr(draft_upgrade, "_place", borrow)
    load(holder, model, EngineConfig(vram_budget_bytes=72 << 20))
    before, whole = ask(holder), holder.status().plan
    holder.improve_draft(True)
    wait_for(lambda: done(holder.status()) > 0, BUILD_S, "the first expert")
    during = holder.status().plan
    assert whole is not None and during is not None and during.num_slots < whole.num_slots
    holder.resize(68 << 20)
    smaller = holder.status().plan
    assert smaller is not None and smaller.num_slots < during.num_slots

    stream = holder.engine().stream(QUESTION)
    tokens = list(next(stream).token_ids)
    holder.improve_draft(False)
    assert holder.engine().plan == smaller
    tokens += [token for event in stream for token in event.token_ids]
    assert tokens == before
    wait_for(lambda: builders() == [], 10, "the end of the build")
    after = holder.status().plan
    assert after is not None and after.budget_bytes == 68 << 20
    assert smaller.num_slots < after.num_slots < whole.num_slots


@pytest.mark.slow
def test_a_better_draft_is_built_behind_the_answers_and_kept(holder: EngineHolder, model: Path) -> None:
    load(holder, model, EngineConfig(lanes="vram+link"))
    before = ask(holder)
    first = holder.status()
    assert draft(first) == "INT4 RTN, group 128" and len(before) > 8

    holder.improve_draft(True)
    wait_for(lambda: done(holder.status()) > 0, BUILD_S, "the first expert")
    assert ask(holder) == before and draft(holder.status()) == "INT4 RTN, group 128"

    stream = holder.engine().stream(QUESTION)  # switched off in the middle of an answer
    tokens = list(next(stream).token_ids)
    holder.improve_draft(False)
    assert holder.status().improvement is None
    assert builders() != []  # it waits for the answer, which keeps its slots
    tokens += [token for event in stream for token in event.token_ids]
    assert tokens == before
    wait_for(lambda: builders() == [], 10, "the end of the build")
    assert draft(holder.status()) == "INT4 RTN, group 128" and holder.status().improvement_note == ""

    holder.improve_draft(True)
    wait_for(lambda: "GPTQ" in draft(holder.status()), BUILD_S, "the better draft")
    after = holder.status()
    assert (draft(after), after.improvement, after.improvement_note) == ("INT4 GPTQ, group 128", None, "")
    assert after.plan == first.plan and after.memory == holder.engine().device_memory()
    assert ask(holder) == before

    load(holder, model, EngineConfig(lanes="vram+link", improve_draft=True))
    assert draft(holder.status()) == "INT4 GPTQ, group 128"
    assert ask(holder) == before and holder.status().improvement is None
