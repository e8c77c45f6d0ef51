"""Threads that are begun in the midst of work, when memory may be short. Decides nothing about them."""

from __future__ import annotations

import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable


def begin_thread(name: str, run: Callable[[], None]) -> None:
    """Run it in a thread that ends with the process. What it raises is told of as of any thread of this name.

    Thread.start would wait for ever for a thread that has too little memory to say that it has begun.

    Raises:
        RuntimeError: the system gives no thread.
    """

    def apart() -> None:
        try:
            run()
        except BaseException:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.Thread(name=name))))

    try:
        start_new_thread(apart, ())
    except MemoryError as error:
        raise RuntimeError("there is no memory for a thread") from error
