"""Makes stdout and stderr take any text, and stdin any bytes. What stdout refuses is told in a sentence, what
stderr does is lost. Decides not what is printed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from localmoe.core.errors import LocalMoeError


class OutputError(LocalMoeError):
    """The system refuses to write what is printed."""


@contextlib.contextmanager
def sound_streams() -> Iterator[None]:
    """While it lasts, any text can be printed and any bytes read; at its end all text has been written. What
    stderr refuses (notes, progress) is lost and ends no work.

    Raises:
        OutputError: stdout refuses it, as a full disk does. BrokenPipeError: its reader went away.
    """
    _take_any_text(sys.stdout, errors="backslashreplace")
    _take_any_text(sys.stderr, errors="backslashreplace")
    # what is no text comes as surrogates, of which a prompt is refused in a sentence
    _take_any_text(sys.stdin, errors="surrogateescape")
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,  # what is closed is None
        contextlib.redirect_stdout(cast(TextIO, _Stdout(sys.stdout or nowhere))),
        contextlib.redirect_stderr(cast(TextIO, _Stderr(sys.stderr or nowhere))),
    ):
        try:
            yield
        finally:
            tell("")  # Python, which would try again as it ends, would make that its exit code
            sys.stdout.flush()


def drop_stdout() -> None:
    """Let what stdout could not write vanish: Python would try again, and complain, as it ends."""
    _drop(sys.stdout)


def tell(sentence: str) -> None:
    """A line on stderr, if it takes one; what it could not write vanishes, for the same reason."""
    stream = sys.stderr.inner if isinstance(sys.stderr, _Stderr) else sys.stderr
    if stream is None:  # closed
        return
    try:
        stream.write(sentence)
        stream.flush()
    except OSError:
        _drop(stream)


def _drop(stream: TextIO) -> None:
    with contextlib.suppress(OSError):  # a stream without a descriptor
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def _take_any_text(stream: TextIO, *, errors: str) -> None:
    """A file or a pipe has UTF-8, whatever the locale; a terminal its own encoding. What still has no bytes,
    such as half of a surrogate pair, or is none of them, is escaped."""
    if not isinstance(stream, io.TextIOWrapper):
        return
    if stream.isatty():
        stream.reconfigure(errors=errors)
    else:
        stream.reconfigure(encoding="utf-8", errors=errors)


class _Stream:
    """A stream, but for what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.inner = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Stderr(_Stream):
    """A stream whose refusals are nobody's business: there is no other place to tell them."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.inner.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.inner.flush()


class _Stdout(_Stream):
    """A stream whose refusals are told from those of other files."""

    def write(self, text: str) -> int:
        with _refusals():
            return self.inner.write(text)

    def flush(self) -> None:
        with _refusals():
            self.inner.flush()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"What is printed cannot be written ({error.strerror or error}): free some space, or send it "
            "elsewhere."
        ) from None
