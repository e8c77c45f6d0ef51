"""Steps as spans: they nest and tile, the ring is bounded, the file is what trace viewers read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.errors import ConfigError
from localmoe.core.timeline import LANES, Lane, Timeline, trace_events, write_trace


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


spans = st.tuples(st.sampled_from(LANES[:-1]), st.integers(0, 9), st.integers(0, 9))
stories = st.lists(st.lists(spans, max_size=6), min_size=1, max_size=5)


@settings(max_examples=60)
@given(stories)
def test_the_host_has_exactly_what_neither_draft_nor_target_takes(
    story: list[list[tuple[Lane, int, int]]],
) -> None:
    clock = Hand()
    timeline = Timeline(clock=clock)
    for number, told in enumerate(story):
        timeline.begin_step(f"step {number}")
        begun, clock.at = clock.at, clock.at + 10
        for lane, start, end in told:
            timeline.add(lane, "x", begun + min(start, end), begun + max(start, end))
    timeline.end_step()
    steps = timeline.steps()
    assert [(step.start_s, step.end_s) for step in steps] == [
        (100.0 + 10 * n, 110.0 + 10 * n) for n in range(len(story))
    ]
    for step, told in zip(steps, story, strict=True):
        assert len([span for span in step.spans if span.lane != "host"]) == len(told)
        seconds = set(range(10))
        for lane, start, end in told:
            if lane in ("draft", "verify"):
                seconds -= set(range(min(start, end), max(start, end)))
        host = [(span.start_s, span.end_s) for span in step.spans if span.lane == "host"]
        assert all(start < end for start, end in host)
        covered = [s for start, end in host for s in range(int(start), int(end))]
        assert sorted(covered) == [int(step.start_s) + s for s in sorted(seconds)]


def test_the_ring_is_bounded_and_what_belongs_to_no_step_is_left_out() -> None:
    clock = Hand()
    timeline = Timeline(2, clock)
    timeline.add("copies", "before", 1.0, 2.0, 5)
    for number in range(4):
        timeline.begin_step(f"step {number}")
        timeline.add("copies", "of an earlier step", clock.at - 3, clock.at - 1, 5)
        timeline.add("copies", "began earlier", clock.at - 3, clock.at, 7)
        clock.at += 1
    timeline.end_step()
    timeline.end_step()
    timeline.add("verify", "after", clock.at, clock.at)
    assert [step.name for step in timeline.steps()] == ["step 2", "step 3"]
    kept = [span.name for step in timeline.steps() for span in step.spans]
    assert kept == ["began earlier", "host"] * 2


def test_the_file_is_in_the_trace_event_format(tmp_path: Path) -> None:
    clock = Hand()
    timeline = Timeline(clock=clock)
    timeline.begin_step("step 1")
    timeline.add("copies", "expert 0/1", 99.5, 100.0, 4096)
    timeline.add("draft", "token 1", 100.0, 100.25)
    clock.at = 101.0
    timeline.end_step()
    path = tmp_path / "trace.json"
    path.write_text("old")
    write_trace(path, timeline.steps(), "demo")
    found = json.loads(path.read_text())
    assert found == trace_events(timeline.steps(), "demo") and [*tmp_path.iterdir()] == [path]
    events = found["traceEvents"]
    for event in events:  # the keys that the format requires
        assert {"name", "ph", "pid", "tid"} <= event.keys() and event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["cat"] and isinstance(event["args"], dict)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    complete = {
        (names[e["tid"]], e["name"]): (e["ts"], e["dur"], e["args"].get("bytes"))
        for e in events
        if e["ph"] == "X"
    }
    assert complete == {
        ("steps", "step 1"): (500_000.0, 1e6, None), ("copies", "expert 0/1"): (0.0, 500_000.0, 4096),
        ("draft", "token 1"): (500_000.0, 250_000.0, None), ("host", "host"): (750_000.0, 750_000.0, None),
    }  # fmt: skip
    assert trace_events(())["traceEvents"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(tmp_path / "no" / "folder.json", ())
