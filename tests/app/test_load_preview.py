"""What the page says of load settings before they are applied: the planner's words, and the cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_process import wait_for
from fake_engine import LAYERS, MIB, FakeLoader

from app.load_preview import budgets_for, is_known, preview_html
from app.messages import history_entries, turn_entries
from app.models.fits import Fits
from app.models.looker import UnansweredError
from app.models.service import ModelsService
from app.models.shelf import Shelf
from app.models_view import shelf_html
from app.panel import panel_html
from app.service import ChatService
from app.settings import AnswerSettings, LoadSettings
from app.status_html import header_html
from app.texts import ENGLISH
from localmoe.core.config import EngineConfig
from localmoe.core.errors import BudgetError, LocalMoeError, UnsupportedModelError
from localmoe.core.model_facts import ModelFacts
from localmoe.hardware.facts import Hardware
from localmoe.hub.local_models import LocalModel

COMPUTER = Hardware(
    (), "", "a CPU", 8, 16, (), 64 << 30, 60 << 30, 500 << 30, 20e9, "Linux", "3.12", "2"
)  # fmt: skip


@pytest.fixture
def models(service: ChatService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelsService]:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    made = ModelsService(tmp_path, service, {})
    made.fits = Fits(
        tmp_path / "hardware.json", service.holder.status, made._load_config, lambda: False,
        lambda measure: COMPUTER,
    )  # fmt: skip
    wait_for(lambda: made.fits.hardware() is not None and made.fits.measured, 60, "the machine")
    yield made
    made.close()


@pytest.mark.parametrize("rate", ["20e9", '"fast"', "{}", "NaN", "-1", "1%s" % ("0" * 400), "[" * 100_000])
def test_only_rates_that_make_sense_are_taken_from_the_file(
    service: ChatService, tmp_path: Path, rate: str
) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(COMPUTER.as_dict()).replace("20000000000.0", rate))
    fits = Fits(path, service.holder.status, EngineConfig, lambda: False, lambda measure: COMPUTER)
    fits.hardware()
    wait_for(lambda: fits.measured, 60, "the machine")
    assert (fits._measured is COMPUTER) == (rate != "20e9") and fits._measured == COMPUTER
    fits.close()


@pytest.mark.parametrize("error", [UnansweredError("It took <b> long."), UnsupportedModelError("<b> dense.")])
def test_of_a_model_that_cannot_be_looked_at_the_reason_is_said(
    models: ModelsService, tmp_path: Path, error: LocalMoeError
) -> None:
    def facts(name: str) -> ModelFacts:
        raise error

    odd = LocalModel("org/odd", tmp_path / "odd", 100, "qwen2_moe", (), "localmoe")
    models.shelf = Shelf(facts, lambda: [odd])
    for chosen in ("org/odd", str(odd.folder)):
        wanted = replace(models.chats.load_settings, model=chosen)
        assert is_known(models, wanted) == (chosen != "org/odd")
        models.shelf.refresh(closely=True)
        wait_for(lambda: models.shelf.view().facts_of("org/odd"), what="the failure")
        assert is_known(models, wanted), "it need not be asked again"
        said = str(error).replace("<b>", "&lt;b&gt;")
        assert said in preview_html(models, wanted, ENGLISH) and said in shelf_html(models, ENGLISH)


def test_the_words_are_the_planners_and_say_what_apply_costs(models: ModelsService) -> None:
    now = models.chats.load_settings
    said = preview_html(models, now, ENGLISH)
    assert "computed where they lie in RAM" in said and "(predicted)" in said and "Apply" not in said
    budgets = budgets_for(models, now)
    status = models.chats.holder.status()
    assert status.plan is not None and status.footprint is not None
    given_back = status.plan.host_bytes + sum(status.memory.values())  # by the model that is loaded
    assert budgets is not None and budgets.free_bytes == (60 << 30) + given_back
    assert budgets.total_bytes == 64 << 30
    smaller = replace(now, vram_budget=f"{(budgets.least_bytes + budgets.most_bytes) // 2 // MIB}MiB")
    said = preview_html(models, smaller, ENGLISH)
    fit = models.fits.fit(_facts(models), config=smaller.engine_config(models.chats.answers))
    assert fit is not None and fit.plan is not None and 0 < fit.plan.num_slots < LAYERS * 148
    assert f"({fit.plan.num_slots} of 1,184)" in said and "nothing is loaded again" in said
    assert f"at most {fit.tokens_per_s:.0f} tok/s (predicted)" in said
    for change in ({"draft_bits": "8"}, {"context": "512"}, {"lanes": "vram+link"}):
        said = preview_html(models, replace(now, **change), ENGLISH)
        assert "Apply loads 49.0 MiB again: about" in said
    eight = preview_html(models, replace(now, draft_bits="8"), ENGLISH)
    assert "draft of 8 bits (4.5 MiB)" in eight  # two matrices of 4 bits on a CPU
    small = preview_html(models, replace(now, vram_budget="1MiB"), ENGLISH)
    assert "too small" in small and 'data-act="use-budget"' in small
    assert "lots&#x27; is not a size" in preview_html(models, replace(now, vram_budget="lots"), ENGLISH)
    assert "--lanes auto" in preview_html(models, replace(now, lanes="vram+cpu"), ENGLISH)
    assert "looked at" in preview_html(models, replace(now, model="org/unknown"), ENGLISH)


def test_a_load_reads_what_the_files_have(models: ModelsService, tmp_path: Path) -> None:
    """Which is half as much of a model that is published in FP8."""
    now, facts = models.chats.load_settings, replace(_facts(models), num_bytes=25 * MIB)
    listed = LocalModel(now.model, tmp_path / "eight", 25 * MIB, "qwen2_moe", (), "localmoe")
    models.shelf = Shelf(lambda name: facts, lambda: [listed])
    models.shelf.refresh(closely=True)
    wait_for(lambda: models.shelf.view().facts_of(now.model), what="the facts")
    for change in ({"context": "512"}, {"draft_bits": "8"}):
        assert "Apply loads 25.0 MiB again" in preview_html(models, replace(now, **change), ENGLISH)


def _facts(models: ModelsService) -> Any:
    from app.load_preview import facts_for

    now = models.chats.load_settings
    return facts_for(models, now, now.engine_config(models.chats.answers))


def test_a_budget_is_applied_live_and_draft_bits_by_a_load(service: ChatService, loader: FakeLoader) -> None:
    assert "24.0 MiB" in service.apply_load(LoadSettings(vram_budget="24MiB"))
    assert len(loader.engines) == 1
    assert service.apply_load(LoadSettings(vram_budget="24MiB", draft_bits="2")) == ""
    wait_for(lambda: len(loader.engines) == 2 and service.holder.status().phase == "ready")
    assert loader.engines[1].config.draft_bits == 2 and service.holder.status().load_s > 0


def test_a_budget_that_only_a_load_can_keep_takes_one_and_says_so(
    models: ModelsService, loader: FakeLoader
) -> None:
    """The context that nobody asked for was as long as the budget before had room for."""
    service, now = models.chats, models.chats.load_settings
    wait_for(lambda: models.fits.hardware() is not None)
    smaller = replace(now, vram_budget="100MiB")
    assert "Apply changes this at once" in preview_html(models, smaller, ENGLISH)
    loader.engines[0].least_loaded = 200 * MIB
    assert "Apply loads 49.0 MiB again" in preview_html(models, smaller, ENGLISH)
    with pytest.raises(BudgetError, match="too small"):
        service.apply_load(replace(now, vram_budget="1MiB"))  # no load would do, so none is begun
    assert len(loader.engines) == 1 and not loader.engines[0].closed
    assert service.apply_load(smaller) == ""
    wait_for(lambda: len(loader.engines) == 2 and service.holder.status().phase == "ready")
    assert loader.engines[1].config.vram_budget_bytes == 100 * MIB


def test_memory_that_runs_out_during_an_answer_offers_a_budget(
    models: ModelsService, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, engine = models.chats, loader.engines[0]
    failure = BudgetError("The GPU's memory ran out: 20 MiB would do.", budget_bytes=20 * MIB)
    monkeypatch.setattr(engine, "stream", lambda *_: (_ for _ in ()).throw(failure))
    service.send(None, "hello")
    wait_for(lambda: not service.runner.running())
    status = service.holder.status()
    assert status.phase == "ready" and "20 MiB would do" in header_html(status)
    assert "Use 20.0 MiB</button>" in header_html(status)
    models.load_anew(budget_bytes=20 * MIB)
    status = service.holder.status()
    assert status.plan is not None and status.plan.budget_bytes == 20 * MIB and status.better_budget is None
    assert "would do" not in header_html(status) and len(loader.engines) == 1


def test_an_approximate_answer_says_so_wherever_it_shows(service: ChatService, loader: FakeLoader) -> None:
    service.set_answers({"approximate": True})
    chat = service.send(None, "tell me a long story")
    wait_for(lambda: (view := service.runner.view()) is not None and view.stats is not None)
    job = service.runner.view()
    assert loader.engines[0].requests[-1].draft_only and job is not None
    label = "approximate: written by the draft alone"
    assert label in json.dumps(turn_entries(service.chats.get(chat).messages, job))
    assert "approximate" in panel_html(service.holder.status(), job)
    service.runner.stop_and_wait()
    assert label in json.dumps(history_entries(service.chats.get(chat).messages))
    service.set_answers({"approximate": AnswerSettings().approximate})
    chat = service.send(None, "hello")
    service.runner.stop_and_wait()
    assert label not in json.dumps(history_entries(service.chats.get(chat).messages))
