"""Experts stored in MXFP4 become the same 16-bit weights as transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.engines import ask
from support.mxfp4_models import say_mxfp4, to_mxfp4, write_mxfp4_model
from support.tiny_models import CONTEXT, tiny_model, write_model
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from localmoe.core.config import EngineConfig
from localmoe.core.errors import CheckpointError
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.engine.facts import config_skeleton
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.footprint import checkpoint_dtype, measure_footprint
from localmoe.model.loader import load_weights
from localmoe.model.skeleton import build_skeleton
from localmoe.quant import mxfp4
from localmoe.quant.mxfp4 import decode, decode_into

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("gpt_oss", dtype=torch.bfloat16, intermediate_size=96)
    return write_mxfp4_model(tmp_path_factory.mktemp("mxfp4") / "gpt-oss", model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """The model as transformers loads it, its experts dequantised."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()  # fmt: skip


def load(folder: Path) -> HostStore:
    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(checkpoint, torch.bfloat16)
    return load_weights(skeleton, checkpoint, device=CPU)


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31 - 1), st.integers(0, 254), st.integers(0, 254)
)
def test_decoding_is_exact(rows: int, groups: int, seed: int, low: int, high: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    low, high = min(low, high), max(low, high)
    blocks = torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8, generator=chance)
    scales = torch.randint(low, high + 1, (rows, groups), dtype=torch.uint8, generator=chance)
    found = decode(blocks, scales)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(values + [-value for value in values], dtype=torch.float64)
    pairs = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1)
    exact = pairs.flatten(2) * torch.exp2(scales.double() - 127)[:, :, None]
    # the largest scale takes 4 and 6 beyond what 16 bits hold
    assert torch.equal(found.double(), exact.flatten(1).to(torch.bfloat16).double())
    if high < 253:
        assert torch.equal(found.double(), exact.flatten(1))
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.bfloat16)
    assert torch.equal(found.T.contiguous().view(torch.int16), theirs[0].view(torch.int16))


@given(st.integers(1, 150), st.integers(1, 3), st.integers(0, 2**31 - 1), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_weights_are_decoded_into_any_place(
    rows: int, groups: int, seed: int, turned: bool, with_numba: bool
) -> None:
    chance = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8, generator=chance)
    scales = torch.randint(0, 255, (rows, groups), dtype=torch.uint8, generator=chance)
    wanted = decode(blocks, scales)
    for dtype in (torch.bfloat16, torch.float32):
        room = torch.full((rows + 2, 32 * groups + 3), 7.0, dtype=dtype)
        room = room.T.contiguous().T if turned else room
        with pytest.MonkeyPatch.context() as patched:
            if not with_numba:
                patched.setattr(mxfp4, "_loops", lambda: None)
            decode_into(blocks, scales, room[1:-1, 2:-1])
        assert torch.equal(room[1:-1, 2:-1], wanted.to(dtype))
        room[1:-1, 2:-1] = 7.0
        assert (room == 7.0).all(), "something beside it was written"


def test_records_hold_what_transformers_dequantises(folder: Path, reference: Any) -> None:
    store = load(folder)
    for layer, block in enumerate(reference.model.layers):
        for expert in range(store.num_experts):
            gate_up, down = store.views(ExpertKey(layer, expert))
            assert torch.equal(gate_up, block.mlp.experts.gate_up_proj[expert])
            assert torch.equal(down, block.mlp.experts.down_proj[expert])


def test_experts_of_other_models_may_be_stored_so_too(tmp_path: Path) -> None:
    """Whose matrices are not turned, and whose gate's rows all come before up's."""
    model = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    folder = write_model(tmp_path / "model", model)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, weight in model.named_parameters():
        if ".experts." in name:
            blocks, scales = to_mxfp4(weight.detach())
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    say_mxfp4(folder)
    store = load(folder)
    for name, weight in model.named_parameters():
        if ".experts." in name:
            part = int(name.endswith("down_proj"))
            for expert in range(store.num_experts):
                found = store.views(ExpertKey(int(name.split(".")[2]), expert))[part]
                blocks, scales = to_mxfp4(weight[expert].detach())
                assert torch.equal(found, decode(blocks, scales))


def test_many_small_reads_give_the_same_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(folder)
    monkeypatch.setattr("localmoe.model.pieces.DECODED_BYTES", 5 * 128 * 2)
    parts = load(folder)
    for layer in range(whole.num_layers):
        for expert in range(whole.num_experts):
            key = ExpertKey(layer, expert)
            assert torch.equal(whole.record(key), parts.record(key))


def test_answers_are_those_of_the_same_weights_in_16_bits(
    folder: Path, reference: Any, tmp_path: Path
) -> None:
    plain = tiny_model("gpt_oss", dtype=torch.bfloat16, intermediate_size=96)
    plain.load_state_dict(reference.state_dict())
    answers = []
    for model in (folder, write_model(tmp_path / "plain", plain)):
        config = EngineConfig(device="cpu", context=CONTEXT, draft_length=4)
        with Engine.load(str(model), config) as engine:
            answers.append([ask(engine, "What is a block of", 24, draft_length=n) for n in (0, 4)])
            assert engine.footprint.expert_bytes == 2 * 3 * 96 * 128
    tokens = [[answer.tokens for answer in each] for each in answers]
    assert tokens[0] == tokens[1] and tokens[0][0] == tokens[0][1] and len(set(tokens[0][0])) > 4


def test_the_bytes_that_are_read_are_told(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    told: list[int] = []
    skeleton = build_skeleton(checkpoint, torch.bfloat16)
    load_weights(skeleton, checkpoint, device=CPU, progress=lambda progress: told.append(int(progress.done)))
    assert told[-1] == checkpoint.total_bytes
    whole, packed = checkpoint.tensors[f"{GATE_UP}_blocks"], checkpoint.tensors[f"{GATE_UP}_scales"]
    assert whole.num_bytes == 16 * packed.num_bytes


def test_a_model_that_is_not_here_yet_is_planned_with_16_bits_a_weight(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    skeleton = config_skeleton("someone/gpt-oss", checkpoint.config)
    found = measure_footprint("someone/gpt-oss", checkpoint_dtype(checkpoint), skeleton)
    assert found.expert_bytes == 2 * found.expert_params == 2 * 3 * 96 * 128


def without_scales(tensors: Tensors) -> None:
    del tensors[f"{GATE_UP}_scales"]


def without_blocks(tensors: Tensors) -> None:
    del tensors[f"{GATE_UP}_blocks"]


def with_fewer_blocks(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_blocks"] = tensors[f"{GATE_UP}_blocks"][:, :, :-1].contiguous()


def with_fewer_scales(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"][:, 1:].contiguous()


def with_fewer_experts(tensors: Tensors) -> None:
    for name in (f"{GATE_UP}_blocks", f"{GATE_UP}_scales"):
        tensors[name] = tensors[name][1:].contiguous()


def with_signed_blocks(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_blocks"] = tensors[f"{GATE_UP}_blocks"].view(torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_scales, "gate_up_proj_scales is missing"),
        (without_blocks, "1 weights are missing"),
        (with_fewer_blocks, "gate_up_proj_blocks has shape"),
        (with_fewer_scales, "gate_up_proj_scales has shape"),
        (with_fewer_experts, "gate_up_proj_blocks has shape"),
        (with_signed_blocks, "of I8"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_a_sentence(
    folder: Path, tmp_path: Path, damage: Callable[[Tensors], None], message: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
