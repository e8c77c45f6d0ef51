"""The page's choice of who drafts: the model in low bits, or the MTP layer that some models have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from app_process import wait_for
from fake_engine import FakeLoader
from safetensors.torch import load as tensors_of
from support.hub_home import REPO, hub_and_home
from support.hub_server import files_of
from support.mtp_models import CHANGES, mtp_model
from support.tiny_models import tiny_model, write_model

from app.bench.service import BenchmarkService
from app.bench_html import result_html
from app.engine_holder import EngineHolder
from app.engine_status import EngineStatus
from app.load_preview import facts_for, preview_html
from app.main import load_engine
from app.models.fits import Fits
from app.models.service import ModelsService
from app.panel import panel_html
from app.service import ChatService
from app.settings import AnswerSettings, LoadSettings, SettingsStore
from app.status_html import header_html, share_html
from app.texts import ENGLISH
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import DraftError, NoMtpLayerError
from localmoe.core.model_facts import ModelFacts
from localmoe.engine.engine import Engine
from localmoe.engine.facts import local_facts, repo_facts
from localmoe.hardware.facts import Gpu
from localmoe.hardware.probe import probe_hardware

NO_LAYER = "this model has no MTP layer that can draft"
BY_LAYER = LoadSettings(drafter="mtp")


def load(service: ChatService, wanted: LoadSettings) -> EngineStatus:
    assert service.apply_load(wanted) == ""
    wait_for(lambda: service.holder.status().phase == "ready", what="the fake model")
    wait_for(lambda: service.store.load == wanted, what="what has led to a model to be kept")
    return service.holder.status()


def test_the_choice_takes_a_load_and_is_kept(service: ChatService, loader: FakeLoader) -> None:
    assert not service.applies_live(BY_LAYER)
    status = load(service, BY_LAYER)
    assert loader.engines[1].config.drafter == "mtp" and not status.lacks_mtp
    assert service.applies_live(replace(BY_LAYER, vram_budget="24MiB"))
    assert SettingsStore(service.home / "settings.json").load == BY_LAYER
    assert "its MTP layer" in share_html(status) and NO_LAYER not in header_html(status)
    panel = panel_html(status, None)
    assert "MTP layer" in panel and "low-bit draft" not in panel
    assert "its MTP layer drafts" in service.apply_load(replace(BY_LAYER, better_draft="off")) + (
        service.apply_load(BY_LAYER)
    )


def test_a_choice_that_would_load_the_same_loads_nothing(
    service: ChatService, loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(lambda: service.holder.status().phase == "ready", what="the fake model")
    loads = len(loader.engines)
    for drafter in ("self", "auto", "self"):  # layer by layer no MTP layer drafts by itself
        wanted = replace(service.load_settings, drafter=drafter)
        assert service.apply_load(wanted).startswith("Applied") and service.store.load == wanted
    assert len(loader.engines) == loads
    info = service.holder.status().info
    assert info is not None
    whole = replace(info, passes="whole steps on the GPU")  # type: ignore[type-var]
    for drafter, asked, alike in (
        ("self", "auto", True), ("auto", "self", False), ("mtp", "auto", False), ("auto", "mtp", False),
    ):  # fmt: skip
        status = EngineStatus("ready", "m", info=whole, drafter=asked)  # type: ignore[arg-type]
        assert status.drafts_alike(drafter) == alike, (drafter, asked)  # type: ignore[arg-type]
    by_layer = EngineStatus("ready", "m", info=replace(whole, drafter="mtp"), drafter="auto")  # type: ignore[type-var]
    assert not by_layer.drafts_alike("self")
    assert not EngineStatus("loading", "m").drafts_alike("self")


def test_a_model_without_the_layer_is_loaded_and_the_page_says_so(
    service: ChatService, loader: FakeLoader
) -> None:
    load(service, BY_LAYER)
    status = load(service, replace(BY_LAYER, model="other-moe"))
    assert status.lacks_mtp and loader.engines[2].config.drafter == "self"
    assert NO_LAYER in header_html(status) and NO_LAYER in share_html(status)
    assert "low-bit draft" in panel_html(status, None)
    assert service.applies_live(replace(BY_LAYER, model="other-moe", vram_budget="24MiB"))
    assert not load(service, BY_LAYER).lacks_mtp, "the choice holds for the next model"


@pytest.fixture
def models(service: ChatService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelsService]:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    machine = probe_hardware(measure=False)
    made = ModelsService(tmp_path, service, {})
    made.fits = Fits(
        tmp_path / "hardware.json", service.holder.status, made._load_config, lambda: False,
        lambda measure: replace(machine, gpus=(), memory_copy_bytes_per_s=20e9),
    )  # fmt: skip
    wait_for(lambda: made.fits.hardware() is not None and made.fits.measured, 60, "the machine")
    yield made
    made.close()


def test_a_ready_made_draft_takes_the_layers_place(models: ModelsService, tmp_path: Path) -> None:
    load(models.chats, BY_LAYER)
    models.chat_with("demo", str(tmp_path))
    config = models.chats.holder.config
    assert (config.drafter, config.draft_dir) == ("auto", tmp_path)
    load(models.chats, LoadSettings(drafter="self"))
    models.chat_with("demo", str(tmp_path))
    assert models.chats.load_settings.drafter == "self", "which reads it as well"


@pytest.fixture(scope="module")
def with_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model(tmp_path_factory.mktemp("mtp"), "glm4_moe", agrees=True)


@pytest.fixture(scope="module")
def without_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_model(folder, tiny_model("glm4_moe", **CHANGES["glm4_moe"]))
    return folder


def test_the_preview_is_what_the_engine_plans(
    models: ModelsService, with_layer: Path, without_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = {str(folder): local_facts(str(folder)) for folder in (with_layer, without_layer)}
    monkeypatch.setattr("app.models.shelf.ShelfView.facts_of", lambda self, name: looked_at.get(name))
    wanted = replace(BY_LAYER, model=str(with_layer), draft_bits="8", vram_budget="64MiB")
    config = wanted.engine_config(AnswerSettings())
    facts = facts_for(models, wanted, config)
    assert facts is not None and ModelFacts.from_dict(facts.as_dict()) == facts
    fit = models.fits.fit(facts, config=config)
    with Engine.load(wanted.model, config) as engine:
        assert fit is not None and fit.plan is not None
        assert fit.plan.draft_bytes == engine.plan.draft_bytes > 0, "whatever the bits"
        assert engine.device_memory()["draft"] <= engine.plan.draft_bytes
    said = preview_html(models, wanted, ENGLISH)
    assert "its MTP layer (" in said and "predicted" in said and "no MTP layer" not in said
    said = preview_html(models, replace(wanted, drafter="self"), ENGLISH)
    assert "draft of 8 bits (" in said and "MTP" not in said
    said = preview_html(models, replace(wanted, model=str(without_layer)), ENGLISH)
    assert "draft of 8 bits (" in said and "no MTP layer" in said
    models.chats.load_settings = replace(wanted, drafter="self", draft="/drafts/gptq")
    assert "ready-made draft is not used" in preview_html(models, wanted, ENGLISH)


def test_on_a_gpu_the_preview_says_that_the_layer_drafts_unasked(
    models: ModelsService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(mtp_model(tmp_path / "m", "glm4_moe", dtype=torch.bfloat16))
    facts = local_facts(model)
    assert facts.mtp is not None and not facts.unsuited
    monkeypatch.setattr("app.models.shelf.ShelfView.facts_of", lambda self, name: facts)
    machine = models.fits.hardware()
    assert machine is not None
    card = Gpu(0, "a card", 12 << 30, 11 << 30, None, (8, 9), 4, 16, 25e9, 400e9)
    monkeypatch.setattr(models.fits, "hardware", lambda: replace(machine, gpus=(card,)))
    unasked = LoadSettings(model=model)
    assert "its MTP layer (" in preview_html(models, unasked, ENGLISH)
    for own in ({"drafter": "self"}, {"draft_bits": "8"}):
        said = preview_html(models, replace(unasked, **own), ENGLISH)
        assert "draft of" in said and "MTP" not in said


def test_the_layer_of_a_model_on_the_hub_is_known_by_its_index(with_layer: Path, tmp_path: Path) -> None:
    files = files_of(with_layer)
    weights = files.pop("model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(tensors_of(weights), shard)}
    with hub_and_home(tmp_path) as hub:
        hub.commit(
            REPO, {**files, shard: weights, "model.safetensors.index.json": json.dumps(index).encode()}
        )
        facts = repo_facts(REPO)
    here = local_facts(str(with_layer)).mtp
    assert facts.mtp == here is not None and ModelFacts.from_dict(facts.as_dict()) == facts


def test_a_model_that_is_loaded_with_its_layer_is_counted_without_it_where_that_is_not_to_draft(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(models.chats, replace(BY_LAYER, draft_bits="8"))
    assert "its MTP layer (" in preview_html(models, BY_LAYER, ENGLISH)
    for bits, size in (("4", "2.3 MiB"), ("8", "4.5 MiB")):  # of all experts; the layer's are 2.0 MiB
        wanted = replace(BY_LAYER, drafter="self", draft_bits=bits, vram_budget="100MiB")
        said = preview_html(models, wanted, ENGLISH)
        assert f"draft of {bits} bits ({size})" in said and "MTP" not in said
    layer_by_layer = replace(BY_LAYER, drafter="auto", vram_budget="100MiB")
    assert "draft of 4 bits (" in preview_html(models, layer_by_layer, ENGLISH)
    status = models.chats.holder.status()
    whole = replace(status, info=replace(status.info, passes="whole steps on the GPU"))  # type: ignore[type-var]
    with monkeypatch.context() as patch:
        patch.setattr(models.chats.holder, "status", lambda: whole)
        assert "its MTP layer (" in preview_html(models, layer_by_layer, ENGLISH)
        for own in ({"drafter": "self"}, {"draft_bits": "8"}):  # with which a load would not have it
            said = preview_html(models, replace(layer_by_layer, **own), ENGLISH)
            assert "draft of" in said and "MTP" not in said
    load(models.chats, replace(BY_LAYER, drafter="self"))
    assert "once the model has been looked at" in preview_html(models, BY_LAYER, ENGLISH)
    monkeypatch.setattr("app.models.shelf.ShelfView.revision", 1)
    assert "once the model is loaded with them" in preview_html(models, BY_LAYER, ENGLISH), "it is not listed"


def test_predictions_leave_out_what_the_layer_drafts(service: ChatService) -> None:
    load(service, BY_LAYER)
    benchmarks = BenchmarkService(service)

    def predict(lengths: list[str]) -> str:
        benchmarks.what_if(["rtx-4060"], ["on-demand"], lengths, 1, 6, "auto")
        wait_for(lambda: (view := benchmarks.view()) is not None and view.phase != "running", 60, "its end")
        view = benchmarks.view()
        assert view is not None
        return view.error

    assert predict(["0", "4"]) == ""
    result = benchmarks.results.list()[0][1]
    assert [row["draft_length"] for row in result["rows"]] == [0] and result["acceptance"] is None
    assert "MTP layer drafts, which is not predicted" in result_html(result, ENGLISH)
    assert "choose draft length 0" in predict(["4"])


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHolder]:
    """With the real engine."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    made = EngineHolder(load_engine)
    yield made
    made.close()


