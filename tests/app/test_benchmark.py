"""Benchmarks of the page: what is measured, refused, kept and shared. On the fake engine."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_process import wait_for
from fake_engine import FakeLoader

from app.bench.charts import TO_SHARE, charts_svg
from app.bench.results import ResultError, ResultStore, as_csv, file_name
from app.bench.service import BenchmarkService
from app.bench_html import result_html
from app.jobs import BenchmarkRunningError, JobRunningError
from app.service import ChatService
from app.settings import LoadSettings
from app.texts import ENGLISH
from localmoe.core.errors import ConfigError

SETTINGS = (["on-demand", "moe-speq"], ["0", "4"], 2, 6)


@pytest.fixture
def benchmarks(service: ChatService) -> Iterator[BenchmarkService]:
    yield BenchmarkService(service)


def wait_end(benchmarks: BenchmarkService, phase: str) -> None:
    wait_for(lambda: (view := benchmarks.view()) is not None and view.phase != "running", 60, "its end")
    view = benchmarks.view()
    assert view is not None and view.phase == phase, view


def test_a_table_is_measured_kept_and_found_again(
    benchmarks: BenchmarkService, service: ChatService, loader: FakeLoader
) -> None:
    benchmarks.run(*SETTINGS)
    wait_end(benchmarks, "done")
    engine = loader.engines[0]
    asked = [(r.policy, r.draft_length, r.max_new_tokens) for r in engine.requests]
    settings = [("on-demand", 0), ("moe-speq", 0), ("on-demand", 4), ("moe-speq", 4)]
    assert asked == [(*setting, 6) for setting in settings for _ in range(2)]
    assert engine.resets == 5  # before each setting, and at the end
    found = ResultStore(service.home / "benchmarks").list()
    assert found == benchmarks.results.list() and len(found) == 1
    result = found[0][1]
    assert result["identical_tokens"] is True and result["model"] == "fake-moe"
    assert all(row["new_tokens"] == 12 and row["tokens_per_s"] > 1 for row in result["rows"])
    assert str(Path.home()) not in json.dumps(result) and str(service.home) not in json.dumps(result)

    rows = list(csv.DictReader(io.StringIO(as_csv(result))))
    assert [(row["policy"], row["draft_length"]) for row in rows] == [(p, str(n)) for p, n in settings]
    assert rows[0]["model"] == "fake-moe" and rows[0]["machine"] and rows[0]["date"]
    assert float(rows[0]["tokens_per_s"]) == result["rows"][0]["tokens_per_s"]
    picture = ElementTree.fromstring(charts_svg(result, TO_SHARE))
    texts = " ".join(picture.itertext())
    assert "moe-speq, 4" in texts and "fake-moe · measured" in texts and rows[0]["machine"] in texts
    bars = [float(e.get("width", "0")) for e in picture.iter() if e.tag.endswith("rect") and e.get("rx")]
    speeds = [row["tokens_per_s"] for row in result["rows"]]
    longest = max(range(4), key=lambda i: speeds[i])
    assert bars[longest] == max(bars[:4]) and bars[0] == pytest.approx(
        bars[longest] * speeds[0] / speeds[longest], abs=0.1
    )
    html = result_html(result, ENGLISH)
    links = dict(re.findall(r'download="([^"]+)" href="data:[^;]+;base64,([^"]+)"', html))
    assert json.loads(base64.b64decode(links[file_name(result, "json")])) == result
    assert base64.b64decode(links[file_name(result, "csv")]).decode() == as_csv(result)

    benchmarks.results.delete(found[0][0])
    assert ResultStore(service.home / "benchmarks").list() == []
    with pytest.raises(ResultError):
        benchmarks.results.delete(found[0][0])


def test_a_benchmark_and_an_answer_exclude_each_other_and_stopping_is_quick(
    benchmarks: BenchmarkService, service: ChatService, loader: FakeLoader
) -> None:
    chat = service.send(None, "tell me a long story")
    with pytest.raises(JobRunningError):
        benchmarks.run(*SETTINGS)
    service.runner.stop()
    benchmarks.run(["on-demand"], ["0"], 60, 1000)
    for refused in (
        lambda: service.send(chat, "hello"),
        lambda: service.retry(chat),
        lambda: service.apply_load(LoadSettings(vram_budget="24MiB")),
        lambda: benchmarks.run(*SETTINGS),
    ):
        with pytest.raises(BenchmarkRunningError):
            refused()
    wait_for(lambda: (view := benchmarks.view()) is not None and view.seconds_left is not None, 60, "a pace")
    assert service.runner.busy() and not service.runner.running()
    began = time.monotonic()
    benchmarks.stop()
    wait_end(benchmarks, "stopped")
    assert time.monotonic() - began < 0.3 and benchmarks.results.list() == []
    service.send(chat, "hello")
    service.runner.stop_and_wait()
    benchmarks.run(["on-demand"], ["0"], 60, 1000)
    service.close()  # ends it before it closes the engine
    wait_end(benchmarks, "stopped")
    assert loader.engines[0].closed


def test_a_benchmark_that_is_asked_for_while_the_budget_changes_waits(
    benchmarks: BenchmarkService, loader: FakeLoader
) -> None:
    engine = loader.engines[0]
    engine.resize_s = 0.3
    wanted = LoadSettings(vram_budget="24MiB")
    change = threading.Thread(target=benchmarks.chats.apply_load, args=(wanted,))
    change.start()
    wait_for(lambda: engine.resizing)
    benchmarks.run(["on-demand"], ["0"], 1, 4)
    assert not engine.resizing and engine.plan.budget_bytes == 24 << 20
    change.join()
    wait_end(benchmarks, "done")


def test_what_if_predicts_cards_from_what_was_recorded(
    benchmarks: BenchmarkService, loader: FakeLoader
) -> None:
    benchmarks.what_if(["rtx-4060", "rtx-4090"], ["on-demand", "moe-speq"], ["0", "4", "auto"], 2, 6, "auto")
    wait_end(benchmarks, "done")
    result = benchmarks.results.list()[0][1]
    assert result["predicted"] is True and result["refused"] == {}
    assert [(r["card"], r["policy"], r["draft_length"]) for r in result["rows"]] == [
        (card, policy, length)
        for card in ("rtx-4060", "rtx-4090")
        for length in (0, 4)
        for policy in ("on-demand", "moe-speq")
    ]
    assert all(row["resident_share"] == 1.0 and row["tokens_per_s"] > 0 for row in result["rows"])
    drafted = [row["acceptance_rate"] is not None for row in result["rows"]]
    assert drafted == [False, False, True, True] * 2
    html = result_html(result, ENGLISH)
    assert "Predicted, not measured" in html and "tokens/s (predicted)" in html and "measured)" not in html
    assert "comes over PCIe alone, without" in html and result["cpu_bytes_per_s"] is None
    benchmarks.what_if(["rtx-4060"], ["on-demand"], ["0"], 1, 4, "1MiB")
    wait_end(benchmarks, "done")
    refused = benchmarks.results.list()[0][1]
    assert refused["rows"] == [] and "too small" in refused["refused"]["rtx-4060"]
    assert "too small" in result_html(refused, ENGLISH)


def test_what_if_counts_on_the_cpu_where_it_computes_experts_here(
    benchmarks: BenchmarkService, loader: FakeLoader
) -> None:
    engine, rows = loader.engines[0], []
    engine.footprint = replace(engine.footprint, expert_params=2_000_000, expert_bytes=4_000_000)
    for rate in (None, 60e9):
        engine.cpu_bytes_per_s = rate
        benchmarks.what_if(["rtx-4060"], ["on-demand"], ["0"], 2, 6, "250MiB")  # not for all of the experts
        wait_end(benchmarks, "done")
        result = benchmarks.results.list()[0][1]
        assert result["cpu_bytes_per_s"] == rate and result["refused"] == {}
        rows += result["rows"]
    assert "CPU computes what is not in their memory, at 60.0 GB/s." in result_html(result, ENGLISH)
    assert all(row["resident_share"] < 1 for row in rows)
    assert rows[0]["computed_per_token"] == 0 < rows[1]["computed_per_token"]
    assert rows[1]["tokens_per_s"] > 1.2 * rows[0]["tokens_per_s"]


def test_a_failure_is_one_sentence_and_gives_the_engine_back(
    benchmarks: BenchmarkService, service: ChatService, loader: FakeLoader, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        loader.engines[0], "stream", lambda *_: (_ for _ in ()).throw(ConfigError("It is broken."))
    )
    benchmarks.run(*SETTINGS)
    wait_end(benchmarks, "failed")
    view = benchmarks.view()
    assert view is not None and view.error == "It is broken."
    monkeypatch.undo()
    service.send(None, "hello")


@pytest.mark.parametrize(
    "choice",
    [([], ["0"], 1, 8), (["magic"], ["0"], 1, 8), (["on-demand"], [], 1, 8), (["on-demand"], ["-1"], 1, 8),
     (["on-demand"], ["0"], 0, 8), (["on-demand"], ["0"], float("nan"), 8), (["on-demand"], ["0"], 1, 1),
     (["on-demand"], ["0"], None, 8)],
)  # fmt: skip
def test_choices_that_make_no_sense_are_refused(benchmarks: BenchmarkService, choice: Any) -> None:
    with pytest.raises(ConfigError):
        benchmarks.run(*choice)
    with pytest.raises(ConfigError):
        benchmarks.what_if(["rtx-4090"], *choice, "auto")
    assert benchmarks.view() is None


def test_damaged_results_are_kept_aside(tmp_path: Path) -> None:
    sound = {
        "schema": 1, "kind": "benchmark", "created": 5.0, "model": "m", "localmoe": "0", "machine": {},
        "engine": {}, "rows": [{"policy": "on-demand", "draft_length": 0, "tokens_per_s": None}],
    }  # fmt: skip
    bad: list[Any] = [
        {**sound, "created": "yesterday"}, {**sound, "rows": [{"policy": 3}]}, {**sound, "kind": "<b>"},
        {**sound, "rows": [{"policy": "p", "draft_length": 0, "hit_rate": [1]}]}, [],
        {**sound, "rows": [{"policy": "p", "draft_length": 0, "hit_rate": 10**400}]},
        {**sound, "machine": {"gpus": 2}}, {**sound, "refused": "rtx-4060"},
        {**sound, "predicted": True, "acceptance": "0.9"}, {**sound, "cpu_bytes_per_s": [1]},
    ]  # fmt: skip
    texts = [json.dumps(sound), *map(json.dumps, bad), "", "[" * 100_000]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:032x}.json").write_text(text)
    store = ResultStore(tmp_path)
    assert [result_id for result_id, _ in store.list()] == [f"{0:032x}"]
    assert len(store.reports) == len(texts) - 1 == len(list(tmp_path.glob("*.damaged")))
    assert result_html(store.list()[0][1], ENGLISH)


def test_an_old_result_that_the_disk_does_not_let_go_costs_no_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ResultStore(tmp_path)
    result = {
        "kind": "benchmark", "model": "m", "localmoe": "0", "machine": {}, "engine": {}, "rows": [],
    }  # fmt: skip
    first = store.add(result)

    def refuse(_path: Path, missing_ok: bool = False) -> None:
        raise OSError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("app.bench.results.MAX_KEPT", 1)
        patch.setattr("app.bench.results.write_json", lambda path, value: path.write_text(json.dumps(value)))
        patch.setattr(Path, "unlink", refuse)
        second = store.add(result)
        assert {result_id for result_id, _ in store.list()} == {first, second}
        with pytest.raises(ResultError, match="make it writable"):
            store.delete(first)


def test_a_better_drafts_build_pauses_for_a_benchmark_and_goes_on_after_it(tmp_path: Path) -> None:
    loader = FakeLoader(step_s=0.005, improve_s=20.0)
    service = ChatService(tmp_path, loader, lambda: [])
    service.start()
    try:
        wait_for(lambda: service.holder.status().improvement is not None, 10, "the build")
        engine, slots = loader.engines[0], loader.engines[0]._plan(None).num_slots
        seen = []
        reset = engine.reset

        def watched(*, ram: bool = False) -> None:
            seen.append((engine.plan.num_slots, engine._improving.locked()))
            reset(ram=ram)

        engine.reset = watched  # type: ignore[method-assign]
        benchmarks = BenchmarkService(service)
        benchmarks.run(*SETTINGS)
        wait_end(benchmarks, "done")
        assert seen == [(slots, False)] * 5 and service.holder.config.improve_draft
        wait_for(lambda: engine.improvements == 2, 10, "the build going on")
    finally:
        service.close()
