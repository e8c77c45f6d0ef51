"""What uvicorn says of requests that the server's end breaks off. Ends none."""

from __future__ import annotations

import asyncio
import logging


def leave_out_cancelled() -> None:
    """Have no traceback of each request that still waits for its client when time is up: it is no fault, and
    uvicorn says how many there were. May be called again."""
    logging.getLogger("uvicorn.error").addFilter(_is_told)


def _is_told(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
