"""What processes that localmoe starts of itself have in common. Starts none."""

from __future__ import annotations

import os
from pathlib import Path

import localmoe


def child_environment() -> dict[str, str]:
    """This process's environment, in which Python finds this very localmoe."""
    paths = [str(Path(localmoe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
