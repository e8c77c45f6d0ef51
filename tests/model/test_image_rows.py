"""Rows of pictures in a model's pass, and that none stay behind it."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.vision_models import vision_model

from localmoe.model.image_rows import ImageRows, PlacedRows

CPU = torch.device("cpu")


def test_nothing_stays_of_a_pass_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision_model("gemma4")
    rows = ImageRows(model, 0, whole=True)
    embedding, ids = model.get_input_embeddings(), torch.tensor([[5, 6]])
    before = embedding(ids)
    rows.begin([PlacedRows(1, torch.ones(1, 3, 128))], None)

    def full(count: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "_seen_until", full)
        with pytest.raises(torch.OutOfMemoryError), rows.of_pass([4, 5, 5, 5], 0, CPU):
            pass
    assert rows._rows is None and rows.until is None
    assert torch.equal(embedding(ids), before)
    with rows.of_pass([4, 5, 5, 5, 6], 0, CPU) as numbers:
        assert (embedding(torch.tensor([numbers]))[0, 1:4] == 1).all()
        assert rows.until is not None and rows.until.tolist() == [0, 3, 3, 3, 4]
    assert rows._rows is None and rows.until is None


def test_a_picture_is_let_go_of_once_all_its_tokens_have_run() -> None:
    rows = ImageRows(vision_model("qwen3_vl_moe"), 0)
    first, second = (PlacedRows(start, torch.ones(1, 3, 128)) for start in (1, 5))
    kept = weakref.ref(first.rows)
    rows.begin([first, second], None)
    del first
    with rows.of_pass([4, 5, 5], 0, CPU):
        pass
    assert kept() is not None and rows.has_some(3, 1)
    with pytest.raises(KeyboardInterrupt), rows.of_pass([5, 4, 5], 3, CPU):
        raise KeyboardInterrupt
    assert rows.has_some(3, 1)
    with rows.of_pass([5, 4, 5], 3, CPU):
        pass
    assert kept() is None and rows.has_some(6, 2)
