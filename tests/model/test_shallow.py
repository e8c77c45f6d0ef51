"""A model cut to a few layers still shows every kind of layer, with weights that tell modules apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import ARCHITECTURES, tied_model_storing, tiny_config

from localmoe.core.errors import UnsupportedModelError
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model import shallow
from localmoe.model.host_embedding import own_embedding
from localmoe.model.packed_head import own_head, packed_embedding
from localmoe.model.shallow import fill_alike, layer_kinds, shallow_bytes, shallow_skeleton
from localmoe.model.shapes import SHAPES, shape_config
from localmoe.model.skeleton import Skeleton, build_skeleton, skeleton_from_config

# dense layers come first, or full attention only third, fourth or sixth; of others, two layers show all
DEPTHS = {
    "deepseek-v2-lite": 3, "glm-4.7-flash": 3, "qwen3.5-35b-a3b": 4, "lfm2-8b-a1b": 4,
    "granite-4.0-h-small": 6, "nemotron-3-nano": 6, "gemma-4-26b-a4b": 6, "kimi-linear-48b-a3b": 4,
}  # fmt: skip
ROUTED = {
    "qwen3.5-35b-a3b": 4, "granite-4.0-h-small": 6, "gemma-4-26b-a4b": 6, "kimi-linear-48b-a3b": 3,
}  # fmt: skip
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}


def skeleton_of(config: Any) -> Skeleton:
    return skeleton_from_config(config, torch.bfloat16, "the model")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow(but=6)
def test_real_shapes_keep_every_kind_of_layer_and_little_memory(name: str) -> None:
    whole = skeleton_of(shape_config(name))
    whole = replace(  # as a GPU has it
        whole, host_embedding=own_embedding(whole.model), packed_head=own_head(whole.model),
        packed_embedding=packed_embedding(whole.model),
    )  # fmt: skip
    before = whole.config.to_dict()
    cut = shallow_skeleton(whole, torch.bfloat16)
    for form in ("-fp8", "-nvfp4", "-int4"):
        name = name.removesuffix(form)
    depth = DEPTHS.get(name, 2)
    assert cut.text_config.num_hidden_layers == depth
    assert layer_kinds(cut) == layer_kinds(whole)[:depth]
    assert set(layer_kinds(cut)) == set(layer_kinds(whole))
    assert len(cut.experts) == ROUTED.get(name, 2)
    assert {e.layout for e in cut.experts} == {e.layout for e in whole.experts}
    assert (cut.num_experts, cut.experts_per_token) == (whole.num_experts, whole.experts_per_token)
    assert cut.model.dtype == torch.bfloat16 and all(p.is_meta for p in cut.model.parameters())
    assert whole.config.to_dict() == before and cut.config.vocab_size == whole.config.vocab_size
    whole_bytes = sum(p.numel() * p.element_size() for p in whole.model.parameters())
    assert shallow_bytes(cut) < max(1.5 * (1 << 30), 0.04 * whole_bytes)


@pytest.mark.parametrize(
    ("architecture", "changes", "depth"),
    [
        ("qwen3_moe", {"num_hidden_layers": 6, "mlp_only_layers": [2, 4]}, 3),
        ("qwen3_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 2}, 4),
        ("gpt_oss", {"num_hidden_layers": 8, "layer_types": WINDOWS["layer_types"] * 2}, 4),
        ("deepseek_v2", {"num_hidden_layers": 6, "first_k_dense_replace": 3}, 5),
        ("mixtral", {"num_hidden_layers": 1}, 1),
    ],
)
def test_the_cut_comes_after_the_first_layer_of_the_last_kind(
    architecture: str, changes: dict[str, Any], depth: int
) -> None:
    whole = skeleton_of(tiny_config(architecture, **changes))
    cut = shallow_skeleton(whole, torch.bfloat16)
    assert len(layer_kinds(cut)) == depth and set(layer_kinds(cut)) == set(layer_kinds(whole))


def test_a_model_whose_layers_change_with_their_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = skeleton_of(tiny_config("mixtral"))
    other = skeleton_of(tiny_config("mixtral", num_hidden_layers=2, num_key_value_heads=1))
    monkeypatch.setattr(shallow, "skeleton_from_config", lambda *args: other)
    with pytest.raises(UnsupportedModelError, match="mixtral with 2 layers has layers of other kinds"):
        shallow_skeleton(whole, torch.bfloat16)


def test_what_the_files_do_not_tie_is_not_tied_in_the_cut(tmp_path: Path) -> None:
    whole = build_skeleton(
        Checkpoint.open(tied_model_storing(tmp_path / "own", "two values")), torch.bfloat16
    )
    cut = shallow_skeleton(replace(whole, host_embedding=own_embedding(whole.model)), torch.bfloat16)
    fill_alike(cut, torch.device("cpu"))
    head, embedding = cut.model.get_output_embeddings(), cut.model.get_input_embeddings()
    assert not head.weight.is_meta and embedding.weight.is_meta, "which lies in the host's memory"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_there_distinct_and_share_their_memory(architecture: str) -> None:
    cut = shallow_skeleton(skeleton_of(tiny_config(architecture)), torch.bfloat16)
    fill_alike(cut, torch.device("cpu"))
    routed = {f"{e.path}.{name}" for e in cut.experts for name in ("gate_up_proj", "down_proj")}
    blocks, shared = {}, []
    for name, parameter in cut.model.named_parameters():
        assert parameter.is_meta == (name in routed), name
        if name in routed:
            continue
        if parameter.dim() > 1:
            assert parameter.float().std() == pytest.approx(0.02, rel=0.2), name
            storage = parameter.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
            shared += [storage.data_ptr()] * (parameter.dtype == torch.bfloat16)  # others are copies
        else:
            assert (parameter == float(name.endswith("weight"))).all(), name
    assert not any(buffer.is_meta for buffer in cut.model.buffers())
    assert len(set(shared)) == 1 and sum(blocks.values()) <= shallow_bytes(cut)


def test_weights_that_stay_in_32_bits_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = shallow_skeleton(skeleton_of(tiny_config("mixtral")), torch.bfloat16)
    monkeypatch.setattr(type(cut.model), "_get_dtype_plan", lambda self, dtype: {"mlp.gate": torch.float32})
    fill_alike(replace(cut), torch.device("cpu"))
    for name, parameter in cut.model.named_parameters():
        if not parameter.is_meta:
            assert (parameter.dtype == torch.float32) == ("mlp.gate" in name), name
