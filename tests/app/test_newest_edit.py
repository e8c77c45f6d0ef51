"""Which of a page's edits is the newest, while their answers are on their way."""

from __future__ import annotations

from app.tabs import newest_edit
from app.tabs.newest_edit import NewestEdit


def test_each_page_counts_its_own_edits() -> None:
    newest = NewestEdit()
    assert newest.number("a") == 0
    assert [newest.begin("a"), newest.begin("b"), newest.begin("a")] == [1, 1, 2]
    assert (newest.number("a"), newest.number("b")) == (2, 1)


def test_pages_that_were_left_long_ago_are_forgotten() -> None:
    newest = NewestEdit()
    for page in range(newest_edit._PAGES + 40):
        newest.begin("kept")
        newest.begin(f"left {page}")
    assert newest.number("kept") == newest_edit._PAGES + 40
    assert newest.number("left 0") == 0 and len(newest._numbers) == newest_edit._PAGES
