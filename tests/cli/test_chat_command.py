"""`localmoe chat`: a conversation by lines, in a pipe and in a terminal."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from localmoe.cli import chat
from localmoe.cli.chat import Conversation
from localmoe.cli.main import main
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import ConfigError
from localmoe.core.types import Message
from localmoe.engine import Engine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine() -> object:
    with Engine.load("demo", EngineConfig(device="cpu", context=256)) as engine:
        yield engine


def greedy(engine: Engine, messages: Sequence[tuple[str, str]], tokens: int) -> str:
    request = GenerationRequest(
        messages=tuple(Message(role, text) for role, text in messages),  # type: ignore[arg-type]
        max_new_tokens=tokens,
    )
    return "".join(event.text for event in engine.stream(request))


def talk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str, *options: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    capsys.readouterr()
    code = main(["chat", "demo", "--device", "cpu", "--context", "256", *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("piped", ["x" * 201, "\\\n" * 201])
def test_a_question_that_does_not_end_is_refused(piped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_LONGEST", 200)
    assert list(questions(monkeypatch, "y" * 199)) == ["y" * 199]
    with pytest.raises(ConfigError, match="A question has more than 200 characters"):
        list(questions(monkeypatch, piped))


def questions(monkeypatch: pytest.MonkeyPatch, piped: str) -> Iterator[str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    return chat._questions()


def test_answers_know_what_was_said_and_a_new_conversation_does_not(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "Hello\n\n   \nTell me \\\na story\n/help\n/new\nTell me \\\na story"
    code, out, err = talk(capsys, monkeypatch, typed, "--max-new-tokens", "12")
    first = greedy(engine, [("user", "Hello")], 12)
    story = ("user", "Tell me \na story")
    second = greedy(engine, [("user", "Hello"), ("assistant", first), story], 12)
    alone = greedy(engine, [story], 12)
    assert second != alone
    assert (code, out) == (0, f"{first}\n{second}\n{alone}\n")
    assert err.count("tok/s") == 3 and "A new conversation." in err and err.count("Ctrl+D") == 2


def test_a_system_prompt_stays_in_front(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "Hello\n/new\nHello\n"
    code, out, _ = talk(capsys, monkeypatch, typed, "--max-new-tokens", "8", "--system", "You are a cat.")
    wanted = greedy(engine, [("system", "You are a cat."), ("user", "Hello")], 8)
    assert (code, out) == (0, f"{wanted}\n{wanted}\n")


def test_a_closed_input_is_one_that_has_ended(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "demo", "--device", "cpu", "--context", "256"]) == 0
    assert capsys.readouterr().out == ""


class Keyboard(io.StringIO):
    """A line ^C is that key."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        line = super().readline(-1 if size is None else size)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def test_where_answers_go_to_a_file_what_is_typed_at_is_shown_beside_them(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "__stdout__", file)
    monkeypatch.setattr(sys, "stdin", Keyboard("Hello \\\nyou\n"))
    monkeypatch.setattr(sys, "stdout", file)
    assert main(["chat", "demo", "--device", "cpu", "--context", "256", "--max-new-tokens", "8"]) == 0
    assert file.getvalue() == greedy(engine, [("user", "Hello \nyou")], 8) + "\n"
    assert re.search(r"> \.\.\. \[8 tokens.*\]\n> \n", capsys.readouterr().err)


def test_ctrl_c_drops_what_is_typed_and_twice_in_a_row_ends(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard("Hello\n^C\nTell me \\\n^C\nGoodbye\n^C\n^C\nnever\n"))
    capsys.readouterr()
    code = main(["chat", "demo", "--device", "cpu", "--context", "256", "--max-new-tokens", "8"])
    out, err = capsys.readouterr()
    first = greedy(engine, [("user", "Hello")], 8)
    second = greedy(engine, [("user", "Hello"), ("assistant", first), ("user", "Goodbye")], 8)
    assert (code, out) == (130, f"{first}\n{second}\n")
    assert err.count("Ctrl+C once more ends") == 3


