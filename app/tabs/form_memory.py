"""What a page knows of one of its forms. Knows no form."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Known = TypeVar("Known")


class FormMemory(Generic[Known]):
    """A state of one page, which several of its listeners may read and change at the same time: each holds
    the lock from its look at `known` until it has changed it."""

    def __init__(self, known: Known) -> None:
        self.lock = threading.Lock()
        self.known = known
