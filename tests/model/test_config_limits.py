"""Configs of a kilobyte that would fill the memory before a weight is read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_model, write_model

from localmoe.core.errors import UnsupportedModelError
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.skeleton import read_model_config


@pytest.mark.parametrize(
    ("where", "name"),
    [((), "num_labels"), ((), "num_hidden_layers"), (("text_config",), "num_hidden_layers")],
)
def test_a_config_that_asks_for_endless_lists_is_refused_at_once(
    where: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", tiny_model("qwen2_moe"))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    part = config
    for key in where:
        part = part.setdefault(key, {})
    part[name] = 2**40
    (folder / "config.json").write_text(json.dumps(config))
    began = time.perf_counter()
    with pytest.raises(UnsupportedModelError, match=name):
        read_model_config(Checkpoint.open(folder))
    assert time.perf_counter() - began < 5
