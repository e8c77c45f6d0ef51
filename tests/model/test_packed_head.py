"""Which output heads are kept in twelve bits, and that they are the published weights, in as many bytes as
are planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.test_more_architectures import ANSWERING
from safetensors.torch import load_file, save_file
from support.shapes import tiny_shape
from support.tiny_models import ARCHITECTURES, tiny_model, write_model
from torch import nn

from localmoe.core.errors import CheckpointError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.engine.random_source import RandomSource
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.kernels import bf12_tiles
from localmoe.kernels.packed_weight import packed_bytes
from localmoe.model.footprint import measure_footprint
from localmoe.model.host_embedding import look_rows_up, own_embedding
from localmoe.model.loader import load_weights
from localmoe.model.packed_head import (
    UnpackableHeadError,
    own_head,
    packed_embedding,
    packed_weight_of,
    saved_bytes,
)
from localmoe.model.placement import Placement
from localmoe.model.random_weights import SPREAD
from localmoe.model.shallow import fill_alike, shallow_bytes, shallow_skeleton
from localmoe.model.skeleton import Skeleton, build_skeleton

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def packed_skeleton(folder: Path) -> tuple[Skeleton, Checkpoint]:
    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(checkpoint, BF16)
    head, embedding = own_head(skeleton.model), packed_embedding(skeleton.model)
    return replace(skeleton, packed_head=head, packed_embedding=embedding), checkpoint


def tiny_folder(place: Path, architecture: str = "qwen2_moe", **changes: Any) -> Path:
    return write_model(place / "model", tiny_model(architecture, dtype=BF16, **changes))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture_has_one_which_the_input_embedding_may_be_too(
    architecture: str, tied: bool
) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    path, table = own_head(model), packed_embedding(model)
    assert path is not None and model.get_submodule(path) is model.get_output_embeddings()
    assert (table is not None) == tied
    assert table is None or model.get_submodule(table) is model.get_input_embeddings()
    rows, columns = model.get_output_embeddings().weight.shape
    assert saved_bytes(model, BF16) == 2 * rows * columns - packed_bytes(rows, columns) > 0
    assert saved_bytes(model, torch.float16) == saved_bytes(model, torch.float32) == 0


class Scaled(nn.Embedding):
    """As Gemma's: through nn.Embedding's own forward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


