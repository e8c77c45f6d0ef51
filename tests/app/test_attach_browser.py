"""Text files that become part of a message, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_process import Server, wait_for
from browser import PageDriver, attach, given

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.usefixtures("on_a_new_chat")]
CODE = "def f(a):\n    return a\n"
DROP = """(files) => {
    const data = new DataTransfer();
    for (const [name, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name));
    const target = document.querySelector('#lm-scroll'), composer = document.getElementById('lm-composer');
    const drop = { bubbles: true, cancelable: true, dataTransfer: data };
    const over = new DragEvent('dragover', drop);
    target.dispatchEvent(over);
    const shown = composer.classList.contains('lm-drop');
    target.dispatchEvent(new DragEvent('drop', drop));
    return [over.defaultPrevented, shown, composer.classList.contains('lm-drop')];
}"""


def write(page: PageDriver, text: str) -> None:
    page.page.fill("#lm-message textarea", text)


def wait_message(page: PageDriver, text: str) -> None:
    wait_for(lambda: page.value("lm-message") == text, 5, repr(text))


def test_chosen_files_come_behind_what_is_typed_and_are_sent_with_it(
    page: PageDriver, server: Server, tmp_path: Path
) -> None:
    write(page, "What does it do?")
    (tmp_path / "tool.PY").write_text(CODE)
    (tmp_path / "notes").write_bytes("héllo\r\nthere".encode())
    attach(page, tmp_path / "tool.PY", tmp_path / "notes")
    text = f"What does it do?\n\n`tool.PY`:\n```py\n{CODE}```\n\n`notes`:\n```\nhéllo\nthere\n```\n\n"
    wait_message(page, text)
    assert page.evaluate("document.activeElement === document.querySelector('#lm-message textarea')")
    page.page.click("#lm-send")
    page.wait_answer(20)
    assert "def f(a)" in page.text("#lm-turn .user pre code") and page.value("lm-message") == ""
    chats = [json.loads(path.read_text()) for path in (server.home / "chats").glob("*.json")]
    assert any(text.strip() in json.dumps(chat, ensure_ascii=False).replace("\\n", "\n") for chat in chats)


def test_files_can_be_dropped_in_any_of_unicodes_forms(page: PageDriver) -> None:
    dropped = [["a.txt", [*"\ufeffä".encode("utf-16-le")]], ["b.txt", [*"\ufeffö".encode()]]]
    assert page.page.evaluate(DROP, dropped) == [True, True, False]
    wait_message(page, "`a.txt`:\n```txt\nä\n```\n\n`b.txt`:\n```txt\nö\n```\n\n")
    write(page, "")
    page.settings()
    assert page.page.evaluate(DROP, dropped) == [True, False, False], "the page is not left for the file"
    page.chat()
    assert page.value("lm-message") == ""


PASTE = """([text, name]) => {
    const data = new DataTransfer(), box = document.querySelector('#lm-message textarea');
    if (text) data.setData('text/plain', text);
    data.items.add(new File(['ok'], name));
    const paste = new ClipboardEvent('paste', { bubbles: true, cancelable: true, clipboardData: data });
    box.dispatchEvent(paste);
    return paste.defaultPrevented;
}"""


def test_files_can_be_pasted_but_not_what_is_a_text_as_well(page: PageDriver) -> None:
    assert page.page.evaluate(PASTE, ["", "a.txt"])
    wait_message(page, "`a.txt`:\n```txt\nok\n```\n\n")
    write(page, "")
    assert not page.page.evaluate(PASTE, ["1\t2", "table.png"]), "the browser pastes it"
    assert page.value("lm-message") == ""


HELD = """() => {
    const read = Blob.prototype.arrayBuffer;
    const may = new Promise((go) => { window.letRead = go; });
    Blob.prototype.arrayBuffer = function () { return may.then(() => read.call(this)); };
    window.readAtOnce = () => { window.letRead(); Blob.prototype.arrayBuffer = read; };
}"""


@pytest.fixture
def held(page: PageDriver) -> Iterator[None]:
    """Files are not read before the page's letRead()."""
    page.page.evaluate(HELD)
    yield
    page.evaluate("window.readAtOnce()")


