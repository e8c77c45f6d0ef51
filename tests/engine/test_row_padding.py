"""Padding of rows is measured once for the same weights, and again for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import load_with_slots
from support.row_paddings import forgotten_row_paddings
from support.tiny_models import tiny_model, write_model

from localmoe.engine import row_padding


@pytest.mark.slow
def test_a_model_that_is_loaded_again_is_not_measured_again(
    tiny: Callable[[str], tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    measure = row_padding.measure_row_padding

    def watched(*args: Any, **kwargs: Any) -> Any:
        measured.append(args[0].config.model_type)
        return measure(*args, **kwargs)

    monkeypatch.setattr(row_padding, "measure_row_padding", watched)
    monkeypatch.setattr(row_padding, "FILE", forgotten_row_paddings())
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))

    def exactness(folder: Path, slots: int) -> str:
        with load_with_slots(folder, slots) as engine:
            return engine.info().exactness

    folder = tiny("qwen3_moe")[0]
    first = exactness(folder, 8)
    once = len(measured)
    assert once >= 1
    assert exactness(folder, 12) == first and len(measured) == once, "another budget, the same weights"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        exactness(folder, 8)
    assert len(measured) == 2 * once, "sums may be cut otherwise among threads"
    with monkeypatch.context() as patch:
        patch.setattr(row_padding.transformers, "__version__", "5.99.0")
        exactness(folder, 8)
    assert len(measured) == 3 * once, "its modules may run other operations"

    other = write_model(tmp_path / "other", tiny_model("qwen3_moe", seed=5))
    exactness(other, 8)
    assert len(measured) == 4 * once, "other weights of the same shapes"
    assert exactness(folder, 8) == first and len(measured) == 4 * once
    moved = other.rename(tmp_path / "moved")
    exactness(moved, 8)
    assert len(measured) == 4 * once, "the same weights in another place"
    for nonsense in ([0, 80], [1, 2, 3], "16", {"a": 1}, [True, 1], [10**12, 80], [4, 10**12], [3, 80]):
        for name in row_padding.FILE.read():
            row_padding.FILE.keep(name, nonsense)
        before = len(measured)
        assert exactness(folder, 8) == first and len(measured) == before + once, nonsense
