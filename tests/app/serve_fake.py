"""`python serve_fake.py [options of python -m app]`: the real app on the fake engine, for browser tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fake_engine import SEEING, FakeLoader

from app.main import main
from app.models.fits import Fits
from app.models.shelf import Shelf


def _models() -> list[tuple[str, str]]:
    return [("demo (31.0 MiB)", "demo"), ("other-moe (2.0 GiB)", "other-moe"), (SEEING, SEEING)]


def serve_fake(options: Sequence[str] | None = None) -> int:
    """Until it is ended; its exit code."""
    if "LOOK_AT_MACHINE" not in os.environ:  # importing the engine for it takes seconds in each module's app
        Fits._measure = lambda self: None  # type: ignore[method-assign]
        Shelf.look_ahead = lambda self, quiet: None  # type: ignore[method-assign]
    improve_s = os.environ.get("FAKE_IMPROVE_S")
    loader = FakeLoader(
        float(os.environ.get("FAKE_LOAD_S", "0.3")),
        float(os.environ.get("FAKE_STEP_S", "0.02")),
        None if improve_s is None else float(improve_s),
    )
    if (hurry := os.environ.get("FAKE_IMPROVE_HURRY")) is not None:
        loader.hurries = Path(hurry).exists
    return main(options, engine_loader=loader, list_models=_models)


if __name__ == "__main__":
    sys.exit(serve_fake())
