"""Pictures as files, for the page's tests."""

from __future__ import annotations

import io

import PIL.Image


def picture(
    colour: str | tuple[int, int, int] = "red", size: tuple[int, int] = (60, 40), kind: str = "PNG"
) -> bytes:
    """An encoded file of one colour."""
    out = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(out, kind)
    return out.getvalue()
