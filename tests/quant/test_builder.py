"""Building a draft from a model's experts: progress, cancelling, bad weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quant_samples import CONFIG, FINGERPRINT, GROUP_SIZE, NAMING, Source, build, provenance
from torch import Tensor

from localmoe.core.errors import DraftError, LocalMoeError
from localmoe.core.types import Progress, ProgressCallback
from localmoe.kernels.codes import dequantize
from localmoe.quant import DraftCancelledError, DraftCheckpoint, DraftWriter, build_rtn_draft, builder
from localmoe.quant.draft_folder import DraftFolder


def build_cancellable(out: Path, cancel: threading.Event, progress: ProgressCallback | None = None) -> None:
    """As the engine's own builds: a round-to-nearest build takes seconds, so nothing of it is kept."""
    with DraftWriter(out, CONFIG, NAMING, provenance(), 1000, keep_on=()) as writer:
        build_rtn_draft(Source(), writer, 4, GROUP_SIZE, progress=progress, cancel=cancel)
        writer.publish()


def test_the_built_draft_is_close_to_every_expert_of_the_model(tmp_path: Path) -> None:
    checkpoint = DraftCheckpoint.open(build(tmp_path / "draft"))
    checkpoint.check_base(FINGERPRINT, "some/model")
    source = Source()
    for layer in range(2):
        for expert in range(3):
            for projection, weight in zip(
                ("gate", "up", "down"), source.matrices(layer, expert), strict=True
            ):
                matrix = checkpoint.matrix(NAMING, layer + 1, expert, projection, tuple(weight.shape))
                error = dequantize(matrix, torch.float32) - weight.float()
                assert error.norm() < 0.12 * weight.float().norm()


def test_progress_counts_every_expert_once(tmp_path: Path) -> None:
    seen: list[Progress] = []
    build(tmp_path / "draft", progress=seen.append)
    assert seen == [
        Progress("Building the 4-bit draft by rounding to nearest", done, 6, "experts") for done in range(7)
    ]


def test_cancelling_stops_after_the_current_expert_and_keeps_nothing(tmp_path: Path) -> None:
    cancel, seen = threading.Event(), []

    def cancel_at_four(progress: Progress) -> None:
        seen.append(progress.done)
        if progress.done == 4:
            cancel.set()

    with pytest.raises(DraftCancelledError, match="after 4 of 6 experts; nothing was kept"):
        build_cancellable(tmp_path / "draft", cancel, cancel_at_four)
    assert seen[-1] == 4 and list(tmp_path.iterdir()) == []
    assert issubclass(DraftCancelledError, LocalMoeError)


def test_cancelling_after_the_last_expert_still_publishes_nothing(tmp_path: Path) -> None:
    cancel = threading.Event()

    def cancel_at_the_end(progress: Progress) -> None:
        if progress.done == progress.total:
            cancel.set()

    with pytest.raises(DraftCancelledError, match="6 of 6"):
        build_cancellable(tmp_path / "draft", cancel, cancel_at_the_end)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    class Damaged(Source):
        def matrices(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
            gate, up, down = super().matrices(layer, expert)
            if (layer, expert) == (1, 2):
                down[3, 4] = float("nan")
            return gate, up, down

    with pytest.raises(DraftError, match=r"in decoder layer 2, expert 2, down projection, .* NaN"):
        build(tmp_path / "draft", Damaged())
    assert list(tmp_path.iterdir()) == []


def test_a_draft_depends_on_no_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, found = torch.get_num_threads(), []
    for cores in (1, 5):
        monkeypatch.setattr(builder, "core_counts", lambda cores=cores: (cores, cores))
        folder = build(tmp_path / str(cores), Source(num_layers=3, num_experts=12))
        found.append({file.name: file.read_bytes() for file in folder.glob("*.safetensors")})
    assert found[0] == found[1] and found[0]
    assert torch.get_num_threads() == threads


def test_a_layer_that_cannot_be_written_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: DraftWriter, decoder_layer: int, tensors: dict[str, Tensor]) -> None:
        raise DraftError("The disk is full.")

    monkeypatch.setattr(DraftWriter, "add_packed", full)
    for layers in (1, 3):
        with pytest.raises(DraftError, match="disk is full"):
            build(tmp_path / "draft", Source(num_layers=layers))
    assert list(tmp_path.iterdir()) == []


def test_experts_that_do_not_fit_the_format_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="24 x 42 matrix does not fit"):
        build(tmp_path / "draft", Source(hidden=42))
    assert list(tmp_path.iterdir()) == []


def test_the_size_asked_of_the_disk_is_the_size_that_gets_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    create = DraftFolder.create

    def recording_create(self: DraftFolder, needed_bytes: int, free_bytes: Callable[[Path], int]) -> None:
        asked.append(needed_bytes)
        create(self, needed_bytes, free_bytes)

    monkeypatch.setattr(DraftFolder, "create", recording_create)
    out = build(tmp_path / "draft", Source(hidden=256, intermediate=128, num_experts=8))
    written = sum(file.stat().st_size for file in out.iterdir())
    assert 0.95 * asked[0] < written < 1.05 * asked[0]


def test_no_thread_or_file_handle_outlives_a_build(tmp_path: Path) -> None:
    build(tmp_path / "warm-up")
    handles = Path("/proc/self/fd")
    if not handles.exists():
        pytest.skip("needs /proc")
    before = len(list(handles.iterdir())), threading.active_count()
    DraftCheckpoint.open(build(tmp_path / "draft")).matrix(NAMING, 1, 0, "down", (40, 24))
    assert (len(list(handles.iterdir())), threading.active_count()) == before
