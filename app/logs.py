"""The process's log: the last lines in memory for the Logs tab, and a file in the app's home that rotates.
Takes what localmoe and the app log themselves, and warnings of all else; writes no log line itself."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any

from app.unicode_text import whole_unicode

MAX_LINES = 2000  # in memory
FILE_BYTES, OLD_FILES = 1 << 20, 3
OWN = ("localmoe", "app")  # loggers whose INFO is kept
_APART = "uvicorn"  # a logger that hands nothing on to the root
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


@dataclass(frozen=True, slots=True)
class LogLine:
    """number: ascending from 1, without a gap. level: "INFO", "WARNING" or "ERROR". time: by the local
    clock."""

    number: int
    time: str
    level: str
    source: str
    text: str

    def as_dict(self) -> dict[str, str | int]:
        """For the page."""
        return {
            "number": self.number, "time": self.time, "level": self.level, "source": self.source,
            "text": self.text,
        }  # fmt: skip


class _Formatter(logging.Formatter):
    """Of an exception the places and the kind, but not its text, which might quote what was being written
    about; the terminal shows all of it."""

    def formatException(self, ei: _ExcInfo) -> str:
        kind, _, trace = ei
        if kind is None:
            return ""
        places = [
            f"  {place.filename}:{place.lineno} in {place.name}" for place in traceback.extract_tb(trace)
        ]
        return "\n".join([*places, kind.__name__])

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler may have cached a full one
        try:
            return whole_unicode(super().format(record))  # a file's name need not be one
        finally:
            record.exc_text = None


class _Memory(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self.count += 1  # the handler's lock is held
        level = "ERROR" if record.levelno >= logging.ERROR else record.levelname
        time = logging.Formatter().formatTime(record, "%H:%M:%S")
        self.lines.append(LogLine(self.count, time, level, record.name, text))


class _File(RotatingFileHandler):
    """Says once, in the terminal, that the disk refuses the file, and is quiet from then on."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        logging.getLogger().removeHandler(self)
        logging.getLogger(_APART).removeHandler(self)
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        print(f"localmoe: the log file {self.baseFilename} cannot be written: {reason}.", file=sys.stderr)


class LogBook:
    """Begins with `install`; `remove` undoes it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "localmoe.log"
        self._memory = _Memory()
        self._memory.setFormatter(_Formatter("%(message)s"))
        self._file: _File | None = None
        self._levels: dict[str, int] = {}
        self._hook = threading.excepthook

    def install(self) -> None:
        """Listen to the standard logging tree, and to threads that end with an exception.

        Raises:
            OSError: the folder cannot be made.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = _File(
            self.path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8", delay=True
        )
        self._file.setFormatter(_Formatter(_FORMAT))
        for name in OWN:
            self._levels[name] = logging.getLogger(name).level
            logging.getLogger(name).setLevel(logging.INFO)
        self.attach("")
        self._hook, threading.excepthook = threading.excepthook, self._note_thread

    def attach(self, name: str = _APART) -> None:
        """Listen to a logger; one that hands its lines on to the root needs it not."""
        for handler in self._handlers():
            logging.getLogger(name).addHandler(handler)

    def remove(self) -> None:
        """Listen no more, and close the file; the lines in memory stay."""
        for handler in self._handlers():
            logging.getLogger().removeHandler(handler)
            logging.getLogger(_APART).removeHandler(handler)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self._levels.clear()
        if self._file is not None:
            threading.excepthook = self._hook
            self._file.close()
            self._file = None

    def lines(self, after: int = 0) -> list[LogLine]:
        """Those in memory with a higher number, oldest first."""
        self._memory.acquire()
        try:
            return [line for line in self._memory.lines if line.number > after]
        finally:
            self._memory.release()

    def text(self) -> str:
        """What the files hold, oldest first; of one that is being rotated, nothing."""
        names = [*(f"{self.path.name}.{n}" for n in range(OLD_FILES, 0, -1)), self.path.name]
        found = [self.path.with_name(name) for name in names]
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found if path.is_file())

    def _handlers(self) -> list[logging.Handler]:
        return [self._memory, *([self._file] if self._file is not None else [])]

    def _note_thread(self, args: Any) -> None:
        """threading.excepthook: the terminal gets what it gets without a log, too."""
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread is not None else "?"
            info = (args.exc_type, args.exc_value, args.exc_traceback)
            logging.getLogger("app").error("the thread %s failed", name, exc_info=info)
        self._hook(args)
