"""Pictures that are named on a command line or in a conversation. Answers nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localmoe.core.errors import ConfigError
from localmoe.core.types import Image
from localmoe.vision.image_file import MAX_IMAGE_BYTES, check_image


def read_images(paths: Sequence[Path]) -> tuple[Image, ...]:
    """The files, before what is said with them.

    Raises:
        ConfigError: one cannot be read, or is no picture.
    """
    return tuple(map(_read, paths))


def _read(path: Path) -> Image:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:  # no such home, or no name of a file
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"Picture {path} cannot be read: {reason}.") from error
    try:
        check_image(data)
    except ConfigError as error:
        raise ConfigError(f"Picture {path}: {error}") from error
    return Image(data)
