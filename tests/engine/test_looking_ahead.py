"""Whole passes that copy a part of the next layer's expert ahead, in Triton's interpreter: same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.test_rehearsal import PLAIN, prepared_for_kernels

pytest.importorskip("triton")

from localmoe.engine.loading import assemble
from localmoe.kernels.gpu import copy_ahead as copying
from localmoe.kernels.stage import BEGUN, NUMBER, NUMBER_SHIFT, StageView
from localmoe.model.device_runner import DeviceRunner

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
TOKENS, LAYERS = [5, 17], 2


def logits_of(runner: DeviceRunner, ahead: bool) -> torch.Tensor:
    """Of each token, one by one, from empty slots on."""
    memory, foresight = runner.passes.memory, runner.passes.foresight
    runner.sequence.truncate(0)
    memory.forget()
    runner.passes.foresight = foresight if ahead else None
    try:
        return torch.cat([runner.run([token], "verify", last_only=True).clone() for token in TOKENS])
    finally:
        runner.passes.foresight = foresight


@pytest.mark.interpreted
def test_logits_are_the_same_and_the_stage_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.choice.prepare(torch.zeros(1, 1000)))
    prepared = prepared_for_kernels(tmp_path, "mixtral", num_hidden_layers=LAYERS, vocab_size=256)
    parts = assemble(prepared, PLAIN, progress=None, cancel=None)
    runner, stages = parts.runner, []
    try:
        assert isinstance(runner, DeviceRunner) and runner.passes.foresight is not None
        plain = logits_of(runner, ahead=False)
        launch = copying.launch

        def counted(
            kernel: object, grid: tuple[int, ...], words: torch.Tensor, *args: object, **options: object
        ) -> None:
            launch(kernel, grid, words, *args, **options)
            stages.append(words.clone())

        monkeypatch.setattr(copying, "launch", counted)
        assert torch.equal(logits_of(runner, ahead=True), plain)
        view = runner.passes.foresight.stage_of(1)
        assert isinstance(view, StageView)
        number = int(view.words[NUMBER])
        assert len(stages) == number == (LAYERS - 1) * len(TOKENS)
        assert int(view.words[BEGUN]) == number
        assert all(int(word) >> NUMBER_SHIFT for word in view.progress), "what was named was copied"
        # a window of several tokens takes no notice
        logits = runner.run([1, 2], "verify", last_only=True)
        assert int(view.words[NUMBER]) == number and torch.isfinite(logits).all()
    finally:
        parts.close()
