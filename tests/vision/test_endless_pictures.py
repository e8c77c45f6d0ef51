"""Files that anyone may send, of which Pillow reads millions of parts one by one: they cost little."""

from __future__ import annotations

import io
import struct
import time
import zlib

import PIL.Image
import pytest

from localmoe.core.errors import ConfigError
from localmoe.vision.image_file import check_image, read_image


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


HEAD = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0))
PIXELS = zlib.compress(bytes(2 * (1 + 3 * 2)))
ENDLESS = {  # how each begins, what follows, and how often
    "JPEG of comments": (b"\xff\xd8", b"\xff\xfe\x00\x02", 7 << 20),
    "JPEG of fillers": (b"\xff\xd8", b"\xff", 30 << 20),
    "PNG of unknown chunks": (HEAD, chunk(b"abCd"), 2 << 20),
    "GIF of comments": (b"GIF89a\x04\0\x04\0\0\0\0", b"!\xfe\x01a\0", 6 << 20),
    "GIF of one comment": (b"GIF89a\x04\0\x04\0\0\0\0!\xfe", b"\xff" + b"a" * 255, 130_000),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_header_without_end_is_refused_soon(kind: str) -> None:
    head, part, count = ENDLESS[kind]
    data = head + part * count
    began = time.process_time()
    with pytest.raises(ConfigError, match="no picture that can be read"):
        check_image(data)
    assert time.process_time() - began < 3


def test_what_follows_the_pixels_without_end_is_refused_soon() -> None:
    data = HEAD + chunk(b"IDAT", PIXELS) + chunk(b"abCd") * (2 << 20)
    check_image(data)
    began = time.process_time()
    with pytest.raises(ConfigError, match="damaged"):
        read_image(data)
    assert time.process_time() - began < 5


def test_pixels_in_many_chunks_and_comments_in_hundreds_are_read() -> None:
    parts = b"".join(chunk(b"IDAT", PIXELS[i : i + 1]) for i in range(len(PIXELS)))
    texts = chunk(b"tEXt", b"Comment\0a") * 900
    assert read_image(HEAD + texts + parts + texts + chunk(b"IEND")).size == (2, 2)
    noise = PIL.Image.effect_noise((1200, 900), 90)
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        file = io.BytesIO()
        noise.save(file, form)
        assert read_image(file.getvalue()).size == (1200, 900)