def loaded(holder: EngineHolder, model: Path, config: EngineConfig) -> EngineStatus:
    holder.load(str(model), config)
    wait_for(lambda: holder.status().phase != "loading", 60, "the model")
    assert holder.status().error == ""
    return holder.status()


def test_the_real_engine_drafts_with_the_layer_and_has_nothing_better_to_build(
    holder: EngineHolder, with_layer: Path
) -> None:
    status = loaded(holder, with_layer, EngineConfig(drafter="mtp", improve_draft=True))
    assert not status.lacks_mtp and "its MTP layer" in share_html(status)
    engine, request = holder.engine(), GenerationRequest(prompt_token_ids=(1, 2, 3), max_new_tokens=12)
    stats = [event.stats for event in engine.stream(request)][-1]
    assert stats.drafted and stats.acceptance_rate == 1.0 and stats.expert_match_rate is None
    assert engine.why_no_better_draft() == "its MTP layer drafts"
    assert holder.status().improvement is None and holder.status().improvement_note == ""
    with pytest.raises(DraftError, match=r"is loaded \(its MTP layer drafts\), so it cannot answer alone"):
        list(engine.stream(replace(request, draft_only=True)))


def test_the_real_engine_refuses_what_the_page_loads_otherwise(
    holder: EngineHolder, without_layer: Path
) -> None:
    config = EngineConfig(drafter="mtp", vram_budget_bytes=64 << 20)
    with pytest.raises(NoMtpLayerError) as refusal:
        Engine.load(str(without_layer), config)
    assert str(refusal.value).endswith("(MTP): choose another drafter.") and "--" not in str(refusal.value)
    status = loaded(holder, without_layer, config)
    assert status.lacks_mtp and status.plan is not None and status.plan.drafting
    assert NO_LAYER in header_html(status) and "INT4" in share_html(status)
