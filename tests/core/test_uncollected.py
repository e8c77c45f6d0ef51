"""Importing without a search for garbage."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

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


def test_what_was_imported_for_good_is_never_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_for_good.py").write_text("class Kept:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine: list[object] = [[]]

    def is_searched() -> bool:
        return any(found is mine for found in gc.get_objects())

    for for_good, imports in ((False, False), (True, False), (False, True)):
        with uncollected(for_good=for_good):
            if imports:
                monkeypatch.delitem(sys.modules, "colorsys", raising=False)
                importlib.import_module("colorsys")
        assert is_searched()
    with uncollected(for_good=True):
        importlib.import_module("module_for_good")
    assert gc.isenabled() and not is_searched()


@pytest.mark.slow
def test_an_app_that_has_imported_all_has_nothing_large_to_search() -> None:
    """It held up all threads, the one that answers too, for half a second soon after the start."""
    code = (
        "import gc; from localmoe.engine import import_all; import_all(); mine = [[]]; import_all();"
        "assert any(found is mine for found in gc.get_objects()); print(len(gc.get_objects()))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(told) < 10_000
