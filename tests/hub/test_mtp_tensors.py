"""Where a checkpoint has the layer that predicts one token more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.mtp_tensors import MtpPaths, has_mtp, mtp_tensors

PATHS = MtpPaths("fusion", "model.layers.0", "model.norm")
BEHIND = {
    "model.layers.1.mlp.gate.weight": None,
    "model.layers.2.enorm.weight": "fusion.enorm.weight",
    "model.layers.2.hnorm.weight": "fusion.hnorm.weight",
    "model.layers.2.eh_proj.weight": "fusion.eh_proj.weight",
    "model.layers.2.shared_head.norm.weight": "model.norm.weight",
    "model.layers.2.shared_head.head.weight": None,
    "model.layers.2.embed_tokens.weight": None,
    "model.layers.2.mlp.experts.0.up_proj.weight": "model.layers.0.mlp.experts.0.up_proj.weight",
    "model.layers.3.eh_proj.weight": None,  # a second one, for the token after
    "model.layers.3.mlp.gate.weight": None,
    "lm_head.weight": None,
}
BESIDE = {
    "model.language_model.layers.1.mlp.gate.weight": None,
    "mtp.pre_fc_norm_embedding.weight": "fusion.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "fusion.hnorm.weight",
    "mtp.fc.weight": "fusion.eh_proj.weight",
    "mtp.norm.weight": "model.norm.weight",
    "mtp.layers.0.self_attn.q_norm.weight": "model.layers.0.self_attn.q_norm.weight",
    "mtp.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
    "mtp.layers.1.input_layernorm.weight": None,
    "lm_head.weight": None,
}


def checkpoint(folder: Path, names: list[str]) -> Checkpoint:
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    tensors = {name: torch.full((2,), float(place)) for place, name in enumerate(names)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint.open(folder)


@pytest.mark.parametrize("end", ["weight", "qweight", "weight_packed"])
def test_the_index_of_one_in_codes_tells_it_too(end: str) -> None:
    assert has_mtp({f"model.layers.2.eh_proj.{end}": "a"})
    assert not has_mtp({f"model.layers.2.eh_proj.{end}_scale": "a"})


@pytest.mark.parametrize("names", [BEHIND, BESIDE])
def test_its_tensors_are_named_as_those_of_a_model_of_one_layer(
    names: dict[str, str | None], tmp_path: Path
) -> None:
    whole = checkpoint(tmp_path, list(names))
    assert has_mtp(whole.tensors)
    found = mtp_tensors(whole, PATHS)
    assert found is not None
    wanted = {new: whole.tensors[old].offset for old, new in names.items() if new is not None}
    assert {name: header.offset for name, header in found.tensors.items()} == wanted
    assert all(header.name == name for name, header in found.tensors.items())
    assert found.total_bytes == 8 * len(wanted) and found.folder == whole.folder


def test_most_models_have_none(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, ["model.layers.0.mlp.gate.weight", "model.norm.weight", "lm_head.weight"])
    assert not has_mtp(whole.tensors) and mtp_tensors(whole, PATHS) is None
