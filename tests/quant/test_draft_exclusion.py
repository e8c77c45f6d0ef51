"""One build of a draft at a time: what a running, a killed and a faster build mean to another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from quant_samples import GATE_SHAPE, build, leave_after, names_in, sample_layer, weights_of, writer_at

from localmoe.core.errors import DraftError
from localmoe.quant.draft_writer import ExpertMatrices


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "draft"


def test_a_leftover_whose_process_id_was_given_to_another_process_is_cleaned(tmp_path: Path) -> None:
    stale = tmp_path / f".draft.building-{os.getpid()}-1234"
    stale.mkdir()
    (tmp_path / f".draft.replaced-{os.getpid()}-1234").mkdir()
    build(tmp_path / "draft")
    assert names_in(tmp_path) == {"draft"}


def test_two_builds_of_one_draft_in_one_process_do_not_mix(tmp_path: Path) -> None:
    with writer_at(tmp_path / "draft") as writer:
        with pytest.raises(DraftError, match="being built"):
            writer_at(tmp_path / "draft")
        writer.add_layer(1, sample_layer(0))
        writer.publish()


KILLED_BUILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from quant_samples import Source, build

STATES = Path(sys.argv[1]).parent, ".*building*/build_state.json"

class Hanging(Source):
    def matrices(self, layer, expert):
        if (layer, expert) == (1, 1):
            while not any("sha256" in state.read_text() for state in Path.glob(*STATES)):
                time.sleep(0.01)  # the first layer is being written
            print("half way", flush=True)
            time.sleep(60)
        return super().matrices(layer, expert)

build(Path(sys.argv[1]), Hanging())
"""


@contextmanager
def half_way(out: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has built the first of two layers, killed at the end."""
    command = [sys.executable, "-c", KILLED_BUILD, str(out), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "half way\n"
            yield process
        finally:
            process.kill()


def test_a_running_build_excludes_others_and_a_killed_one_leaves_its_finished_layers(out: Path) -> None:
    other = out.parent / ".draft2.building-1-1"  # of another draft: not ours to clean
    other.mkdir()
    with half_way(out) as process, pytest.raises(DraftError, match=f"built by process {process.pid}"):
        build(out)
    leftovers = names_in(out.parent) - {other.name}
    assert len(leftovers) == 1 and leftovers.pop().startswith(f".draft.building-{process.pid}-")
    assert not out.exists()
    with writer_at(out) as writer:
        assert writer.finished_layers == (1,)  # decoder layer 1 is the source's first
        found: list[ExpertMatrices] = list(writer.read_layer(1, 3, GATE_SHAPE))
        assert all(map(torch.equal, (m.codes for m in found[2]), (m.codes for m in sample_layer(0)[2])))
    assert names_in(out.parent) == {other.name}
    assert weights_of(build(out)) == weights_of(build(out.parent / "again"))


def test_two_builds_that_start_at_once_do_not_share_what_an_ended_one_left(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, rename = leave_after(out, 2), Path.rename
    parent = os.getppid()
    other = f".draft.building-{parent}-{int(psutil.Process(parent).create_time() * 1000)}"

    def another_was_faster(path: Path, target: Path) -> Path:
        if path == left:
            rename(left, left.with_name(other))
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(DraftError, match=f"built by process {parent}:"):
        patch.setattr(Path, "rename", another_was_faster)
        writer_at(out)
    assert names_in(out.parent) == {other}
