"""The streaming loader gives the weights that transformers' from_pretrained gives, from every layout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_models import ARCHITECTURES, RECURRENT_ARCHITECTURE, tiny_model, write_model
from torch import Tensor

from localmoe.core.errors import LoadCancelledError
from localmoe.core.types import ExpertKey, Progress
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.loader import load_weights
from localmoe.model.skeleton import Skeleton, build_skeleton

CPU = torch.device("cpu")
ALL = [*ARCHITECTURES, RECURRENT_ARCHITECTURE]
Tiny = Callable[[str], tuple[Path, Any]]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Skeleton, HostStore]:
    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(checkpoint, dtype)
    return skeleton, load_weights(skeleton, checkpoint, device=CPU)


def check_equal_to_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Every parameter and buffer, routed experts from their records, bit for bit and of the same dtype."""
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    skeleton, store = load(folder, dtype)
    found = {**dict(skeleton.model.named_parameters()), **dict(skeleton.model.named_buffers())}
    assert found.keys() == wanted.keys()
    expert_names = set()
    for layer, experts in enumerate(skeleton.experts):
        for part, name in enumerate(("gate_up_proj", "down_proj")):
            full = f"{experts.path}.{name}"
            expert_names.add(full)
            views = [store.views(ExpertKey(layer, expert))[part] for expert in range(skeleton.num_experts)]
            check_same(full, torch.stack(views).to(dtype), wanted[full])
    for name in wanted.keys() - expert_names:
        check_same(name, found[name], wanted[name])


def check_same(name: str, found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype, name
    assert found.device == wanted.device and found.shape == wanted.shape, name
    assert torch.equal(found, wanted), name


@pytest.mark.parametrize("architecture", ALL)
def test_a_checkpoint_in_its_published_layout_loads_as_by_transformers(architecture: str, tiny: Tiny) -> None:
    folder = tiny(architecture)[0]
    names = Checkpoint.open(folder).tensors
    if architecture not in ("gpt_oss",):  # whose published layout is fused
        assert any(".experts.7." in name for name in names), "one tensor an expert"
    check_equal_to_transformers(folder)


@pytest.mark.parametrize("architecture", [name for name in ALL if name != "gpt_oss"])
def test_a_checkpoint_with_fused_experts_loads_as_by_transformers(
    architecture: str, tiny: Tiny, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "fused", tiny(architecture)[1], save_original_format=False)
    names = Checkpoint.open(folder).tensors
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    check_equal_to_transformers(folder)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral", "gpt_oss"])
def test_a_checkpoint_in_many_files_loads_as_by_transformers(
    architecture: str, tiny: Tiny, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "sharded", tiny(architecture)[1], max_shard_size="500KB")
    assert len(Checkpoint.open(folder).files) > 5
    check_equal_to_transformers(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v2", "gpt_oss", RECURRENT_ARCHITECTURE])
def test_a_16_bit_checkpoint_loads_exactly_in_its_own_dtype_and_in_float32(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "half", tiny_model(architecture, dtype=dtype))
    check_equal_to_transformers(folder, dtype)
    check_equal_to_transformers(folder, torch.float32)
    assert load(folder)[1].dtype == dtype, "the records keep the checkpoint's dtype"


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tied", tiny_model("qwen2_moe", tie_word_embeddings=True))
    assert "lm_head.weight" not in Checkpoint.open(folder).tensors
    check_equal_to_transformers(folder)
    model = load(folder)[0].model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_checkpoint_whose_first_layers_are_dense_has_fewer_moe_layers(tiny: Tiny) -> None:
    skeleton, store = load(tiny("deepseek_v2")[0])
    assert [experts.decoder_layer for experts in skeleton.experts] == [1, 2]
    assert store.num_layers == 2


def test_progress_grows_to_the_whole_checkpoint_and_a_cancelled_load_stops_early(tiny: Tiny) -> None:
    checkpoint = Checkpoint.open(tiny("olmoe")[0])
    reports: list[Progress] = []
    load_weights(build_skeleton(checkpoint, torch.float32), checkpoint, device=CPU, progress=reports.append)
    done = [report.done for report in reports]
    assert done == sorted(done) and done[-1] == reports[-1].total == checkpoint.total_bytes
    cancel = threading.Event()
    cancel.set()
    reports.clear()
    with pytest.raises(LoadCancelledError, match="cancelled"):
        skeleton = build_skeleton(checkpoint, torch.float32)
        load_weights(skeleton, checkpoint, device=CPU, progress=reports.append, cancel=cancel)
    assert not reports