@pytest.mark.parametrize("locale", ["utf-8", "iso8859-1"])
def test_a_pipe_is_read_as_utf_8_and_a_line_that_is_none_is_refused_in_a_sentence(
    locale: str, engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.BytesIO(b"caf\xe9\n/new\n" + "H\u00e4llo \u4f60\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, encoding=locale))
    code = main(["chat", "demo", "--device", "cpu", "--context", "256", "--max-new-tokens", "8"])
    out, err = capsys.readouterr()
    assert (code, out) == (0, greedy(engine, [("user", "H\u00e4llo \u4f60")], 8) + "\n")
    (refusal,) = [line for line in err.splitlines() if line.startswith("localmoe: ")]
    assert refusal.endswith("write it in UTF-8.")


def test_a_question_that_is_too_long_is_refused_and_the_next_one_answered(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = talk(capsys, monkeypatch, "cat " * 400 + "\nHello\n", "--max-new-tokens", "8")
    assert (code, out) == (0, greedy(engine, [("user", "Hello")], 8) + "\n")
    (refusal,) = [line for line in err.splitlines() if line.startswith("localmoe: ")]
    assert "256" in refusal and "Traceback" not in err


def test_what_no_answer_could_be_written_with_is_refused_before_the_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *args, **options: pytest.fail("it was loaded"))
    for options in (("--max-new-tokens", "0"), ("--temperature", "-1")):
        code, out, err = talk(capsys, monkeypatch, "Hello\n", *options)
        assert (code, out) == (1, "") and err.startswith("localmoe: ") and len(err.splitlines()) == 1


class Scripted:
    """Says what it is told to, with an engine's statistics."""

    def __init__(self, engine: Engine, texts: list[str], opens: bool) -> None:
        self.info = engine.info
        request = GenerationRequest(prompt="a", max_new_tokens=1)
        self._stats = [event.stats for event in engine.stream(request)][-1]
        self._texts, self._opens = texts, opens

    def stream(self, request: GenerationRequest, stop: threading.Event) -> Iterator[SimpleNamespace]:
        for number, text in enumerate(self._texts):
            yield SimpleNamespace(text=text, stats=self._stats, opens_reasoning=self._opens and number == 0)


@pytest.mark.parametrize(
    ("texts", "opens", "kept"),
    [
        (["<think>hm", "m</think>", "Yes."], False, "Yes."), (["hmm</think>Y", "es."], True, "Yes."),
        (["<think>hm"], False, ""), ([""], False, ""), (["Yes.", " <think>"], False, "Yes. <think>"),
    ],
)  # fmt: skip
def test_thoughts_are_forgotten_and_so_is_a_question_without_an_answer(
    texts: list[str], opens: bool, kept: str, engine: Engine
) -> None:
    scripted = Scripted(engine, texts, opens)
    conversation = Conversation(scripted, GenerationRequest(messages=(Message("user", ""),)))  # type: ignore[arg-type]
    conversation.ask("Really?")
    both = (Message("user", "Really?"), Message("assistant", kept))
    assert conversation.messages == (both if kept else ())


def read_until(terminal: int, wanted: str, seconds: float = 60.0) -> str:
    text, end = "", time.monotonic() + seconds
    while not re.search(wanted, text, re.DOTALL):
        assert time.monotonic() < end, f"no {wanted!r} in {text!r}"
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 4096).decode(errors="replace")
    return text


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_ends_an_answer_and_the_conversation_goes_on() -> None:
    ours, theirs = pytest.importorskip("pty").openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "localmoe.cli", "chat", "demo", "--device", "cpu", "--temperature", "1.5",
         "--seed", "3", "--draft-length", "0", "--emulated-link", "20MB/s", "--vram-budget", "72MiB"],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        read_until(ours, "is ready.*> ")
        os.write(ours, b"Tell me a very long story\r")
        read_until(ours, r"story\r\n.*\w{3}")
        process.send_signal(signal.SIGINT)
        read_until(ours, r"tok/s.*> ")
        os.write(ours, b"/new\r")
        read_until(ours, r"A new conversation.*> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
