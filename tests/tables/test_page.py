"""The page and its charts: well formed, true to scale, the same bytes again, and those in docs/."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

from handmade import PAPER_SHAPE, SUBJECT, plain, run_with
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localmoe.tables.page import compose, render
from localmoe.tables.section import Bars, Lines
from localmoe.tables.store import Results, read_results
from localmoe.tables.svg import draw, nice_ticks

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=30)
heights = st.none() | st.floats(0, 1e9)


@settings(max_examples=25)
@example("less than a float divides", [("a", [None, 5e-324, 0.0])])
@given(names, st.lists(st.tuples(names, st.lists(heights, min_size=3, max_size=3)), max_size=4))
def test_bars_are_as_long_as_their_numbers(title: str, groups: list[tuple[str, list[float | None]]]) -> None:
    chart = Bars(title, "ms", ("a", "b<", "c&"), tuple((name, tuple(row)) for name, row in groups))
    root = ElementTree.fromstring(draw(chart))
    assert root.findtext(f"{SVG}title") == title and draw(chart) == draw(chart)
    bars = [rect for rect in root.findall(f"{SVG}rect") if rect.get("class") == "bar"]
    numbers = [number for _, row in groups for number in row if number is not None]
    most = nice_ticks(max(numbers, default=0.0))[-1]
    assert len(bars) == len(numbers)
    for bar, number in zip(bars, numbers, strict=True):
        assert math.isclose(float(bar.get("width", "")), 480 * number / most, abs_tol=0.06)


@given(st.floats(1e-6, 1e12))
def test_ticks_are_round_few_and_reach_the_highest(highest: float) -> None:
    ticks = nice_ticks(highest)
    step = ticks[1]
    assert ticks[0] == 0 and ticks[-1] >= highest * (1 - 1e-9) and 4 <= len(ticks) - 1 <= 10
    assert math.isclose(ticks[-1], step * (len(ticks) - 1), rel_tol=1e-9) and ticks[-2] < highest * (1 + 1e-9)
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(math.isclose(mantissa, round_one, rel_tol=1e-6) for round_one in (1, 2, 2.5, 5, 10))


def test_lines_go_through_their_points() -> None:
    chart = Lines("t", "layer", "ms", (("here", ((0.0, 5.0), (2.0, 10.0), (4.0, 2.5))),))
    root = ElementTree.fromstring(draw(chart))
    (line,) = root.findall(f"{SVG}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]
    assert [x - points[0][0] for x, _ in points] == [0, 240, 480]
    a, b, c = (y for _, y in points)
    assert math.isclose((a - b) / (c - a), 5 / 2.5, rel_tol=0.01), "5 up, then 7.5 down"
    assert len(root.findall(f"{SVG}circle")) == 3


def test_a_page_names_machines_targets_refusals_and_people_s_notes(tmp_path: Path) -> None:
    runs = [run_with(plain), run_with(plain, replace(PAPER_SHAPE, kind="predicted", machine="simulated"))]
    runs[0].cells["x"] = {"refused": "Needs 9 GB."}
    results = Results(runs, notes={"4": "A person's note."})
    written = render(results, tmp_path / "page.md")
    text = written[0].read_text(encoding="utf-8")
    assert (
        text.index("## Machines") < text.index("1. **measured: demo") < text.index("2. **predicted: deepseek")
    )
    assert "all settings gave the same tokens" in text and "acceptance is simulated" in text
    assert "Not run: Needs 9 GB." in text and text.count("A person's note.") == 1
    goals = text[text.index("## What was to be reached") :].split("\n## ")[0]
    assert "| table | to reach | run 1 | run 2 |" in goals
    assert re.search(
        r"^\| MoE-SpeQ, figure 13 \| high memory: 2.34 x .+ \| \*\*2.00 x\*\* \| \*\*2.00 x\*\* \|$",
        goals,
        re.M,
    )
    assert re.search(r"^\| MoE-SpeQ, table 4 \| asynchronous .+ \| [^|]+ \| - \|$", goals, re.M), (
        "of what was run"
    )
    linked = {tmp_path / name for name in re.findall(r"\]\((charts/[^)]+)\)", text)}
    assert linked == set(written[1:]) and all(path.stat().st_size for path in linked)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({line.count("|") - line.count("\\|") for line in table.splitlines()}) == 1
    assert compose(results) == compose(results) and "### measured: demo" in text
    runs[0].cells[next(iter(runs[0].cells))]["tokens_sha256"] = "other"
    assert "SETTINGS GAVE DIFFERENT TOKENS" in compose(results)[0]


def test_two_runs_of_one_subject_keep_their_charts_apart() -> None:
    runs = [run_with(plain), run_with(plain, replace(SUBJECT, prompts=9))]
    text, charts = compose(Results(runs))
    assert len(charts) == len(re.findall(r"\]\(charts/", text)) == len(set(charts))


def test_the_page_in_docs_is_that_of_the_results_in_docs() -> None:
    text, charts = compose(read_results(DOCS / "results.json"))
    assert (DOCS / "results.md").read_text(encoding="utf-8") == text, "run localmoe bench tables --render"
    kept = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "charts").iterdir()}
    assert kept == charts
