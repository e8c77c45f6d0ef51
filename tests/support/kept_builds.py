"""What compilers made of the kernels, kept in pytest's cache until any source of a kernel or any version
changes. Compiles nothing."""

from __future__ import annotations

import hashlib
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "localmoe" / "kernels"
COMPILERS = ("torch", "triton", "numba", "llvmlite", "numpy")


def kept_builds(config: pytest.Config, name: str) -> Path:
    """The folder for a compiler to keep its work in, `name` being what tells it from others. One of other
    sources is deleted: nothing old is ever found, and no folder grows."""
    assert config.cache is not None
    parent = config.cache.mkdir(f"kept-{name}")
    folder = parent / _state()
    for old in parent.iterdir():
        if old != folder:
            shutil.rmtree(old)
    folder.mkdir(exist_ok=True)
    return folder


def _state() -> str:
    """Of the kernels' sources and of what compiles them."""
    state = hashlib.sha256()
    for file in sorted(KERNELS.rglob("*.py")):
        state.update(f"{file.relative_to(KERNELS)}\0".encode() + file.read_bytes())
    for package in COMPILERS:
        try:
            state.update(f"{package} {version(package)}\0".encode())
        except ModuleNotFoundError:  # there is no Triton for this system
            continue
    return state.hexdigest()[:16]
