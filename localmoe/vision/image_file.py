"""Pictures as files, from whoever sends them: which are read, and up to which size. Knows no model."""

from __future__ import annotations

import io
import warnings
from typing import Final

import numpy as np
import PIL.Image
import PIL.ImageOps

from localmoe.core.errors import ConfigError
from localmoe.core.units import format_bytes

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_IMAGE_BYTES: Final = 32 << 20
MAX_IMAGE_PIXELS: Final = 1 << 26  # 192 MiB as RGB
_HEADER_READS: Final = 1 << 14  # a few hundred in pictures; Pillow takes hours for a file of comments alone
_PIXEL_READS: Final = 1 << 18  # four for each of a PNG's chunks
_LONGEST_SHAPE: Final = 200  # times as long as wide; what transformers' processors take
# sizes are looked at here; for the process, as threads that did it in turn would keep each other's filters
warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)


class _File(io.BytesIO):
    """Read in so many pieces at most."""

    left = _HEADER_READS

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes.

        Raises:
            ValueError: there are none left to be read.
        """
        if self.left <= 0:
            raise ValueError("it has more parts than pictures have")
        self.left -= 1
        return super().read(size)


def check_image(data: bytes) -> None:
    """See that it is a picture that can be read; reads no pixels.

    Raises:
        ConfigError: it is none, of an unknown format, or too large.
    """
    _opened(data).close()


def read_image(data: bytes) -> PIL.Image.Image:
    """The picture in RGB, as its camera was held, on white where it is transparent; of several frames the
    first.

    Raises:
        ConfigError: as `check_image`, or its pixels are damaged.
    """
    with _opened(data) as image:
        try:
            upright = _in_bytes(_upright(image))
            if not upright.has_transparency_data:
                return upright.convert("RGB")
            with_alpha = upright.convert("RGBA")
        except Exception as error:  # a decoder of a damaged file may raise anything
            raise ConfigError(f"The picture is damaged ({error}): use another file.") from error
    white = PIL.Image.new("RGBA", with_alpha.size, "white")
    return PIL.Image.alpha_composite(white, with_alpha).convert("RGB")


def _upright(image: PIL.Image.Image) -> PIL.Image.Image:
    image.load()  # what fails here is the picture itself
    try:
        return PIL.ImageOps.exif_transpose(image)
    except Exception:  # how its camera was held is said in a way that cannot be read
        return image


def _in_bytes(image: PIL.Image.Image) -> PIL.Image.Image:
    """Of grey in 16 bits the upper eight; Pillow makes white of all that does not fit into these."""
    if not image.mode.startswith("I"):
        return image
    return PIL.Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))


def _opened(data: bytes) -> PIL.Image.Image:
    if len(data) > MAX_IMAGE_BYTES:
        raise ConfigError(
            f"The picture has {format_bytes(len(data))}: use one of at most {format_bytes(MAX_IMAGE_BYTES)}."
        )
    file = _File(data)
    try:
        image = PIL.Image.open(file, formats=FORMATS)
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        raise _too_large() from None
    except Exception as error:  # a decoder of what a stranger sends may raise anything
        raise ConfigError(
            f"It is no picture that can be read: use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        ) from error
    file.left = _PIXEL_READS
    width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise _too_large()
    if max(width, height) > _LONGEST_SHAPE * min(width, height):
        raise ConfigError(f"A picture of {width} x {height} pixels is too narrow: use a wider part of it.")
    return image


def _too_large() -> ConfigError:
    return ConfigError(f"The picture has more than {MAX_IMAGE_PIXELS >> 20} million pixels: make it smaller.")