@pytest.mark.usefixtures("held")
def test_who_goes_on_typing_is_not_disturbed_by_a_file_that_comes_late(page: PageDriver) -> None:
    write(page, "hello world")
    attach(page, given("a.txt", b"ok"))
    page.wait_text("#lm-attached", "Reading a.txt")
    page.page.focus("#lm-message textarea")
    page.page.keyboard.press("Home")
    page.page.keyboard.type("abcd")
    page.evaluate("window.letRead()")
    wait_message(page, "abcdhello world\n\n`a.txt`:\n```txt\nok\n```\n\n")
    page.page.keyboard.type("efgh")
    wait_message(page, "abcdefghhello world\n\n`a.txt`:\n```txt\nok\n```\n\n")
    assert page.text("#lm-attached") == ""
    write(page, "")


@pytest.mark.usefixtures("held")
def test_what_was_meant_for_one_chat_does_not_come_into_another(page: PageDriver) -> None:
    page.send("one chat")
    page.wait_answer(20)
    attach(page, given("secret.txt", b"ok"))
    page.page.click("#lm-new")
    page.wait_questions([])
    page.evaluate("window.letRead()")
    page.wait_text("#lm-attached", "secret.txt was left out")
    assert page.value("lm-message") == ""


def test_a_file_that_is_dropped_on_an_open_edit_becomes_part_of_that(page: PageDriver) -> None:
    page.send("one chat")
    wait_for(lambda: page.line() != "", 30, "the end of the answer, which draws its buttons anew")
    page.page.click("#lm-turn [aria-label=Edit], #lm-turn [title=Edit]")
    box = "#lm-turn textarea"
    page.page.wait_for_selector(box)
    page.page.evaluate(DROP.replace("#lm-scroll", box), [["a.txt", [*b"ok"]]])
    wait_for(lambda: "`a.txt`:\n```txt\nok\n```" in page.page.input_value(box), 5, "the file")
    assert page.value("lm-message") == ""
    page.page.click("#lm-turn button[aria-label=Cancel]")


def test_names_are_shown_as_they_are(page: PageDriver) -> None:
    names = ["__init__.py", "a*b*.txt", "<b>`x`.txt", "a$&$'.txt"]
    attach(page, *(given(name, b"ok") for name in names), given("$'b$&.png", b"\0"))
    wait_for(lambda: page.text("#lm-attached").startswith("$'b$&.png is no text file"), 5, "the other name")
    page.page.click("#lm-send")
    page.wait_text("#lm-turn .message", names[-1])
    shown = page.text("#lm-turn .message")
    assert all(name in shown for name in names), shown


def test_files_are_taken_as_long_as_a_message_has_room(page: PageDriver) -> None:
    attach(
        page,
        *(given(f"{i}.txt", b"a" * 400_000) for i in range(4)),
        *(given(f"{i}.png", b"\0") for i in range(40)),
    )
    page.wait_text("#lm-attached", "2.txt is too long for a message")
    assert len(page.value("lm-message")) < 1_000_000 and "`1.txt`" in page.value("lm-message")
    box = page.page.locator("#lm-attached").bounding_box()
    assert box is not None and box["height"] <= 70
    page.evaluate("document.querySelector('#lm-message textarea').select()")
    page.page.keyboard.press("Delete")


def test_marks_in_a_text_do_not_end_it(page: PageDriver) -> None:
    attach(page, given("x.md", b"```py\n1\n```\n````\n"))
    wait_message(page, "`x.md`:\n`````md\n```py\n1\n```\n````\n`````\n\n")
    write(page, "")


def test_what_is_no_text_is_said_and_the_rest_is_taken(page: PageDriver) -> None:
    attach(page, given("a.png", b"\x89PNG\r\n\x1a\n\x00"), given("b.txt", b"ok"), given("c.bin", b"a\x00b"))
    wait_message(page, "`b.txt`:\n```txt\nok\n```\n\n")
    said = page.text("#lm-attached")
    assert said.startswith("a.png is no picture that can be read: use PNG, JPEG, WebP, GIF or BMP. ")
    assert "c.bin is no text file" in said and "b.txt" not in said
    page.page.keyboard.type("x")
    wait_for(lambda: page.text("#lm-attached") == "", 5, "the next input")
    write(page, "")
    attach(page, given("large.txt", b"a" * 1_000_001))
    page.wait_text("#lm-attached", "large.txt is too long for a message")
    assert page.value("lm-message") == ""
    attach(page, given("b.txt", b"ok"))
    wait_message(page, "`b.txt`:\n```txt\nok\n```\n\n")
    assert page.text("#lm-attached") == ""
    write(page, "")
