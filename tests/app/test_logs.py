"""The log: what it takes, what it never holds, how it is bounded, and what it leaves behind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import budget_for_slots

from app import logs
from app.logs import LogBook
from app.main import load_engine
from app.service import ChatService
from localmoe.core.config import EngineConfig

SECRET = "zyzzyva"


@pytest.fixture
def book(tmp_path: Path) -> Iterator[LogBook]:
    before = (list(logging.getLogger().handlers), logging.getLogger("app").level, threading.excepthook)
    made = LogBook(tmp_path / "logs")
    made.install()
    yield made
    made.remove()
    assert before == (
        list(logging.getLogger().handlers), logging.getLogger("app").level, threading.excepthook,
    )  # fmt: skip


def test_own_lines_and_warnings_of_all_else_are_taken(book: LogBook) -> None:
    logging.getLogger("localmoe.engine").info("loaded %s", "demo")
    logging.getLogger("app.x").debug("too fine")
    logging.getLogger("other").info("chatter")
    logging.getLogger("other").critical("no disk")
    first, second = book.lines()
    assert (first.number, first.level, first.source, first.text) == (
        1,
        "INFO",
        "localmoe.engine",
        "loaded demo",
    )
    assert (second.number, second.level, second.text) == (2, "ERROR", "no disk")
    assert [line.text for line in book.lines(after=1)] == ["no disk"]
    assert "INFO    localmoe.engine: loaded demo\n" in book.text() and "chatter" not in book.text()
    apart = logging.getLogger("uvicorn")
    apart.propagate, kept = False, apart.propagate
    book.attach()
    apart.error("server trouble")
    apart.propagate = kept
    assert book.lines()[-1].text == "server trouble"
    book.remove()
    apart.warning("after the end")
    assert len(book.lines()) == 3


def test_memory_and_files_are_bounded(book: LogBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book._file, "maxBytes", 20_000)
    for number in range(logs.MAX_LINES + 100):
        logging.getLogger("app").info("line %d %s", number, "x" * 20)
    assert len(book.lines()) == logs.MAX_LINES and book.lines()[-1].number == logs.MAX_LINES + 100
    files = sorted(path.name for path in book.path.parent.iterdir())
    assert files == ["localmoe.log", *(f"localmoe.log.{n}" for n in range(1, logs.OLD_FILES + 1))]
    assert sum(path.stat().st_size for path in book.path.parent.iterdir()) <= 4 * 20_000
    text = book.text().splitlines()
    numbers = [int(line.split("line ")[1].split()[0]) for line in text]
    assert numbers == sorted(numbers) and numbers[-1] == logs.MAX_LINES + 99


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exceptions_place_is_kept_and_its_words_are_not(book: LogBook) -> None:
    heard: list[threading.ExceptHookArgs] = []
    hook, book._hook = book._hook, heard.append

    def broken() -> None:
        raise ValueError(SECRET)

    thread = threading.Thread(target=broken, name="answer")
    thread.start()
    thread.join()
    book._hook = hook
    try:
        broken()
    except ValueError:
        logging.getLogger("other").exception("something failed")
    for text in (book.lines()[0].text, book.lines()[1].text, book.text()):
        assert "ValueError" in text and "in broken" in text and SECRET not in text
    assert "the thread answer failed" in book.lines()[0].text and len(heard) == 1


def test_a_name_that_is_no_unicode_ends_neither_the_file_nor_the_page(
    book: LogBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()  # pytest's own handlers would put the name into its report
    own = [handler for handler in root.handlers if not type(handler).__module__.startswith("_pytest")]
    monkeypatch.setattr(root, "handlers", own)
    logging.getLogger("other").warning("%s is damaged", "/models/caf\udce9")
    logging.getLogger("app").info("next")
    assert [line.text for line in book.lines()] == ["/models/caf? is damaged", "next"]
    assert "/models/caf? is damaged\n" in book.text() and "next\n" in book.text()


def test_a_disk_that_refuses_the_file_is_told_of_once_and_memory_goes_on(
    book: LogBook, capsys: pytest.CaptureFixture[str]
) -> None:
    book.path.mkdir()  # where the file should be
    for _ in range(3):
        logging.getLogger("app").info("line")
    told = capsys.readouterr().err
    assert told.count("cannot be written") == 1 and "Traceback" not in told
    assert len(book.lines()) == 3 and book.text() == ""


def test_chatting_with_the_real_engine_leaves_figures_and_no_text(tmp_path: Path) -> None:
    service = ChatService(tmp_path, load_engine, lambda: [])
    service.logs.install()
    try:
        service.holder.load(
            "demo", EngineConfig(vram_budget_bytes=budget_for_slots("demo", 40), device="cpu")
        )
        _wait(lambda: service.holder.status().phase != "loading")
        chat = service.send(None, f"Tell me a story about a {SECRET}.")
        _wait(lambda: not service.runner.running() and service.live.bound is not None)
        answer = service.chats.get(chat).messages[-1].content
        service.send(None, "word " * 5000)  # too long for the context: refused
        _wait(lambda: not service.runner.running())
        service.runner.stop_and_wait()
        service.holder.resize(budget_for_slots("demo", 30))
        service.holder.load(f"no-such-{'model'}", EngineConfig())
        _wait(lambda: service.holder.status().phase == "error")
    finally:
        service.close()
        service.logs.remove()
    text = service.logs.text()
    for expected in (
        "loading demo", "loaded demo on cpu", "slots for 40 of 96", "slots for 30 of 96", "answer ended (",
        "hits ", "an answer failed: ContextLengthError", "no-such-model was not loaded: ",
    ):  # fmt: skip
        assert expected in text, expected
    assert SECRET not in text and "word word" not in text and "story" not in text
    assert len(answer) > 40 and not any(answer[i : i + 24] in text for i in range(len(answer) - 24))
    assert all(line.text.splitlines()[0] in text for line in service.logs.lines())


def _wait(condition: object) -> None:
    deadline = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
