"""The streaming loader gives the weights that transformers' from_pretrained gives, from every layout."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_models import (
    ARCHITECTURES,
    RECURRENT_ARCHITECTURE,
    UNGATED_ARCHITECTURE,
    UNGATED_RECURRENT,
    tied_model_storing,
    tiny_model,
    write_model,
)
from torch import Tensor
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from localmoe.core.errors import CheckpointError, HardwareError, LoadCancelledError
from localmoe.core.types import ExpertKey, Progress
from localmoe.experts import host_memory
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint, TensorHeader
from localmoe.model import placement
from localmoe.model.footprint import measure_footprint
from localmoe.model.loader import load_weights
from localmoe.model.skeleton import Skeleton, build_skeleton
from localmoe.model.weight_reader import WeightReader

CPU = torch.device("cpu")
ALL = [*ARCHITECTURES, RECURRENT_ARCHITECTURE, UNGATED_ARCHITECTURE]
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
        for part, full in enumerate(experts.weight_keys):
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
    assert any(name.endswith(("experts.gate_up_proj", "experts.up_proj")) for name in names)
    check_equal_to_transformers(folder)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral", "gpt_oss"])
def test_a_checkpoint_in_many_files_loads_as_by_transformers(
    architecture: str, tiny: Tiny, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "sharded", tiny(architecture)[1], max_shard_size="500KB")
    assert len(Checkpoint.open(folder).files) > 5
    check_equal_to_transformers(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "architecture", ["qwen2_moe", "deepseek_v2", "gpt_oss", RECURRENT_ARCHITECTURE, UNGATED_ARCHITECTURE]
)
@pytest.mark.slow(but=5)
def test_a_16_bit_checkpoint_loads_exactly_in_its_own_dtype_and_in_float32(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    layers = UNGATED_RECURRENT if architecture == UNGATED_ARCHITECTURE else {}
    folder = write_model(tmp_path / "half", tiny_model(architecture, dtype=dtype, **layers))
    check_equal_to_transformers(folder, dtype)
    check_equal_to_transformers(folder, torch.float32)
    assert load(folder)[1].dtype == dtype, "the records keep the checkpoint's dtype"


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tied", tiny_model("qwen2_moe", tie_word_embeddings=True))
    assert "lm_head.weight" not in Checkpoint.open(folder).tensors
    check_equal_to_transformers(folder)
    model = load(folder)[0].model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("stored", ["two values", "one value twice", "the head alone"])
def test_what_is_tied_is_what_transformers_ties(stored: str, tmp_path: Path) -> None:
    folder = tied_model_storing(tmp_path / "tied", stored)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    check_equal_to_transformers(folder)
    model = load(folder)[0].model
    is_tied = stored != "two values"
    assert (expected.lm_head.weight is expected.model.embed_tokens.weight) == is_tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied


def test_a_plan_counts_both_of_two_tensors_that_a_config_calls_one(tmp_path: Path) -> None:
    own = Checkpoint.open(tied_model_storing(tmp_path / "own", "two values"))
    twice = Checkpoint.open(tied_model_storing(tmp_path / "twice", "one value twice"))
    footprints = [
        measure_footprint("tied", torch.float32, build_skeleton(checkpoint, torch.float32))
        for checkpoint in (own, twice)
    ]
    table = own.tensors["lm_head.weight"].num_bytes
    assert footprints[0].shared_bytes - footprints[1].shared_bytes == table
    assert footprints[0].embedding_params * 4 == table and footprints[1].embedding_params == 0


def test_a_tied_tensor_that_is_stored_twice_is_read_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tied_model_storing(tmp_path / "twice", "one value twice"))
    skeleton = build_skeleton(checkpoint, torch.float32)
    store = HostStore([e.layout for e in skeleton.experts], skeleton.num_experts, torch.float32)
    pieces = placement.Placement(skeleton, store, CPU, checkpoint).pieces()
    names = {piece.header.name for piece in pieces}
    store.close()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_a_tied_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = tied_model_storing(tmp_path / "twice", "one value twice")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lm_head"):
        load(folder)


def test_the_bias_of_a_tied_head_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tied", tiny_model("phimoe", tie_word_embeddings=True))
    assert "lm_head.weight" not in Checkpoint.open(folder).tensors
    check_equal_to_transformers(folder)


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


def test_a_load_that_is_cancelled_while_it_reads_stops_and_leaves_no_thread(tiny: Tiny) -> None:
    checkpoint = Checkpoint.open(tiny("mixtral")[0])
    skeleton = build_skeleton(checkpoint, torch.float32)
    cancel, before = threading.Event(), threading.active_count()
    real = WeightReader.read_part

    def read_part(self: WeightReader, header: TensorHeader, first: int, out: Tensor) -> None:
        cancel.set()
        real(self, header, first, out)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LoadCancelledError, match="cancelled"):
        patch.setattr(WeightReader, "read_part", read_part)
        load_weights(skeleton, checkpoint, device=CPU, cancel=cancel)
    assert threading.active_count() == before


def rewrite(folder: Path, source: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a model whose tensors were changed."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def never_read(self: WeightReader, header: TensorHeader, first: int, out: Tensor) -> None:
    raise AssertionError("weights were read")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight", r"1 weights are missing .*layers\.1.*gate_up_proj"),
        ("model.norm.weight", r"1 weights are missing .*model\.norm\.weight"),
    ],
)
def test_a_missing_weight_is_refused_before_anything_is_read(
    name: str, message: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rewrite(tmp_path / "lacking", tiny("qwen2_moe")[0], lambda tensors: tensors.__delitem__(name))
    monkeypatch.setattr(WeightReader, "read_part", never_read)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_weight_of_another_shape_is_refused_before_anything_is_read(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.2.mlp.experts.0.down_proj.weight"

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()

    folder = rewrite(tmp_path / "cut", tiny("qwen2_moe")[0], cut)
    monkeypatch.setattr(WeightReader, "read_part", never_read)
    with pytest.raises(CheckpointError, match=r"down_proj.* has shape \[127, 128\], the model expects"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.bool])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight",
        "model.layers.2.mlp.experts.0.down_proj.weight", "model.layers.0.mlp.experts.5.up_proj.weight",
    ],
)  # fmt: skip
def test_whole_numbers_in_the_place_of_floats_are_refused_before_anything_is_read(
    name: str, dtype: torch.dtype, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a quantised model whose config does not say so: as floats they would answer nonsense."""

    def round_off(tensors: dict[str, Tensor]) -> None:
        tensors[name] = (100 * tensors[name]).to(dtype)

    folder = rewrite(tmp_path / "rounded", tiny("qwen2_moe")[0], round_off)
    monkeypatch.setattr(WeightReader, "read_part", never_read)
    with pytest.raises(CheckpointError, match=f"{name} in .* holds whole numbers"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_needs_transformers_own_converters_goes_through_them(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts stored transposed, and q, k and v as one matrix."""
    model = tiny_model("qwen3_moe", dtype=dtype, num_key_value_heads=4)
    plain = write_model(tmp_path / "plain", model, save_original_format=False)
    attention = [f"model.layers.{layer}.self_attn." for layer in range(3)]

    def fuse(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        for path in attention:
            tensors[f"{path}qkv.weight"] = torch.cat([tensors.pop(f"{path}{x}_proj.weight") for x in "qkv"])

    folder = rewrite(tmp_path / "fused", plain, fuse)
    converters = [
        WeightConverter("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", [Transpose(1, 2)]),
        WeightConverter("qkv.weight", [f"{x}_proj.weight" for x in "qkv"], [Chunk(dim=0)]),
    ]
    monkeypatch.setattr(placement, "get_model_conversion_mapping", lambda model: converters)
    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(checkpoint, torch.float32)
    reports: list[Progress] = []
    with load_weights(skeleton, checkpoint, device=CPU, progress=reports.append) as store:
        assert all(is_loaded(store, layer, model) for layer in range(3))
        for path in attention:
            for name in (f"{path}{x}_proj.weight" for x in "qkv"):
                check_same(name, skeleton.model.get_parameter(name), model.get_parameter(name).float())
    assert reports[-1].done == checkpoint.total_bytes


def is_loaded(store: HostStore, layer: int, wanted: Any) -> bool:
    """Whether all records of a layer are there."""
    return all(
        torch.equal(store.views(ExpertKey(layer, expert))[part], weight)
        for part, name in enumerate(("gate_up_proj", "down_proj"))
        for expert, weight in enumerate(getattr(wanted.model.layers[layer].mlp.experts, name))
    )


def slow_reads(patch: pytest.MonkeyPatch, broken: str = "") -> None:
    """Make each read take a while, and that of one tensor fail."""
    real = WeightReader.read_part

    def read_part(self: WeightReader, header: TensorHeader, first: int, out: Tensor) -> None:
        time.sleep(0.002)
        if header.name == broken:
            raise CheckpointError(f"Reading {header.name} failed.")
        real(self, header, first, out)

    patch.setattr(WeightReader, "read_part", read_part)


def test_a_layer_is_pinned_when_it_is_complete_and_while_others_are_read(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = tiny("qwen3_moe")
    checkpoint = Checkpoint.open(folder)
    loaded_at_pin: dict[int, list[bool]] = {}
    real = HostStore.pin_layer

    def pin_layer(self: HostStore, layer: int) -> None:
        loaded_at_pin.setdefault(layer, [is_loaded(self, other, reference) for other in range(3)])
        real(self, layer)

    driver = FakeDriver()
    slow_reads(monkeypatch)
    monkeypatch.setattr(HostStore, "pin_layer", pin_layer)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: driver))
    monkeypatch.setattr(host_memory, "device_address", lambda address: address)
    skeleton = build_skeleton(checkpoint, torch.float32)
    with load_weights(skeleton, checkpoint, device=CPU, pin=True) as store:
        assert all(loaded_at_pin[layer][layer] for layer in range(3))
        assert not all(loaded_at_pin[min(loaded_at_pin, key=lambda layer: sum(loaded_at_pin[layer]))])
        assert driver.pinned == {layer.data_ptr() for layer in store._layers}
    assert not driver.pinned


def test_a_load_that_fails_late_or_cannot_pin_leaves_nothing_pinned(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(tiny("qwen3_moe")[0])
    driver = FakeDriver()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: driver))
    monkeypatch.setattr(host_memory, "device_address", lambda address: address)
    last = max(checkpoint.tensors.values(), key=lambda header: header.offset)
    skeleton = build_skeleton(checkpoint, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        slow_reads(patch, broken=last.name)
        with pytest.raises(CheckpointError, match="failed"):
            load_weights(skeleton, checkpoint, device=CPU, pin=True)
    assert driver.calls > 0 and not driver.pinned
    driver.refused = driver.calls + 2
    with pytest.raises(HardwareError, match="refused to pin"):
        load_weights(build_skeleton(checkpoint, torch.float32), checkpoint, device=CPU, pin=True)
    assert not driver.pinned


@dataclass
class FakeDriver:
    """Keeps what is registered; refuses one call if asked to."""

    pinned: set[int] = field(default_factory=set)
    calls: int = 0
    refused: int | None = None

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.refused:
            return 304
        self.pinned.add(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.pinned.remove(pointer)
        return 0
