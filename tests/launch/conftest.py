"""The launch tests' checkouts: one set up for the session by real starts, and copies of it to work on."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from launch_checkout import LAUNCH, Checkout, FirstStarts, free_port, make_checkout


@pytest.fixture(scope="session")
def first_starts(tmp_path_factory: pytest.TempPathFactory) -> FirstStarts:
    checkout = make_checkout(tmp_path_factory.mktemp("launch"))
    try:
        half_made = kill_while_it_makes_venv(checkout)
        port = str(free_port())
        first = checkout.start("--no-browser", "--port", port)
        first.wait_for("[1/4]")
        second = checkout.start("--no-browser", "--port", port)
        second_code = second.exit_code(timeout_s=90)
        log = (checkout.home / "logs" / "setup.log").read_text()
        return FirstStarts(checkout, half_made, first, second, (first.end(), second_code), log)
    finally:
        checkout.close()


def kill_while_it_makes_venv(checkout: Checkout) -> bool:
    """Whether the killed start left a .venv with a Python but no pip."""
    venv, start = checkout.root / ".venv", checkout.start("--no-browser")
    while not (venv / "bin" / "python").exists():
        assert start.process.poll() is None, start.output
        time.sleep(0.005)
    os.killpg(start.process.pid, signal.SIGKILL)
    start.exit_code()
    return not list(venv.glob("lib/python*/site-packages/pip/__main__.py"))


def link_packages(source: str, target: str) -> None:
    """Copies a file; installed packages, which pip replaces but never rewrites, are linked: it is faster."""
    if "site-packages" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


@pytest.fixture
def ready(first_starts: FirstStarts, tmp_path: Path) -> Iterator[Checkout]:
    """A copy of a checkout that is already set up, as if it had been set up there, with an empty home
    folder."""
    made = first_starts.checkout
    shutil.copytree(made.root, tmp_path / "checkout", symlinks=True, copy_function=link_packages)
    checkout = Checkout(tmp_path / "checkout", tmp_path / "home", made.wheels)
    stamp = checkout.root / ".venv" / "localmoe-setup.json"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "root": str(checkout.root)}))
    yield checkout
    checkout.close()


@pytest.fixture
def launch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_under_test", LAUNCH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