class Twice(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + super().forward(ids + 1)


class Direct(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


@pytest.mark.parametrize(("kind", "known"), [(Scaled, True), (Twice, False), (Direct, False)])
def test_a_tied_one_needs_an_embedding_that_looks_rows_up_once(kind: type[nn.Embedding], known: bool) -> None:
    model = tiny_model("mixtral", tie_word_embeddings=True)
    usual = model.get_input_embeddings()
    model.set_input_embeddings(kind(*usual.weight.shape))
    model.get_input_embeddings().weight = usual.weight
    assert (own_head(model) is not None) == (packed_embedding(model) is not None) == known
    assert type(model.get_input_embeddings()) is kind, "it was only tried"
    model.get_input_embeddings().max_norm = 1.0
    assert own_head(model) is packed_embedding(model) is None


def test_a_tied_one_that_something_else_uses_stays() -> None:
    model = tiny_model("mixtral", tie_word_embeddings=True)
    model.further = nn.Linear(1, 1, bias=False)
    model.further.weight = model.lm_head.weight
    assert own_head(model) is packed_embedding(model) is None


class Capped(nn.Linear):
    """As some architectures might have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


def test_one_that_does_more_is_used_elsewhere_or_has_no_whole_tiles_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("mixtral")
    usual = model.lm_head
    model.lm_head = Capped(usual.in_features, usual.out_features, bias=False)
    assert own_head(model) is None
    model.lm_head = usual
    assert own_head(model) == "lm_head"
    model.lm_head.weight = model.get_input_embeddings().weight  # by hand, whatever the config says
    assert own_head(model) is None
    assert own_head(tiny_model("mixtral", hidden_size=96, num_attention_heads=4)) is None
    model = tiny_model("mixtral")
    monkeypatch.setattr(type(model), "_get_dtype_plan", lambda self, dtype: {"lm_head": torch.float32})
    assert own_head(model) is None


@pytest.mark.parametrize(("architecture", "vocabulary"), [("qwen2_moe", 512), ("phimoe", 505)])
def test_it_is_the_published_weight_in_the_bytes_that_were_planned(
    architecture: str, vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localmoe.model.parallel_reader.PACKED_BYTES", 5000)  # of 16 rows at a time
    folder = tiny_folder(tmp_path, architecture, vocab_size=vocabulary)
    skeleton, checkpoint = packed_skeleton(folder)
    skeleton = replace(skeleton, host_embedding=own_embedding(skeleton.model))
    footprint = measure_footprint("tiny", BF16, skeleton)
    assert footprint.packs_head and footprint.head_saved_bytes == footprint.packed_away_bytes > 0
    published = load_file(folder / "model.safetensors")
    with load_weights(skeleton, checkpoint, device=CPU):
        head = skeleton.model.lm_head
        packed = packed_weight_of(head)
        assert packed is not None and torch.equal(packed.take(), published["lm_head.weight"])
        assert head.weight.is_meta and head.weight.dtype == BF16
        assert (head.bias is None) == (architecture != "phimoe")
        if head.bias is not None:
            assert torch.equal(head.bias, published["lm_head.bias"])
        held = [*skeleton.model.parameters(), packed.memory]
        embedding = skeleton.model.get_input_embeddings().weight
        shared = sum(t.nbytes for t in held if not t.is_meta and t is not embedding)
        planned = footprint.shared_bytes - footprint.packed_away_bytes - 2 * footprint.embedding_params
        assert shared == planned
    skeleton.model.to("meta")
    assert all(tensor.is_meta for tensor in skeleton.model.buffers())


@pytest.mark.interpreted
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2_moe", "gemma4_text"])
def test_a_tied_one_is_one_weight_in_memory_whose_rows_the_embedding_reads(
    architecture: str, alone: bool, tmp_path: Path
) -> None:
    """alone: the file has the head and no embedding."""
    changes = ANSWERING["gemma4_text"] if architecture == "gemma4_text" else {}
    folder = tiny_folder(tmp_path, architecture, **changes, tie_word_embeddings=True)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
    tensors = load_file(folder / "model.safetensors")
    if alone:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    skeleton, checkpoint = packed_skeleton(folder)
    footprint = measure_footprint("tiny", BF16, skeleton)
    assert footprint.packs_head and footprint.embedding_params == 0 < footprint.packed_away_bytes
    with load_weights(skeleton, checkpoint, device=CPU) as store:
        look_rows_up(skeleton, store, BF16, by_kernel=True)
        model, ids = skeleton.model, torch.tensor([[5, 0, 511], [7, 7, 300]]) % 300
        assert torch.equal(model.get_input_embeddings()(ids), whole.get_input_embeddings()(ids))
        packed = packed_weight_of(model.lm_head)
        assert packed is not None and torch.equal(packed.take(), whole.lm_head.weight)
        held = [*model.parameters(), packed.memory]
        assert sum(t.nbytes for t in held if not t.is_meta) == (
            footprint.shared_bytes - footprint.packed_away_bytes
        )
        assert next(model.parameters()).device == CPU


def test_one_that_transformers_converts_is_packed_too(tmp_path: Path) -> None:
    skeleton, checkpoint = packed_skeleton(tiny_folder(tmp_path))
    layouts = [experts.layout for experts in skeleton.experts]
    with HostStore(layouts, skeleton.num_experts, BF16) as store:
        unread = replace(checkpoint, tensors={})
        placement = Placement(skeleton, store, CPU, unread)
        with pytest.raises(CheckpointError, match="weights are missing"):
            placement.check_complete()
        weights = torch.randn(skeleton.model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        placement.put("lm_head.weight", weights)
        assert placement._is_placed("lm_head.weight")
    packed = packed_weight_of(skeleton.model.lm_head)
    assert packed is not None and torch.equal(packed.take(), weights.to(BF16))


def test_one_that_is_missing_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen2_moe", dtype=BF16)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "lm_head" not in name}
    skeleton, checkpoint = packed_skeleton(write_model(tmp_path / "model", model, state_dict=weights))
    with pytest.raises(CheckpointError, match=r"1 weights are missing.*lm_head"):
        load_weights(skeleton, checkpoint, device=CPU)


def test_one_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-16].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    skeleton, checkpoint = packed_skeleton(folder)
    with pytest.raises(CheckpointError, match=r"lm_head.weight .* has shape"):
        load_weights(skeleton, checkpoint, device=CPU)


def test_one_that_cannot_be_packed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][:16] = 2.0 ** (-torch.arange(128) % 120).float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnpackableHeadError, match="rare exponents") as refused:
        load_weights(*packed_skeleton(folder), device=CPU)
    assert refused.value.lasting
    monkeypatch.setattr(bf12_tiles, "_loops", lambda: None)
    with pytest.raises(UnpackableHeadError, match="numba") as refused:
        load_weights(*packed_skeleton(folder), device=CPU)
    assert not refused.value.lasting


def random_head(seed: int, monkeypatch: pytest.MonkeyPatch, rows: int, tied: bool) -> torch.Tensor:
    monkeypatch.setattr("localmoe.model.random_weights._HEAD_ROWS", rows)
    shape = tiny_shape("olmoe", vocab_size=200, tie_word_embeddings=tied)
    source = RandomSource(shape, SyntheticSettings(seed=seed))
    skeleton = source.skeleton(BF16)
    assert source.can_pack_head(skeleton)
    head, embedding = own_head(skeleton.model), packed_embedding(skeleton.model)
    assert (embedding is not None) == tied
    skeleton = replace(skeleton, packed_head=head, packed_embedding=embedding)
    source.load_weights(skeleton, CPU, progress=None, cancel=None)
    packed = packed_weight_of(skeleton.model.lm_head)
    assert packed is not None and skeleton.model.lm_head.weight.is_meta
    return packed.take()


@pytest.mark.parametrize("tied", [False, True])
def test_random_ones_are_filled_and_a_seed_means_the_same(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, again, other = (random_head(seed, monkeypatch, 64, tied) for seed in (0, 0, 1))
    assert one.shape == (200, 128) and float(one.float().std()) == pytest.approx(SPREAD, rel=0.03)
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert len({row.float().numpy().tobytes() for row in one}) == 200


@pytest.mark.parametrize("tied", [False, True])
def test_a_cut_model_has_one_that_takes_no_memory(tied: bool) -> None:
    source = RandomSource(
        tiny_shape("olmoe", vocab_size=20_000, tie_word_embeddings=tied), SyntheticSettings()
    )
    whole = source.skeleton(BF16)
    packed = replace(
        whole, packed_head=own_head(whole.model), packed_embedding=packed_embedding(whole.model),
        host_embedding=own_embedding(whole.model),
    )  # fmt: skip
    assert (packed.host_embedding is None) == tied == (packed.packed_embedding is not None)
    cut = shallow_skeleton(packed, BF16)
    assert cut.packed_head == "lm_head" and shallow_bytes(cut) < shallow_bytes(shallow_skeleton(whole, BF16))
    fill_alike(cut, CPU)
    memory = cut.model.lm_head.localmoe_packed
    assert memory.untyped_storage().nbytes() == 4 and memory.nbytes == packed_bytes(20_000, 128)
