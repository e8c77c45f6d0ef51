"""Where localmoe keeps its own files. Creates nothing and does not know what lies there."""

from __future__ import annotations

import os
from pathlib import Path


def localmoe_home() -> Path:
    """The folder LOCALMOE_HOME, or ~/.localmoe if that is unset or empty; it need not exist."""
    return Path(os.path.expanduser(os.environ.get("LOCALMOE_HOME") or "~/.localmoe")).absolute()


def models_home() -> Path:
    """The folder of localmoe's own models in it, which may be a link to another disk, or a disk."""
    return localmoe_home() / "models"
