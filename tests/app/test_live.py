"""What the page is told of a look at the engine: shared looks, the link's use, steps recorded on demand,
words and drawings, and the addresses behind them."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from app_process import wait_for
from fake_engine import EXPERTS, LAYERS, FakeEngine, FakeLoader
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.cache_card import cache_card
from app.live import LOOK_S, TIMELINE_S, LiveMonitor, Look
from app.live_routes import add_live_routes
from app.live_view import live_json
from app.service import ChatService
from app.texts import IN_CHINESE
from app.timeline_svg import busy_s, last_step, step_svg, step_words
from localmoe.core.config import EngineConfig
from localmoe.core.live_state import LiveState, ReuseBound
from localmoe.core.timeline import Span, StepSpans

STEP = StepSpans(
    "step 7", 10.0, 10.1,
    (
        Span("copies", "expert 0/1", 9.99, 10.01, 1 << 20),
        Span("copies", "expert 0/2", 10.005, 10.02, 1 << 20),
        Span("draft", "draft <2>", 10.0, 10.04), Span("draft", "token 1", 10.0, 10.02),
        Span("verify", "verify", 10.04, 10.09), Span("host", "host", 10.09, 10.1),
    ),
)  # fmt: skip


class Rig:
    """A monitor of a fake engine, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = FakeEngine("demo", EngineConfig())
        self.copied = 0
        self.monitor = LiveMonitor(lambda: self.engine, lambda: self.now)
        state = self.engine.live.state

        def at_now() -> LiveState:
            return replace(state(), at_s=self.now, h2d_bytes=self.copied)

        self.engine.live.state = at_now  # type: ignore[method-assign]

    def look(self, seconds: float, num_bytes: int, *, timeline: bool = False) -> Look:
        self.now, self.copied = self.now + seconds, self.copied + num_bytes
        found = self.monitor.look(timeline=timeline)
        assert found is not None
        return found


def test_pages_share_a_look_and_the_links_use_is_of_the_last_moments() -> None:
    rig = Rig()
    assert rig.look(0.0, 0).copied_bytes_per_s is None
    rig.look(LOOK_S / 2, 500)
    assert rig.engine.live.looks == 1
    assert rig.look(0.8, 500).copied_bytes_per_s == pytest.approx(1000.0)
    assert rig.look(1.0, 5000).copied_bytes_per_s == pytest.approx(5000.0)
    assert rig.look(1.0, 0).copied_bytes_per_s == pytest.approx(0.0)
    rig.copied = 0  # a resize made the slots anew
    assert rig.look(1.0, 70).copied_bytes_per_s is None
    assert rig.look(1.0, 70).copied_bytes_per_s == pytest.approx(70.0)
    rig.engine.closed = True
    rig.now += 1
    assert rig.monitor.look() is None


def test_steps_are_recorded_while_somebody_looks_and_no_longer() -> None:
    rig = Rig()
    rig.look(1.0, 0)
    assert rig.engine.live._timeline is None
    rig.look(1.0, 0, timeline=True)
    kept = rig.engine.live._timeline
    rig.look(TIMELINE_S - 0.1, 0)
    assert rig.engine.live._timeline is kept is not None
    rig.look(0.2, 0)
    assert rig.engine.live._timeline is None
    rig.look(1.0, 0, timeline=True)
    rig.now += TIMELINE_S  # the last page was closed
    rig.monitor.end_answer(rig.engine, rig.monitor.begin_answer())
    assert rig.engine.live._timeline is None


def test_what_could_be_reused_is_of_the_last_answer_alone() -> None:
    rig = Rig()
    first = rig.monitor.begin_answer()
    rig.monitor.end_answer(rig.engine, first)
    assert rig.monitor.bound is not None
    before = rig.monitor.revision
    second = rig.monitor.begin_answer()
    assert rig.monitor.bound is None and rig.monitor.revision != before
    rig.monitor.end_answer(rig.engine, first)  # was still being computed
    assert rig.monitor.bound is None
    rig.monitor.end_answer(rig.engine, second)
    assert rig.monitor.bound is not None
    card = cache_card(None, rig.monitor.bound)
    assert 'data-key="reuse">60 %, at best 75 %<' in card
    part = cache_card(None, ReuseBound(100, 75, None))
    assert "at best 75 % (first steps)" in part and "60 %" not in part


def test_a_look_as_the_script_reads_it() -> None:
    rig = Rig()
    rig.look(1.0, 0)
    told = live_json(rig.look(1.0, 1_000_000), answering=True, timeline=True)
    cells = np.frombuffer(base64.b64decode(str(told["cells"])), np.uint8).reshape(LAYERS, EXPERTS)
    assert (cells[:, 0] == 0x80 | 127).all() and (cells[:, 1] == 64).all() and (cells[:, 2] == 0x80).all()
    assert told["link"] == "1.0 MB/s of 2.0 GB/s" and told["linkShare"] == pytest.approx(0.0005)
    assert told["step"] == "" and told["answering"] is True
    assert "step" not in live_json(rig.look(1.0, 0), answering=False, timeline=False)
    nothing = live_json(None, answering=False, timeline=True)
    assert (nothing["layers"], nothing["cells"]) == (0, "")
    chinese = live_json(rig.look(1.0, 0), answering=False, timeline=False, t=IN_CHINESE)
    assert "1,184 个专家中有 592 个在槽位中" in str(chinese["words"])


def test_a_step_in_words_and_as_a_drawing() -> None:
    assert last_step((STEP, replace(STEP, name="prompt"))) is STEP and last_step(()) is None
    assert busy_s(STEP.spans[2:4]) == pytest.approx(0.04)  # nested, not twice
    assert step_words(STEP) == (
        "step 7, 100 ms: draft 40 ms, 16-bit model 50 ms, copies 30 ms, host 10 ms; 2 copies, 2.0 MiB"
    )
    svg = step_svg(STEP)
    assert "draft &lt;2&gt;: 40 ms" in svg and "expert 0/1: 20 ms, 1.0 MiB" in svg
    boxes = [tuple(map(float, found)) for found in re.findall(r'x="([\d.]+)" y="\d+" width="([\d.]+)"', svg)]
    assert len(boxes) == 6 and all(x >= 104 and x + width <= 264.01 for x, width in boxes)
    crowd = tuple(Span("copies", "c", 10 + i / 1e5, 10 + (i + 1) / 1e5, 1) for i in range(5000))
    assert step_svg(replace(STEP, spans=crowd)).count("<rect") == 600


def test_the_addresses_answer_before_during_and_after_an_answer(
    service: ChatService, loader: FakeLoader
) -> None:
    app = FastAPI()
    add_live_routes(app, service)
    client = TestClient(app)
    assert client.get("/live?timeline=true").json()["layers"] == LAYERS
    service.send(None, "a long story")
    wait_for(lambda: client.get("/live?timeline=true&language=zh").json().get("step"), what="a step")
    assert "第 " in client.get("/live?timeline=true&language=zh").json()["stepWords"]
    service.runner.stop_and_wait()
    answer = client.get("/live/timeline.json")
    assert "attachment" in answer.headers["content-disposition"]
    names = {event["name"] for event in answer.json()["traceEvents"]}
    assert {"expert 1/2", "token 1"} <= names and "fox" not in json.dumps(answer.json())
    wait_for(lambda: service.live.bound is not None, what="the bound")
    assert client.get("/log?after=-1").status_code == 422 and client.get("/log").json() == {"lines": []}
    assert client.get("/log/file").text == ""
    service.close()
    assert client.get("/live").json()["layers"] == 0
