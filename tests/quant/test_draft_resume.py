"""Builds that ended half-way: what the next build of the same draft takes over, and what it makes again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_samples import (
    CONFIG,
    GATE_SHAPE,
    NAMING,
    leave_after,
    names_in,
    provenance,
    sample_layer,
    weights_of,
    writer_at,
)

from localmoe.core.errors import DraftError
from localmoe.quant import DraftWriter


def finish(writer: DraftWriter) -> Path:
    for layer in range(3):
        if layer not in writer.finished_layers:
            writer.add_layer(layer, sample_layer(layer))
    return writer.publish()


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, bytes]:
    """The weight files of a build that nothing stopped."""
    with writer_at(tmp_path / "whole" / "draft") as writer:
        return weights_of(finish(writer))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "draft"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_stopped_build_goes_on_at_its_first_missing_layer(
    out: Path, whole: dict[str, bytes], error: type[BaseException]
) -> None:
    left = leave_after(out, 2, error)
    assert not out.exists() and left.name.startswith(".draft.stopped-")
    with writer_at(out) as writer:
        assert writer.finished_layers == (0, 1)
        path = finish(writer)
    assert weights_of(path) == whole and names_in(out.parent) == {"draft"}
    assert "build_state.json" not in names_in(path)


def test_a_caller_says_which_errors_are_a_users_wish_to_stop(out: Path) -> None:
    for kept, expected in (((RuntimeError,), (0,)), ((), ())):
        with (
            pytest.raises(RuntimeError),
            DraftWriter(out, CONFIG, NAMING, provenance(), 1000, keep_on=kept) as writer,
        ):
            writer.add_layer(0, sample_layer(0))
            raise RuntimeError
        with writer_at(out) as writer:
            assert writer.finished_layers == expected


def test_finished_layers_are_read_as_they_were_written(out: Path) -> None:
    leave_after(out, 2)
    with writer_at(out) as writer:
        for layer in (1, 0):
            found = list(writer.read_layer(layer, 3, GATE_SHAPE))
            for matrices, expected in zip(found, sample_layer(layer), strict=True):
                for matrix, wanted in zip(matrices, expected, strict=True):
                    assert torch.equal(matrix.codes, wanted.codes)
                    assert torch.equal(matrix.scales, wanted.scales)


def flip_a_byte(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-7] ^= 1
    shard.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip_a_byte,
    "too short": lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
    "empty": lambda shard: shard.write_bytes(b""),
    "gone": lambda shard: shard.unlink(),
    "another layer's": lambda shard: shard.write_bytes(
        (shard.parent / "layer-00001.safetensors").read_bytes()
    ),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_shard_is_made_again(out: Path, whole: dict[str, bytes], how: str) -> None:
    DAMAGES[how](leave_after(out, 2) / "layer-00000.safetensors")
    with writer_at(out) as writer:
        assert writer.finished_layers == (1,)
        assert weights_of(finish(writer)) == whole


def edit_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = json.loads((folder / "build_state.json").read_text())
    change(state)
    (folder / "build_state.json").write_text(json.dumps(state))


def test_a_shard_that_the_state_does_not_name_and_foreign_files_are_removed(out: Path) -> None:
    left = leave_after(out, 2)
    edit_state(left, lambda state: state["shards"].pop("1"))
    for name in ("layer-00007.safetensors.part", "notes.txt", "model.safetensors.index.json"):
        (left / name).write_text("{}")
    with writer_at(out) as writer:
        assert writer.finished_layers == (0,)
        assert names_in(writer._folder.path) == {"layer-00000.safetensors", "build_state.json"}


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", '{"provenance": 3}', '{"shards": {}}', None])
def test_without_a_readable_state_a_build_starts_from_the_beginning(
    out: Path, whole: dict[str, bytes], text: str | None
) -> None:
    state = leave_after(out, 2) / "build_state.json"
    if text is None:
        state.unlink()
    else:
        state.write_text(text)
    with writer_at(out) as writer:
        assert writer.finished_layers == ()
        assert weights_of(finish(writer)) == whole


OTHER_RECIPES: dict[str, Any] = {
    "bits": 8,
    "group_size": 8,
    "method": "gptq",
    "base_fingerprint": "e" * 64,
    "base_revision": "1" * 40,
    "calibration_hash": "2" * 64,
    "seed": 1,
    "settings": {"damping": 0.01},
}


@pytest.mark.parametrize("key", OTHER_RECIPES)
def test_the_layers_of_another_recipe_are_removed(out: Path, key: str) -> None:
    leave_after(out, 2)
    with writer_at(out, replace(provenance(), **{key: OTHER_RECIPES[key]})) as writer:
        assert writer.finished_layers == ()
        assert len(names_in(out.parent)) == 1
    assert names_in(out.parent) == set()


def test_the_time_and_the_version_of_the_first_build_play_no_part(out: Path) -> None:
    leave_after(out, 2)
    later = replace(provenance(), created="2031-01-01T00:00:00+00:00", localmoe_version="9")
    with writer_at(out, later) as writer:
        assert writer.finished_layers == (0, 1)
        path = finish(writer)
    assert json.loads((path / "localmoe_draft.json").read_text())["localmoe_version"] == "9"


def test_a_build_that_ended_while_publishing_is_published_by_the_next(
    out: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, renamed = Path.rename, []

    def stop_at_second(path: Path, target: Path) -> Path:
        if target.name.startswith("model-") and renamed:
            raise KeyboardInterrupt
        renamed.append(target)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), writer_at(out) as writer:
        patch.setattr(Path, "rename", stop_at_second)
        finish(writer)
    assert not out.exists()
    with writer_at(out) as writer:
        assert writer.finished_layers == (0, 1, 2)
        assert weights_of(writer.publish()) == whole


def test_a_disk_that_is_full_when_a_build_goes_on_costs_no_finished_layer(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_after(out, 2)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DraftError, match=r"\(No space left on device\): free some disk space"):
            writer_at(out)
    with writer_at(out) as writer:
        assert writer.finished_layers == (0, 1)
        finish(writer)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_build_that_ended_at_the_last_rename_is_published_by_the_next(
    out: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    rename = Path.rename

    def stop_at_out(path: Path, target: Path) -> Path:
        if target == out:
            raise KeyboardInterrupt
        return rename(path, target)

    if replaces:
        with writer_at(out) as writer:
            finish(writer)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), writer_at(out) as writer:
        patch.setattr(Path, "rename", stop_at_out)
        finish(writer)
    assert not out.exists()
    with writer_at(out) as writer:
        assert writer.finished_layers == (0, 1, 2)
        assert weights_of(writer.publish()) == whole
    assert names_in(out.parent) == {"draft"} and "build_state.json" not in names_in(out)


def test_a_draft_whose_build_was_killed_after_the_last_rename_can_be_replaced(
    out: Path, whole: dict[str, bytes]
) -> None:
    with writer_at(out) as writer:
        finish(writer)
    (out / "build_state.json").write_text("{}")
    with writer_at(out) as writer:
        assert weights_of(finish(writer)) == whole
    assert "build_state.json" not in names_in(out)


def test_disk_space_is_asked_for_what_is_still_missing(out: Path) -> None:
    left = leave_after(out, 2)
    kept = sum(path.stat().st_size for path in left.glob("*.safetensors"))
    margin = 16 << 20
    for free, fits in ((margin + 500, True), (margin + 499, False)):
        try:
            with DraftWriter(
                out, CONFIG, NAMING, provenance(), kept + 500, free_bytes=lambda _, free=free: free,
                keep_on=(ZeroDivisionError,),
            ) as writer:  # fmt: skip
                assert fits and writer.finished_layers == (0, 1)
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        except DraftError as error:
            assert not fits and "disk space" in str(error)
    with writer_at(out) as writer:
        assert writer.finished_layers == (0, 1), "a refusal keeps what is there"
