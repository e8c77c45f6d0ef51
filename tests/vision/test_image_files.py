"""Pictures as files: what is read of them, and what is refused."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_endless_pictures import chunk

from localmoe.core.errors import ConfigError
from localmoe.vision.image_file import FORMATS, MAX_IMAGE_BYTES, check_image, read_image


def encoded(image: PIL.Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def beginning(width: int, height: int) -> bytes:
    """Of a PNG of that size: a whole one takes gigabytes to make, and what says its size is read first."""
    size = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b""))


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read_in_rgb(kind: str) -> None:
    data = encoded(PIL.Image.new("RGB", (30, 20), (200, 30, 40)), kind)
    check_image(data)
    found = read_image(data)
    assert found.mode == "RGB" and found.size == (30, 20)
    assert np.abs(np.array(found).astype(int) - (200, 30, 40)).max() < 12  # JPEG's and GIF's own


def test_it_is_upright_and_on_white() -> None:
    turned = PIL.Image.new("RGB", (30, 20))
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was held upright
    assert read_image(encoded(turned, "JPEG", exif=exif)).size == (20, 30)
    clear = PIL.Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert read_image(encoded(clear, "PNG")).getpixel((1, 1)) == (255, 255, 255)
    by_palette = encoded(clear.convert("RGB").quantize(4), "GIF", transparency=0)
    assert read_image(by_palette).getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_one_whose_camera_cannot_be_read_is_taken_as_it_is(kind: str) -> None:
    data = encoded(PIL.Image.new("RGB", (30, 20), "blue"), kind, exif=b"Exif\0\0nothing")
    assert read_image(data).size == (30, 20)


def test_grey_of_16_bits_has_all_its_shades() -> None:
    shades = np.arange(256, dtype=np.uint16).repeat(4).reshape(32, 32)
    for more in ({}, {"transparency": 65_535}):
        found = np.asarray(read_image(encoded(PIL.Image.fromarray(shades * 257), "PNG", **more)))
        assert np.array_equal(found[..., 0], shades) and (found[..., :1] == found).all()


def test_of_several_frames_the_first_is_read() -> None:
    red, blue = (PIL.Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    assert read_image(encoded(red, "GIF", save_all=True, append_images=[blue])).getpixel((1, 1)) == (
        255,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no picture that can be read: use PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture that can be read"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "no picture that can be read"),
        (bytes(MAX_IMAGE_BYTES + 1), r"The picture has 32\.0 MiB: use one of at most 32\.0 MiB"),
        (beginning(9000, 9000), "more than 64 million pixels"),
        (beginning(10_000, 10_000), "more than 64 million pixels"),
        (beginning(40_000, 40_000), "more than 64 million pixels"),
        (encoded(PIL.Image.new("RGB", (500, 2)), "PNG"), "500 x 2 pixels is too narrow"),
        (encoded(PIL.Image.new("RGB", (8, 8)), "TIFF"), "no picture that can be read"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_sentence(data: bytes, sentence: str) -> None:
    for read in (check_image, read_image):
        with pytest.raises(ConfigError, match=sentence):
            read(data)


def test_no_file_changes_what_the_process_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even meanwhile: other threads read pictures too, and would take that for what it was before."""
    before, opened, real = list(warnings.filters), [], PIL.Image.open

    def noted(*given: Any, **options: Any) -> PIL.Image.Image:
        opened.append(list(warnings.filters))
        return real(*given, **options)

    monkeypatch.setattr(PIL.Image, "open", noted)
    check_image(encoded(PIL.Image.new("RGB", (8, 8)), "PNG"))
    assert opened == [before]


@settings(max_examples=60)
@given(cut=st.floats(0.05, 0.95), seed=st.integers(0, 5), kind=st.sampled_from(FORMATS))
def test_a_file_that_ends_early_is_refused_or_read(cut: float, seed: int, kind: str) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    data = encoded(PIL.Image.fromarray(pixels), kind)
    try:
        assert read_image(data[: int(cut * len(data))]).size == (40, 40)
    except ConfigError as error:
        assert "picture" in str(error)
