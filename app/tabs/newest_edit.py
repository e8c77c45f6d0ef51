"""Of a form whose every edit asks the server: which of a page's edits is the newest. What is answered to an
older one comes too late to say what the form holds. Decides nothing of the answers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

_PAGES = 256  # that are remembered


class NewestEdit:
    """By page. May be used from any thread."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, page: str) -> int:
        """Something was edited there; the edit's number."""
        with self._lock:
            number = self._numbers.pop(page, 0) + 1
            self._numbers[page] = number
            while len(self._numbers) > _PAGES:
                self._numbers.popitem(last=False)
            return number

    def number(self, page: str) -> int:
        """Of the newest edit; 0 before the first."""
        with self._lock:
            return self._numbers.get(page, 0)
