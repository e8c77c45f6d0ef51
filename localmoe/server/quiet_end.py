"""What servers leave out of what uvicorn and asyncio say, as of requests that are broken off. Ends none."""

from __future__ import annotations

import asyncio
import logging

from localmoe.server.out_of_files import say_it_seldom


def say_less() -> None:
    """Have no traceback of each request that still waits for its client when time is up: it is no fault, and
    uvicorn says how many there were; nor of each connection that cannot be taken. May be called again."""
    say_it_seldom()
    logging.getLogger("uvicorn.error").addFilter(_is_told)


def _is_told(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
