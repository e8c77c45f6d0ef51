"""Makes stdout and stderr take any text, and a refusal to write to stdout one sentence. Prints nothing."""

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
    """While it lasts, any text can be printed; at its end all of it has been written.

    Raises:
        OutputError: stdout refuses it, as a full disk does. BrokenPipeError: its reader went away.
    """
    _take_any_text(sys.stdout)
    _take_any_text(sys.stderr)
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,  # what is closed is None
        contextlib.redirect_stdout(cast(TextIO, _Stdout(sys.stdout or nowhere))),
    ):
        try:
            yield
        finally:
            sys.stdout.flush()


def drop_stdout() -> None:
    """Let what stdout could not write vanish: Python would try again, and complain, as it ends."""
    with contextlib.suppress(OSError):  # a stream without a descriptor
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def _take_any_text(stream: TextIO) -> None:
    """A file or a pipe gets UTF-8, whatever the locale; a terminal its own encoding. What still has no bytes,
    such as half of a surrogate pair, is escaped."""
    if not isinstance(stream, io.TextIOWrapper):
        return
    if stream.isatty():
        stream.reconfigure(errors="backslashreplace")
    else:
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


class _Stdout:
    """A stream whose refusals are told from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _refusals():
            return self._stream.write(text)

    def flush(self) -> None:
        with _refusals():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
