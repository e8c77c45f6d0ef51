"""Importing without a search for garbage."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from localmoe.core.uncollected import uncollected


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_searched_within_and_everything_afterwards(fails: bool) -> None:
    assert gc.isenabled()
    with suppress(ImportError), uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
        if fails:
            raise ImportError("no such module")
    assert gc.isenabled()


def test_where_the_search_is_off_it_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
