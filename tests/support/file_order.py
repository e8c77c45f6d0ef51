"""The order in which the workers take test files. Knows no test by name."""

from __future__ import annotations

from pathlib import Path

import pytest


def order_files(items: list[pytest.Item]) -> None:
    """Files of slow tests first, so that no worker ends with one while the others have nothing left; those of
    browser tests, whose pages must answer in time, evenly among the rest, so that no two run at once."""
    files = list(dict.fromkeys(item.path for item in items))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    pages = {item.path for item in items if item.get_closest_marker("browser")}
    browser = [file for file in files if file in pages]
    order: list[Path] = sorted((file for file in files if file not in browser), key=lambda f: f not in slow)
    step = len(order) // (len(browser) + 1)
    for number, file in enumerate(browser):
        order.insert((number + 1) * step + number, file)
    places = {file: place for place, file in enumerate(order)}
    items.sort(key=lambda item: places[item.path])
