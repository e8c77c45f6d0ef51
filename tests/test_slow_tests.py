"""Which tests a plain run leaves out: see support.slow_tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.slow_tests import is_plain

SOURCE = pytest.Config.ArgsSource


@pytest.mark.parametrize(
    ("option", "value", "plain"),
    [
        ("all", True, False), ("keyword", "loop", False), ("markexpr", "slow", False),
        ("markexpr", "not network", True), ("lf", True, False), ("verbose", 1, True),
    ],
)  # fmt: skip
def test_whoever_chooses_tests_gets_the_slow_ones_too(option: str, value: Any, plain: bool) -> None:
    options = {"all": False, "keyword": "", "markexpr": "", "lf": False, option: value}

    def config(source: SOURCE) -> Any:
        found = SimpleNamespace(**options)
        return SimpleNamespace(option=found, args_source=source, getoption=lambda name, _: options[name])

    assert is_plain(config(SOURCE.TESTPATHS)) == plain
    assert not is_plain(config(SOURCE.ARGS))


@pytest.mark.slow
def test_one_that_is_slow() -> None:
    """Chosen below."""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [["-k", "one_that_is_slow"], [__file__, "-k", "one_that_is_slow"]])
def test_the_workers_run_what_was_chosen(chosen: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-2000:]
