"""Files that a user names: all of them up to a size, and one sentence for what is larger or never ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from localmoe.cli.arguments import parse_arguments
from localmoe.cli.sampling_options import json_schema
from localmoe.core.bounded_file import read_bounded, read_text_bounded
from localmoe.core.errors import LocalMoeError
from localmoe.core.prompts import read_prompts
from localmoe.core.routing_trace import RoutingTrace
from localmoe.quant.calibration import read_calibration
from localmoe.tables.store import read_results

ZEROS = Path("/dev/zero")
endless = pytest.mark.skipif(not ZEROS.exists(), reason="needs /dev/zero")


@pytest.mark.parametrize("most", [3, 1 << 20, (3 << 20) + 5])
def test_a_file_is_read_up_to_the_limit_and_not_past_it(most: int, tmp_path: Path) -> None:
    path, data = tmp_path / "x", os.urandom(most)
    path.write_bytes(data)
    assert read_bounded(path, most) == data
    path.write_bytes(data + b"x")
    with pytest.raises(OSError, match="it has more than") as caught:
        read_bounded(path, most)
    assert caught.value.strerror and caught.value.filename == str(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    path, data = tmp_path / "pipe", os.urandom(3 << 20)
    os.mkfifo(path)
    for most in (len(data), len(data) - 1):
        writer = threading.Thread(target=_written, args=(path, data))
        writer.start()
        try:
            assert read_bounded(path, most) == data
        except OSError as error:
            assert most < len(data) and "it has more than" in str(error)
        writer.join(5)


def _written(path: Path, data: bytes) -> None:
    with suppress(BrokenPipeError):  # where it is too much
        path.write_bytes(data)


def test_a_text_is_read_as_python_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes("\ufeffa\r\nb\rc\u2028é".encode())
    assert read_text_bounded(path, 100) == path.read_text("utf-8-sig") == "a\nb\nc\u2028é"


def _schema(path: Path) -> object:
    return json_schema(parse_arguments(["generate", "demo", "--prompt", "x", "--json-schema", str(path)]))


@endless
@pytest.mark.parametrize("read", [read_prompts, read_calibration, read_results, RoutingTrace.read, _schema])
def test_what_never_ends_is_refused_in_one_sentence(read: Callable[[Path], object]) -> None:
    with pytest.raises(LocalMoeError, match="/dev/zero") as caught:
        read(ZEROS)
    assert str(caught.value).count(". ") == 0
