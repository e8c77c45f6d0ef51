"""The page's choice of where experts lie: in RAM, or in a file on the disk of which RAM holds what it can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from app_process import wait_for
from fake_engine import EXPERTS, LAYERS, FakeLoader
from little_ram import COMPUTER, FACTS, GIB, LARGE, SMALL, models_with_little_ram, set_computer
from support.tiny_models import tiny_model, write_model

from app import words
from app.bench.service import BenchmarkService
from app.bench_html import result_html
from app.engine_status import EngineStatus
from app.load_preview import preview_html
from app.main import choose_settings, parse_arguments
from app.models.service import BACKGROUND, ModelsService
from app.models_view import shelf_html
from app.service import ChatService
from app.settings import LoadSettings, SettingsStore
from app.status_html import share_html
from app.tabs.models import _acts
from app.texts import ENGLISH, IN_CHINESE
from localmoe.core.errors import ConfigError
from localmoe.core.types import Progress
from localmoe.hub.names import safe_name
from localmoe.hub.process_marks import own_mark

ON_DISK = LoadSettings(experts_on="disk")


def load(service: ChatService, wanted: LoadSettings) -> EngineStatus:
    assert service.apply_load(wanted) == ""
    wait_for(lambda: service.holder.status().phase == "ready", what="the fake model")
    wait_for(lambda: service.store.load == wanted, what="what has led to a model to be kept")
    return service.holder.status()


@pytest.fixture
def models(service: ChatService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelsService]:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    with models_with_little_ram(service, tmp_path) as made:
        yield made


def test_the_choice_takes_a_load_and_is_kept_for_this_model(service: ChatService, loader: FakeLoader) -> None:
    assert not service.applies_live(ON_DISK)
    status = load(service, replace(ON_DISK, ram_budget="5GiB"))
    config = loader.engines[1].config
    assert (config.experts_on, config.ram_budget_bytes) == ("disk", 5 << 30)
    assert SettingsStore(service.home / "settings.json").load == replace(ON_DISK, ram_budget="5GiB")
    assert not service.applies_live(ON_DISK) and not service.applies_live(LoadSettings())
    assert f"RAM has room for 25 % of the experts (296 of {LAYERS * EXPERTS:,})" in share_html(status)
    choose_settings(service, parse_arguments(["--model", "demo"]))
    assert service.load_settings.experts_on == "disk"
    choose_settings(service, parse_arguments(["--model", "other-moe"]))
    assert service.load_settings == LoadSettings("other-moe", ram_budget="5GiB"), "it is chosen, not taken"


def test_another_model_that_is_chatted_with_lies_in_ram_and_this_one_stays_where_it_is(
    models: ModelsService, loader: FakeLoader
) -> None:
    load(models.chats, ON_DISK)
    models.chat_with("demo", BACKGROUND)
    assert models.opened == 1 and len(loader.engines) == 2, "it is loaded as it was chosen"
    models.chat_with(SMALL)
    wait_for(lambda: models.progress_flow() == 2, what="the load")
    assert models.chats.holder.config.experts_on == "ram"


def test_in_chinese_it_is_said_where_experts_are_computed_and_what_a_load_writes(
    service: ChatService,
) -> None:
    status = load(service, ON_DISK)
    assert "不在内存中的取自磁盘 (2 个线程)" in share_html(status, t=IN_CHINESE)
    assert "内存放得下 25 % 的专家" in share_html(status, t=IN_CHINESE)
    matrix = "VRAM, PCIe and CPU (6 threads, a matrix unit for prompts)"
    assert words.lanes(matrix, IN_CHINESE) == "显存、PCIe 与 CPU (6 个线程, 提示使用矩阵单元)"
    assert words.lanes(matrix, ENGLISH) == matrix
    assert words.lanes("VRAM and PCIe (as set)", ENGLISH) == "VRAM and PCIe (as set)"
    writing = Progress("Writing the experts' file", 1, 2, "bytes")
    assert words.progress(writing, IN_CHINESE)[0].startswith("正在写入专家文件")


def test_the_preview_says_what_the_file_takes_and_promises_no_speed(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_ram, on_disk = LoadSettings(LARGE), replace(ON_DISK, model=LARGE)
    said = preview_html(models, in_ram, ENGLISH)
    assert "of host RAM" in said and "keep them on the disk" in said and "lm-alert" in said
    said = preview_html(models, on_disk, ENGLISH)
    assert "RAM has room for" in said and "predicted)" not in said and "lm-alert" not in said
    assert "takes 17.7 GiB of the disk" in said and "Answers are slower" in said
    assert "Apply loads 26.7 GiB again and writes a file of 17.7 GiB" in said
    less = preview_html(models, replace(on_disk, ram_budget="2GiB"), ENGLISH)
    assert "RAM has room for 11 % of the experts" in less
    assert "at least" in preview_html(models, replace(on_disk, ram_budget="2MiB"), ENGLISH)
    said = preview_html(models, replace(ON_DISK, model=SMALL), ENGLISH)
    assert "RAM has room for all of them" in said and "slower" not in said
    footprint = FACTS[LARGE].footprint
    written = replace(FACTS[LARGE], record_files=(footprint.total_experts * footprint.bf12_expert_bytes,))
    monkeypatch.setattr("app.load_preview.facts_for", lambda *_: written)
    said = preview_html(models, on_disk, ENGLISH)
    assert "is on the disk already" in said and "again, without its experts" in said


def test_a_disk_without_room_for_the_file_is_said_before_apply(models: ModelsService) -> None:
    set_computer(models, replace(COMPUTER, disk_free_bytes=GIB))
    said = preview_html(models, replace(ON_DISK, model=LARGE), ENGLISH)
    assert "too little room for the experts&#x27; file" in said and "Apply" not in said


def test_places_in_ram_that_hold_no_expert_yet_are_not_given_back_by_the_next_load(
    models: ModelsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = models.chats.holder.status()
    assert status.plan is not None
    plan = replace(status.plan, host_bytes=12 * GIB, disk_bytes=20 * GIB, ram_experts=100)
    monkeypatch.setattr(models.fits, "_status", lambda: replace(status, plan=plan))
    models.fits._probe = lambda measure: replace(COMPUTER, ram_available_bytes=2 * GIB)
    models.fits._look()
    hardware = models.fits.hardware()
    assert hardware is not None and hardware.ram_available_bytes < 8 * GIB, "of which this process is"


def test_the_card_of_a_model_says_what_was_made_of_it_and_deletes_the_experts_file(
    models: ModelsService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / f"drafts/{safe_name(LARGE)}-0123456789ab"
    home.mkdir(parents=True)
    (home / "experts-bf12-bfloat16.records").write_bytes(bytes(3 << 20))
    listed = models.shelf._models()
    (one,) = (one for one in listed if one.name == LARGE)
    made = replace(one, made_bytes=5 << 20, record_bytes=3 << 20)
    models.shelf._models = lambda: [made]
    models.shelf.refresh()
    wait_for(lambda: models.shelf.view().models == (made,), what="the shelf")
    html = shelf_html(models, ENGLISH)
    assert "made of it: 5.0 MiB" in html and "Delete and free 26.7 GiB?" in html
    assert 'data-act="delete-records"' in html and "Delete and free 3.0 MiB?" in html
    assert "3.0 MiB are free again" in _acts(models)["delete-records"](LARGE, "")
    assert not home.exists()
    monkeypatch.setattr(models, "uses_made_of", lambda name: True)
    assert "delete-records" not in shelf_html(models, ENGLISH)
    with pytest.raises(ConfigError, match="load another model first"):
        models.delete_records(LARGE)


def test_what_a_killed_load_left_of_a_file_takes_no_room_from_what_fits(
    models: ModelsService, tmp_path: Path
) -> None:
    """Its own load would clear it away, were it not told before that the disk has no room for it."""
    gone, folder = max(psutil.pids()) + 10_000, tmp_path / "drafts/my-model-0123456789ab"
    folder.mkdir(parents=True)
    left = [folder / f".experts-bf12-bfloat16.records.{mark}-0.part" for mark in (f"{gone}-1", own_mark())]
    for path in left:
        path.write_bytes(b"x")
    models.start()
    wait_for(lambda: models.shelf.view().left == (("my-model", 1),), what="the list")
    assert [path.exists() for path in left] == [False, True], "the other is being written"


def test_what_was_made_of_a_folders_model_has_a_card_that_deletes_it(
    models: ModelsService, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "my model", tiny_model("qwen2_moe"))
    home = tmp_path / "drafts/my-model-0123456789ab"
    home.mkdir(parents=True)
    (home / "experts-bf12-bfloat16.records").write_bytes(bytes(3 << 20))
    models.open_folder(str(folder))
    wait_for(lambda: models.progress_flow() == 1, what="the load")
    models.shelf.refresh()
    wait_for(lambda: models.shelf.view().left == (("my-model", 3 << 20),), what="the shelf")
    assert "my-model" not in shelf_html(models, ENGLISH), "it is in use"
    with pytest.raises(ConfigError, match="my-model is loaded"):
        models.delete_left("my-model")
    load(models.chats, LoadSettings("demo"))
    html = shelf_html(models, ENGLISH)
    assert "3.0 MiB of drafts or experts" in html and 'data-act="delete-left" data-key="my-model"' in html
    assert "3.0 MiB are free again" in _acts(models)["delete-left"]("my-model", "")
    wait_for(lambda: models.shelf.view().left == (), what="the shelf")
    assert not home.exists() and folder.exists()
    with pytest.raises(ConfigError, match="gone already"):
        models.delete_left("my-model")


def test_predictions_are_of_computers_with_this_disk_where_a_cpu_computes(service: ChatService) -> None:
    load(service, ON_DISK)
    engine = service.holder.engine()
    results = []
    for rate in (None, 20e9):
        engine.cpu_bytes_per_s = rate  # type: ignore[attr-defined]
        benchmarks = BenchmarkService(service)
        benchmarks.what_if(["rtx-4060"], ["on-demand"], ["0"], 1, 6, "auto")
        wait_for(lambda: (view := benchmarks.view()) is not None and view.phase != "running", 60, "its end")  # noqa: B023
        results.append(benchmarks.results.list()[0][1])
    in_ram, from_disk = results
    assert in_ram["disk_bytes_per_s"] is None and in_ram["rows"][0]["disk_bytes_per_token"] == 0
    assert from_disk["disk_bytes_per_s"] == pytest.approx(2e9)
    html = result_html(from_disk, ENGLISH)
    assert f"as many experts as here, {engine.plan.ram_experts:,}" in html and "2.0 GB/s" in html
    assert "RAM holds all" not in html


def test_predictions_say_that_they_are_of_computers_whose_ram_holds_all_experts(service: ChatService) -> None:
    load(service, ON_DISK)
    benchmarks = BenchmarkService(service)
    benchmarks.what_if(["rtx-4060"], ["on-demand"], ["0"], 1, 6, "auto")
    wait_for(lambda: (view := benchmarks.view()) is not None and view.phase != "running", 60, "its end")
    ((_, result),) = benchmarks.results.list()
    assert "RAM holds all experts: from the disk" in result_html(result, ENGLISH)
    assert "RAM holds" not in result_html({**result, "from_disk": False}, ENGLISH)
