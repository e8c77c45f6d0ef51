"""What the page says of a better draft that is built behind it: how far, that it pauses, why it failed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_panel import JOB, fact, ready

from app import words
from app.engine_status import EngineStatus
from app.panel import panel_html
from app.status_html import header_html, news_html, share_html
from localmoe.core.types import Progress

REPORT = Progress(
    "Building the 4-bit GPTQ draft", 296, 1184, "experts", 480.0, "output error 62 % of rounding to nearest"
)
LINE = (
    "Building the 4-bit GPTQ draft: 296 of 1,184 experts (25 %, about 8 min left); "
    "output error 62 % of rounding to nearest. "
)
EVIL = '<img src=x onerror="alert(1)">'


def building(report: Progress = REPORT) -> EngineStatus:
    return replace(ready(), improvement=report)


def failed(note: str = "The disk is full: free 3 GiB.") -> EngineStatus:
    return replace(ready(), improvement_note=note)


def card(status: EngineStatus, answering: bool = False) -> str:
    html = panel_html(status, JOB if answering else None)
    found = re.search(r'data-card="draft".*?</section>', html, re.S)
    assert found is not None
    return found.group(0)


def better_draft(html: str) -> str:
    found = re.search(r"<dt>Better draft</dt><dd>(.*?)</dd>", html)
    return found.group(1) if found else ""


@pytest.mark.parametrize(
    ("answering", "pause"),
    [(False, "It pauses while an answer is written."), (True, "Paused while the answer is written.")],
)
def test_panel_and_facts_say_how_far_it_is_and_that_it_pauses(answering: bool, pause: str) -> None:
    assert f"<b>Better draft</b> {LINE}{pause}<" in card(building(), answering)
    assert better_draft(share_html(building(), answering)) == LINE + pause


def test_the_bar_is_named_and_moves() -> None:
    bar = re.search(r'<div class="lm-bar thin".*', card(building()))
    assert bar is not None
    assert 'role="progressbar" aria-label="building a better draft"' in bar.group(0)
    assert 'aria-valuenow="25"' in bar.group(0) and "width:25.0%" in bar.group(0)


def test_nothing_is_shown_when_there_is_nothing_to_say() -> None:
    for status in (ready(), EngineStatus(), EngineStatus("error", "m", error="No.")):
        assert "etter draft" not in panel_html(status, JOB) + share_html(status) + header_html(status)
        assert words.improvement(status, True) == words.improvement_news(status) == ""
        assert news_html(status) == '<p class="lm-hidden" role="status"></p>'
    assert fact(panel_html(building(), JOB), "acceptance") == "78 %"  # the card keeps its figures


def test_a_failure_is_told_in_the_settings_and_to_a_screen_reader() -> None:
    assert better_draft(share_html(failed())) == "The disk is full: free 3 GiB."
    assert "The better draft was not built. The disk is full: free 3 GiB." in news_html(failed())
    assert "etter draft" not in card(failed())


@given(st.integers(1, 100_000), st.data())
def test_a_screen_reader_is_told_of_quarters_alone(total: int, data: st.DataObject) -> None:
    done = data.draw(st.lists(st.integers(0, total), min_size=2).map(sorted))
    told = [words.improvement_news(building(replace(REPORT, done=d, total=total))) for d in [0, *done]]
    shares = [int(re.findall(r"(\d+) %", text)[0]) for text in told]
    assert shares == sorted(shares) and set(shares) <= {0, 25, 50, 75, 100}
    assert all(0 <= 100 * d / total - share < 25 for d, share in zip([0, *done], shares, strict=True))


def test_reading_weights_first_is_no_part_of_the_quarters() -> None:
    reading = building(Progress("Loading weights", 3 << 30, 4 << 30, "bytes"))
    assert ": 0 % done" in words.improvement_news(reading)
    assert "3.0 GiB of 4.0 GiB (75 %)" in card(reading)


def test_what_is_read_out_by_itself_does_not_move_with_the_build() -> None:
    later = building(replace(REPORT, done=400, seconds_left=300.0))
    assert header_html(building()) == header_html(later) == header_html(ready())
    assert news_html(building()) == news_html(later)
    assert card(building()) != card(later)
    assert 'role="status"' not in panel_html(building(), JOB) + share_html(building())
    assert 'role="alert"' not in panel_html(failed(), JOB) + share_html(failed())


def test_its_words_are_escaped() -> None:
    evil = building(replace(REPORT, stage=EVIL, detail=EVIL))
    for html in (card(evil), share_html(evil), share_html(failed(EVIL)), news_html(failed(EVIL))):
        assert "<img" not in html and "&lt;img" in html
