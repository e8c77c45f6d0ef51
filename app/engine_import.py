"""Imports the engine, in one thread at a time. transformers puts another module in its own place while it is
imported, so a second thread that imports it then keeps a broken one. Decides nothing."""

from __future__ import annotations

import importlib
import threading

_IMPORTING = threading.Lock()


def import_engine() -> None:
    """Before any thread but the main one uses `localmoe.engine`; takes seconds once."""
    with _IMPORTING:
        importlib.import_module("localmoe.engine")
