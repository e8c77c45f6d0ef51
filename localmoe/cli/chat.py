"""`localmoe chat`: a conversation in the terminal, as over SSH where no browser is. Answers go to stdout, all
else to stderr; nothing is kept when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from localmoe.chat.reasoning import OPEN, split_reasoning
from localmoe.cli.answer_line import answer_line
from localmoe.cli.image_files import read_images
from localmoe.cli.load_options import engine_config
from localmoe.cli.output import ProgressBars, note
from localmoe.cli.sampling_options import loaded_sampling, sampling_config
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError, ContextLengthError
from localmoe.core.types import Image, Message
from localmoe.engine import Engine

_HELP = (
    r"/new begins anew, /image FILE shows a picture with the next question, a \ at the end of a line goes on "
    "in the next, Ctrl+C stops an answer, Ctrl+D ends."
)
_IMAGE = "/image "
_FIRST, _FURTHER = "> ", "... "
_LONGEST = 8_000_000  # characters of a question, past what any context holds: what is piped in may not end


def run_chat(args: argparse.Namespace) -> None:
    """Load, then answer line after line until the input ends.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    opening = (Message("system", args.system),) if (args.system or "").strip() else ()
    usual = GenerationRequest(
        messages=(*opening, Message("user", "")), sampling=sampling_config(args),
        max_new_tokens=args.max_new_tokens, thinking=args.thinking,
    )  # fmt: skip
    config = engine_config(args, policy=args.policy)
    with ProgressBars() as progress:
        engine = Engine.load(args.model, config, progress=progress)
    with engine:
        note(f"{engine.info().name} is ready: {_HELP}")
        sampling = loaded_sampling(args, engine)
        conversation = Conversation(engine, replace(usual, sampling=sampling))
        engine.captures.begin(sampling)  # while the question is typed
        for line in _questions():
            if f"{line} ".startswith(_IMAGE):
                _show(conversation, line[len(_IMAGE) :])
                continue
            if line in ("/new", "/help"):
                note(_HELP if line == "/help" else "A new conversation.")
                if line == "/new":
                    conversation.begin()
                continue
            try:
                conversation.ask(line)
            except (ConfigError, ContextLengthError) as error:  # of this question; another may be answered
                note(f"localmoe: {error}")
            engine.captures.begin()


def _show(conversation: Conversation, name: str) -> None:
    if not name.strip():
        note("Name the picture's file: /image FILE.")
        return
    try:
        conversation.show(Path(name.strip()))
    except ConfigError as error:
        note(f"localmoe: {error}")
    else:
        note(f"{name.strip()} goes with the next question.")


class Conversation:
    """What has been asked and answered. Thoughts are left out of earlier answers, as the templates of
    reasoning models expect; a question whose answer has no text is forgotten."""

    def __init__(self, engine: Engine, usual: GenerationRequest) -> None:
        """usual: what is asked, but for the question, which is its last message."""
        self._engine, self._usual = engine, usual
        self.begin()

    def begin(self) -> None:
        """Forget what has been said."""
        self.messages = self._usual.messages[:-1]
        self._images: tuple[Image, ...] = ()  # of the next question

    def show(self, path: Path) -> None:
        """A picture with the next question.

        Raises:
            ConfigError: it cannot be read, or the model reads none.
        """
        if not self._engine.info().reads_images:
            raise ConfigError(f"{self._engine.info().name} reads no pictures: ask without them.")
        self._images += read_images([path])

    def ask(self, question: str) -> None:
        """Print the answer as it is written.

        Raises:
            ContextLengthError: the conversation has become too long.
        """
        images, self._images = self._images, ()
        messages = (*self.messages, Message("user", question, images=images))
        request = replace(self._usual, messages=messages)
        text, stop = "", threading.Event()
        with _set_by_interrupt(stop):
            for event in self._engine.stream(request, stop):
                text += OPEN + event.text if event.opens_reasoning else event.text
                sys.stdout.write(event.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()
            note(answer_line(event.stats, self._engine.info().link))
            answer = split_reasoning(text).answer
            if answer:
                self.messages = (*messages, Message("assistant", answer))
            else:  # as it was stopped: its pictures go with what is asked in its place
                self._images = images


@contextlib.contextmanager
def _set_by_interrupt(stop: threading.Event) -> Iterator[None]:
    """Ctrl+C ends what is written at its next step; a second one ends the program."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _questions() -> Iterator[str]:
    """What is typed, or piped in; lines without anything are left out. Ctrl+C at the keyboard drops what is
    being typed, and twice in a row it ends the program: one that comes just behind an answer's end, which it
    was to stop, costs nobody the conversation."""
    lines: list[str] = []
    line: str | None = ""
    length, dropped = 0, False
    while line is not None:
        try:
            line = _read(_FURTHER if lines else _FIRST)
        except KeyboardInterrupt:
            if sys.stdin is None or not sys.stdin.isatty():
                raise
            note("" if dropped else "\nCtrl+C once more ends, as Ctrl+D does.")
            if dropped:
                raise
            lines, length, dropped = [], 0, True
            continue
        dropped = False
        if line is not None:
            lines.append(line.removesuffix("\\"))
            length += len(line) + 1
            if length > _LONGEST:
                raise ConfigError(f"A question has more than {_LONGEST:,} characters: pipe in a shorter one.")
        if line is None or not line.endswith("\\"):
            question, lines, length = "\n".join(lines).strip(), [], 0
            if question:
                yield question


def _read(prompt: str) -> str | None:
    """A line; None at the end of the input."""
    if sys.stdin is None:  # closed, as of a job that nobody types to
        return None
    if not sys.stdin.isatty():
        return _line()
    if not sys.stdout.isatty():  # Python would write the prompt among the answers of the file or pipe
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = _line()
        if line is None:
            note("")
        return line
    with contextlib.suppress(ImportError):  # not on Windows: without it a line cannot be edited as in a shell
        import readline  # noqa: F401
    try:
        with contextlib.redirect_stdout(sys.__stdout__):  # for what lets lines be edited
            return input(prompt)
    except EOFError:
        note("")
        return None


def _line() -> str | None:
    line = sys.stdin.readline(_LONGEST + 1)
    return line.rstrip("\r\n") if line else None
