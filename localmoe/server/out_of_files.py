"""What is said while no connection can be taken, as the process has no file descriptor left. Opens none."""

from __future__ import annotations

import errno
import logging
import time

# connections that wait to be taken: asyncio says of each of them, once a second, that it cannot be
BACKLOG = 128
_AGAIN_S = 60.0
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Seldom(logging.Filter):
    """One sentence a minute in the place of asyncio's tracebacks."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at: float | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ValueError) and "_start_serving" in record.getMessage():
            return False  # asyncio was to try again, and the server has closed that socket since
        if not isinstance(error, OSError) or error.errno not in _FULL or "accept" not in record.getMessage():
            return True
        now = time.monotonic()
        if self._said_at is not None and now - self._said_at < _AGAIN_S:
            return False
        self._said_at = now
        record.msg, record.args, record.exc_info, record.exc_text = _sentence(error), (), None, None
        return True


def _sentence(error: OSError) -> str:
    return (
        f"new connections wait until others are closed ({error.strerror}): a higher `ulimit -n` lets this "
        "server hold more of them"
    )


def say_it_seldom() -> None:
    """May be called again."""
    logger = logging.getLogger("asyncio")
    if not any(isinstance(known, _Seldom) for known in logger.filters):
        logger.addFilter(_Seldom())
