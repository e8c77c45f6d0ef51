"""GPTQ builds that end half-way: killed, cancelled or interrupted, then gone on with."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gptq_builds
import pytest
from gptq_builds import SMALL, build, small, weights_of
from torch import Tensor

from localmoe.core.draft_config import DraftSettings
from localmoe.core.errors import DraftError
from localmoe.quant import DraftCancelledError
from localmoe.quant.draft_progress import DraftProgress

Tiny = Callable[[str], tuple[Path, Any]]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("gpt_oss")[0]  # interleaved, transposed, biased


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of a build that nothing ended."""
    return weights_of(build(model, tmp_path_factory.mktemp("whole") / "draft")[0])


def cancel_at(model: Path, out: Path, experts: int, settings: DraftSettings = SMALL) -> None:
    """A build that is cancelled after some experts' codes are found."""
    cancel = threading.Event()

    def report(done: int) -> None:
        if done == experts:
            cancel.set()

    with pytest.raises(DraftCancelledError, match="cancelled after"):
        build(model, out, settings, report, cancel)
    assert not out.exists()


def only_draft_in(folder: Path) -> bool:
    return [path.name for path in folder.iterdir()] == ["draft"]


@pytest.mark.slow
def test_a_killed_build_goes_on_with_its_finished_layers(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    command = [sys.executable, gptq_builds.__file__, str(model), str(out), "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        process.kill()
    assert not out.exists() and list(tmp_path.iterdir()), "two layers lie in a hidden folder"
    draft, done = build(model, out)
    assert done == [8, 16, *range(17, 25)]
    assert weights_of(draft) == whole and only_draft_in(tmp_path)


@pytest.mark.parametrize(("experts", "kept"), [(1, 0), (8, 1), (13, 1), (24, 3)])
@pytest.mark.slow(but=2)
def test_a_cancelled_build_ends_at_once_and_goes_on_from_its_last_whole_layer(
    experts: int, kept: int, model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    cancel_at(model, tmp_path / "draft", experts)
    draft, done = build(model, tmp_path / "draft")
    assert done == [*range(8, 8 * kept + 1, 8), *range(8 * kept + 1, 25)]
    assert weights_of(draft) == whole and only_draft_in(tmp_path)


def test_ctrl_c_keeps_finished_layers_too_and_an_error_does_not(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "draft"

    def ends_with(error: type[BaseException]) -> None:
        def report(done: int) -> None:
            if done == 10:
                raise error

        with pytest.raises(error):
            build(model, out, report=report)

    ends_with(ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []
    ends_with(KeyboardInterrupt)
    draft, done = build(model, out)
    assert done[0] == 8 and weights_of(draft) == whole


def test_a_build_may_be_cancelled_again_and_again(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for experts in (1, 8, 16):
        cancel_at(model, tmp_path / "draft", experts)
    draft, done = build(model, tmp_path / "draft")
    assert done == [8, 16, *range(17, 25)] and weights_of(draft) == whole


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"bits": 3}, {"group_size": 64}, {"gate_weighted": False}, {"act_order": False},
     {"num_tokens": 2048}, {"sequence_length": 32}, {"calibration": True}],
)  # fmt: skip
def test_a_build_with_other_settings_starts_from_the_beginning(
    change: dict[str, Any], model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "own.txt").write_text("Another text to calibrate with. " * 100)
    (tmp_path / "place").mkdir()
    other = replace(SMALL, calibration=tmp_path / "own.txt") if "calibration" in change else small(**change)
    cancel_at(model, tmp_path / "place" / "draft", 13, other)
    draft, done = build(model, tmp_path / "place" / "draft")
    assert done == list(range(1, 25))
    assert weights_of(draft) == whole and only_draft_in(tmp_path / "place")


def test_a_cancelled_rounded_build_keeps_nothing(model: Path, tmp_path: Path) -> None:
    cancel_at(model, tmp_path / "draft", 13, DraftSettings("rtn"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_costs_only_the_layer_under_way(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = DraftProgress.add

    def full(self: DraftProgress, decoder_layer: int, tensors: Mapping[str, Tensor]) -> None:
        if decoder_layer == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, decoder_layer, tensors)

    out = tmp_path / "draft"
    with monkeypatch.context() as patch:
        patch.setattr(DraftProgress, "add", full)
        with pytest.raises(DraftError, match=r"No space left on device\): free some disk space"):
            build(model, out)
    draft, done = build(model, out)
    assert done[0] == 8 and weights_of(draft) == whole
    assert only_draft_in(tmp_path)


def test_memory_that_does_not_suffice_to_go_on_costs_no_finished_layer(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    cancel_at(model, tmp_path / "draft", 17)
    with pytest.raises(DraftError, match="give a larger budget"):
        build(model, tmp_path / "draft", replace(SMALL, budget_bytes=1 << 20))
    draft, done = build(model, tmp_path / "draft")
    assert done == [8, 16, *range(17, 25)] and weights_of(draft) == whole


def test_a_place_that_was_taken_meanwhile_costs_no_finished_layer(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """As by a file manager that looked into an empty folder."""
    out = tmp_path / "draft"
    out.mkdir()

    def take(done: int) -> None:
        if done == 20:
            (out / ".DS_Store").touch()

    with pytest.raises(DraftError, match=r"holds something that .*, or take it away .* is finished\.$"):
        build(model, out, report=take)
    (out / ".DS_Store").unlink()
    draft, done = build(model, out)
    assert done == [8, 16, 24] and weights_of(draft) == whole and only_draft_in(tmp_path)
