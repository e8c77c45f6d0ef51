"""Which input embeddings may stay in the host's memory, and that a model then computes the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.tiny_models import ARCHITECTURES, tiny_model, write_model
from torch import nn

from localmoe.core.errors import CheckpointError
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.cached_pass import cached_pass
from localmoe.model.footprint import measure_footprint
from localmoe.model.host_embedding import embedding_params, look_rows_up, own_embedding
from localmoe.model.kv_cache import KVCache
from localmoe.model.loader import load_weights
from localmoe.model.skeleton import Skeleton, build_skeleton

CPU = torch.device("cpu")


def skeleton_of(
    folder: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Skeleton, Checkpoint]:
    path = write_model(folder / "model", tiny_model("qwen2_moe", dtype=torch.bfloat16, **changes))
    checkpoint = Checkpoint.open(path)
    return build_skeleton(checkpoint, dtype), checkpoint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_one_unless_its_head_is_tied(architecture: str) -> None:
    model = tiny_model(architecture)
    path = own_embedding(model)
    assert path is not None and model.get_submodule(path) is model.get_input_embeddings()
    assert embedding_params(model) == model.get_input_embeddings().weight.numel()
    tied = tiny_model(architecture, tie_word_embeddings=True)
    assert own_embedding(tied) is None and embedding_params(tied) == 0


class Scaled(nn.Embedding):
    """As some architectures have."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


def test_one_that_does_more_or_is_used_elsewhere_stays_where_the_model_is() -> None:
    model = tiny_model("mixtral")
    usual = model.get_input_embeddings()
    model.set_input_embeddings(Scaled(usual.num_embeddings, usual.embedding_dim))
    assert own_embedding(model) is None
    model.set_input_embeddings(nn.Embedding(usual.num_embeddings, usual.embedding_dim, max_norm=1.0))
    assert own_embedding(model) is None
    model.set_input_embeddings(usual)
    assert own_embedding(model) is not None
    model.lm_head.weight = usual.weight  # by hand, whatever the config says
    assert own_embedding(model) is None
    model.get_input_embeddings = Mock(side_effect=NotImplementedError)
    assert own_embedding(model) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_computes_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    logits = []
    for stays in (False, True):
        skeleton, checkpoint = skeleton_of(tmp_path / str(stays), dtype)
        if stays:
            skeleton = replace(skeleton, host_embedding=own_embedding(skeleton.model))
        with load_weights(skeleton, checkpoint, device=CPU) as store:
            assert (store.embedding is not None) == stays
            look_rows_up(skeleton, store, dtype, by_kernel=False)
            model = skeleton.model
            for experts in skeleton.experts:  # of which the hidden states that enter them tell nothing
                experts.module.forward = lambda hidden, *rest: torch.zeros_like(hidden)
            assert model.dtype == dtype and not any(
                p.is_meta for p in model.get_input_embeddings().parameters()
            )
            layers = int(skeleton.text_config.num_hidden_layers)
            ids = torch.tensor([[5, 200, 17, 5]])
            logits.append(cached_pass(model, ids, torch.arange(4)[None], KVCache(layers, 64)))
            if stays:
                assert store.embedding.dtype == torch.bfloat16
                assert "weight" not in dict(model.get_input_embeddings().named_parameters())
    assert torch.equal(*logits)


def test_its_bytes_are_the_stores_and_counted(tmp_path: Path) -> None:
    skeleton, checkpoint = skeleton_of(tmp_path)
    footprint = measure_footprint("tiny", torch.bfloat16, skeleton)
    without = load_weights(skeleton, checkpoint, device=CPU)
    skeleton, checkpoint = skeleton_of(tmp_path)
    skeleton = replace(skeleton, host_embedding=own_embedding(skeleton.model))
    with without, load_weights(skeleton, checkpoint, device=CPU) as store:
        assert store.embedding is not None and footprint.embedding_params == store.embedding.numel()
        assert store.num_bytes == without.num_bytes + 2 * footprint.embedding_params
        assert footprint.shared_params > footprint.embedding_params
    assert store.embedding is None, "closed"


def test_a_table_that_is_missing_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    weights = {k: v for k, v in model.state_dict().items() if "embed_tokens" not in k}
    path = write_model(tmp_path / "model", model, state_dict=weights)
    checkpoint = Checkpoint.open(path)
    skeleton = build_skeleton(checkpoint, torch.float32)
    skeleton = replace(skeleton, host_embedding=own_embedding(skeleton.model))
    with pytest.raises(CheckpointError, match=r"1 weights are missing.*embed_tokens"):
        load_weights(skeleton, checkpoint, device=CPU)


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    skeleton, checkpoint = skeleton_of(tmp_path)
    skeleton = replace(skeleton, host_embedding=own_embedding(skeleton.model))
    store: HostStore = load_weights(skeleton, checkpoint, device=CPU)
    look_rows_up(skeleton, store, torch.float32, by_kernel=False)
    store.close()
    with pytest.raises(AssertionError, match="closed"):
        skeleton.model.get_input_embeddings()(torch.tensor([[1]]))
