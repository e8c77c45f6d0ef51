"""Recorded routing: kept whole, read only if it is sound, and measured against a plain loop."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core import routing_trace
from localmoe.core.errors import ConfigError
from localmoe.core.routing_trace import RoutingTrace
from localmoe.model.routing_trace import RoutingRecorder


def a_trace(tokens: int = 30, starts: tuple[int, ...] = (0, 12, 13)) -> RoutingTrace:
    rng = np.random.default_rng(3)
    experts = rng.random((tokens, 4, 9)).argsort(-1)[:, :, :3].astype(np.int16)
    return RoutingTrace("some/model", 9, experts, np.array(starts, np.int64))


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path, trace = tmp_path / "a trace without suffix", a_trace()
    path.write_text("an older file")
    trace.write(path)
    back = RoutingTrace.read(path)
    assert (back.model, back.num_experts) == ("some/model", 9)
    assert back.experts.dtype == np.int16 and (back.experts == trace.experts).all()
    assert (back.starts == trace.starts).all()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "no temporary file stays"


def test_a_trace_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        a_trace().write(tmp_path / "absent" / "trace.npz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        a_trace().write(tmp_path / "folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def header(**changes: Any) -> np.ndarray:
    values = {"format": "localmoe-routing-trace", "version": 1, "model": "m", "num_experts": 9}
    return np.array(json.dumps({**values, **changes}))


def write(path: Path, **changes: Any) -> None:
    arrays = {"header": header(), "experts": a_trace().experts, "starts": a_trace().starts}
    np.savez(path, **{name: value for name, value in {**arrays, **changes}.items() if value is not None})


def cut(path: Path) -> None:
    a_trace().write(path)
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    write(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def one_array(path: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))


REPEATED = a_trace().experts.copy()
REPEATED[7, 2] = [4, 1, 4]
NO_TRACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "no routing trace"),
    "text": (lambda path: path.write_text("hello"), "no routing trace"),
    "one array": (one_array, "no routing trace"),
    "truncated": (cut, "no routing trace, or is damaged"),
    "flipped byte": (flip, "damaged"),
    "other arrays": (lambda path: np.savez(path, a=np.zeros(2)), "no routing trace"),
    "pickled": (lambda path: write(path, experts=np.array([{}], object)), "damaged"),
    "no header": (lambda path: write(path, header=None), "no routing trace"),
    "header is nested deeply": (lambda path: write(path, header=np.array("[" * 100_000)), "no routing trace"),
    "header is no object": (lambda path: write(path, header=np.array("[1]")), "no routing trace"),
    "another format": (lambda path: write(path, header=header(format="other")), "no routing trace"),
    "another version": (lambda path: write(path, header=header(version=2)), "version 2.*version 1"),
    "no number of experts": (lambda path: write(path, header=header(num_experts="x")), "contradicts"),
    "floats": (lambda path: write(path, experts=np.zeros((3, 4, 3))), "contradicts"),
    "no tokens": (lambda path: write(path, experts=a_trace().experts[:0]), "contradicts"),
    "no layers": (lambda path: write(path, experts=a_trace().experts[:, :0]), "contradicts"),
    "two dimensions": (lambda path: write(path, experts=a_trace().experts[0]), "contradicts"),
    "an expert past the last": (lambda path: write(path, header=header(num_experts=8)), "contradicts"),
    "a negative expert": (lambda path: write(path, experts=a_trace().experts - 1), "contradicts"),
    "an expert twice": (lambda path: write(path, experts=REPEATED), "contradicts"),
    "no prompt": (lambda path: write(path, starts=np.zeros(0, np.int64)), "contradicts"),
    "prompts out of order": (lambda path: write(path, starts=np.array([0, 5, 5])), "contradicts"),
    "a prompt past the end": (lambda path: write(path, starts=np.array([0, 30])), "contradicts"),
    "not from the start": (lambda path: write(path, starts=np.array([1, 5])), "contradicts"),
}


@pytest.mark.parametrize("kind", NO_TRACES)
def test_a_file_that_is_no_sound_trace_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    make, message = NO_TRACES[kind]
    make(path)
    with pytest.raises(ConfigError, match=message) as refusal:
        RoutingTrace.read(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


@settings(max_examples=150)
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
def test_whatever_is_damaged_is_refused_or_read_as_a_trace(
    changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    a_trace().write(path)
    content = bytearray(path.read_bytes())
    for place, change in changes:
        content[place % len(content)] ^= change
    path.write_bytes(content)
    with suppress(ConfigError):
        RoutingTrace.read(path)


def test_an_array_that_claims_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    claimed = {"descr": "<i2", "fortran_order": False, "shape": (10**13, 4, 3)}
    with zipfile.ZipFile(tmp_path / "trace.npz", "w") as file:
        for name, array in {"header": header(), "starts": a_trace().starts}.items():
            with file.open(f"{name}.npy", "w") as stream:
                np.save(stream, array)
        with file.open("experts.npy", "w") as stream:
            np.lib.format.write_array_header_1_0(stream, claimed)
    with pytest.raises(ConfigError, match="damaged"):
        RoutingTrace.read(tmp_path / "trace.npz")


def test_a_trace_that_is_too_large_packed_or_unpacked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    many = np.zeros((100_000, 2, 2), np.int16)
    many[..., 1] = 1
    RoutingTrace("m", 4, many, np.array([0])).write(path)
    for most, words in ((800_000, "it unpacks to more than"), (500, "it has more than 500 B")):
        monkeypatch.setattr(routing_trace, "MOST_BYTES", most)
        with pytest.raises(ConfigError, match=words):
            RoutingTrace.read(path)
    monkeypatch.setattr(routing_trace, "MOST_BYTES", 810_000)
    assert len(RoutingTrace.read(path).experts) == 100_000


def test_the_sound_variant_of_those_files_is_read(tmp_path: Path) -> None:
    write(tmp_path / "trace.npz")
    assert RoutingTrace.read(tmp_path / "trace.npz").model == "m"


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.npz", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            RoutingTrace.read(path)


def test_the_repeat_share_is_that_of_a_plain_loop_within_prompts() -> None:
    trace = a_trace(starts=(0, 12, 13))
    shares = [
        len(set(trace.experts[token, layer].tolist()) & set(trace.experts[token - 1, layer].tolist())) / 3
        for token in range(1, 30)
        if token not in (12, 13)
        for layer in range(4)
    ]
    assert trace.repeat_share() == pytest.approx(sum(shares) / len(shares))
    assert a_trace(3, (0, 1, 2)).repeat_share() is None


def test_what_is_recorded_layer_by_layer_and_pass_by_pass_is_put_together() -> None:
    trace = a_trace(30, (0, 12, 13))
    recorder = RoutingRecorder(4)
    for begin, end, is_prompt in ((0, 12, True), (12, 13, True), (13, 20, True), (20, 30, False)):
        if is_prompt:
            recorder.begin()
        for layer in range(4):
            recorder.record(layer, torch.from_numpy(trace.experts[begin:end, layer].astype(np.int64)))
        assert recorder.num_tokens == end
    whole = recorder.trace("some/model", 9)
    assert (whole.experts == trace.experts).all() and (whole.starts == trace.starts).all()
