"""What the panel says of a model whose experts lie on the disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from app_process import wait_for
from fake_engine import EXPERTS, LAYERS, FakeEngine

from app.engine_holder import EngineHolder
from app.engine_status import EngineStatus
from app.host_memory import HostMemory
from app.jobs import JobView
from app.live import Look
from app.live_view import live_json
from app.main import load_engine
from app.panel import panel_html
from app.status_html import share_html
from app.texts import ENGLISH, IN_CHINESE
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.live_state import LiveState, ReuseBound
from localmoe.core.stats import GenerationCounters, GenerationStats

COUNTERS = GenerationCounters(
    prompt_tokens=12, new_tokens=41, steps=10, hits=87, late=3, misses=10, ttft_s=0.5, decode_s=4.0,
    prefill_disk_bytes=3 << 20, decode_disk_bytes=40 << 20,
)  # fmt: skip
BOUND = ReuseBound(100, 75, 40)
ALL_IN_RAM = "all experts, which are copied or computed from here"


def job(stats: GenerationStats) -> JobView:
    return JobView("a" * 32, 1.0, 7, "text", "stop", "", stats, (8.0,))


def status(*, in_place: bool = True, experts_on: str = "disk") -> EngineStatus:
    engine = FakeEngine("demo", EngineConfig(experts_on="disk" if experts_on == "disk" else "ram"))
    return EngineStatus(
        "ready", "demo", info=engine.info(), plan=replace(engine.plan, in_place=in_place),
        footprint=engine.footprint, memory={"shared": 4 << 20}, ram=HostMemory(5 << 30, 3 << 30, 16 << 30),
    )  # fmt: skip


def fact(html: str, key: str) -> str:
    found = re.search(rf'data-key="{key}">([^<]*)<', html)
    assert found is not None, key
    return found[1]


def test_it_says_what_was_read_and_what_ram_holds() -> None:
    html = panel_html(status(), job(COUNTERS.freeze()), bound=BOUND)
    assert (fact(html, "disk"), fact(html, "disk_token")) == ("43.0 MiB", "1.0 MiB")
    timed = replace(COUNTERS, disk_busy_s=0.02).freeze()
    assert fact(panel_html(status(), job(timed), bound=BOUND), "disk") == "43.0 MiB, 2.3 GB/s"
    assert fact(html, "ram_experts") == f"296 of {LAYERS * EXPERTS:,}"
    assert ALL_IN_RAM not in html and "all lie on the disk" in html
    assert "already in RAM" in html and "read on demand" in html and "in a slot" not in html
    assert 'data-key="reuse"' not in html, "which counts copies"
    chinese = panel_html(status(), job(COUNTERS.freeze()), IN_CHINESE)
    assert "从磁盘读取" in chinese and "已在内存中" in chinese
    nothing = panel_html(status(), None)
    assert fact(nothing, "disk") == fact(nothing, "disk_token") == "—"


def test_slots_are_still_slots_where_experts_come_into_them_from_the_disk() -> None:
    html = panel_html(status(in_place=False), job(COUNTERS.freeze()), bound=BOUND)
    assert "already in a slot" in html and fact(html, "reuse") == "60 %, at best 75 %"
    assert fact(html, "disk") == "43.0 MiB" and ALL_IN_RAM not in html
    share = share_html(status(in_place=False))
    assert "of the experts stay in emulated device memory" in share and "; RAM has room for 25 %" in share


def test_nothing_of_the_disk_is_said_where_all_experts_are_in_ram() -> None:
    stats = replace(COUNTERS, prefill_disk_bytes=0, decode_disk_bytes=0).freeze()
    html = panel_html(status(experts_on="ram"), job(stats), bound=BOUND)
    assert "disk" not in html and ALL_IN_RAM in html and fact(html, "reuse") == "60 %, at best 75 %"
    last = panel_html(status(experts_on="ram"), job(COUNTERS.freeze()))
    assert fact(last, "disk") == "43.0 MiB", "of the answer before this load"


def test_an_answer_is_told_of_as_it_was_once_its_model_is_unloaded() -> None:
    unloaded = EngineStatus("error", "demo", ram=HostMemory(5 << 30, 3 << 30, 16 << 30))
    html = panel_html(unloaded, job(COUNTERS.freeze()), bound=BOUND)
    assert "already in RAM" in html and 'data-key="reuse"' not in html and fact(html, "disk") == "43.0 MiB"
    copied = replace(COUNTERS, decode_h2d_bytes=1 << 20).freeze()
    html = panel_html(unloaded, job(copied), bound=BOUND)
    assert "already in a slot" in html and fact(html, "reuse") == "60 %, at best 75 %"


@pytest.mark.parametrize(
    ("shown", "here", "away", "words"),
    [
        (status(), "in RAM", "on the disk only", "2 of 8 experts are in RAM."),
        (status(in_place=False), "in a slot", "in RAM or on the disk", "2 of 8 experts are in slots."),
        (status(experts_on="ram"), "in a slot", "in RAM only", "2 of 8 experts are in slots."),
    ],
)
def test_the_map_says_where_experts_are(shown: EngineStatus, here: str, away: str, words: str) -> None:
    resident = np.zeros((2, 4), bool)
    resident[:, 0] = True
    look = Look(LiveState(resident, np.zeros((2, 4), np.float32), 0, 1.0, 2e9), None, ())
    told = live_json(look, answering=False, timeline=False, t=ENGLISH, plan=shown.plan)
    assert (told["here"], told["away"], told["words"]) == (here, away, words)


def test_the_real_engine_is_shown_as_it_is(
    tiny16: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    holder = EngineHolder(load_engine)
    try:
        config = EngineConfig(device="cpu", experts_on="disk", ram_budget_bytes=1 << 20)
        holder.load(str(tiny16("qwen2_moe")), config)
        wait_for(lambda: holder.status().phase != "loading", 180, "the model")  # it may compile
        engine, request = holder.engine(), GenerationRequest(prompt_token_ids=(1, 2, 3), max_new_tokens=8)
        stats = [event.stats for event in engine.stream(request)][-1]
        html = panel_html(holder.status(), job(stats))
        assert stats.disk_bytes and re.fullmatch(r"[\d.]+ .iB, [\d.]+ .B/s", fact(html, "disk"))
        assert fact(html, "ram_experts") == "12 of 24" and "already in RAM" in html
        assert "from the disk what is not there" in share_html(holder.status())
    finally:
        holder.close()
