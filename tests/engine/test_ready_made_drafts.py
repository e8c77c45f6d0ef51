"""GPTQ checkpoints of others as drafts: what the engine computes with them, for both kinds of passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import ROOMY, ask
from support.gptq_checkpoints import Model, Quantised, quantise, write_checkpoint
from support.tiny_models import tiny_model, write_model
from torch import Tensor

from localmoe.core.config import EngineConfig
from localmoe.core.errors import DraftError
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.hub.download_record import snapshot_revision
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.quant.packing import pack_matrix

Tiny = Callable[[str], tuple[Path, Any]]


def module_gate(model: Model, layer: int) -> Any:
    return model.skeleton.experts[layer].module


def reference(model: Model, weights: Quantised, layer: int, expert: int, x: Tensor) -> Tensor:
    """The expert's output in float64, gate and up in the module's own order."""
    module = module_gate(model, layer)
    gate, up, down = weights[layer, expert]
    if module.is_concatenated:
        gate_up = torch.cat([gate, up])
    else:
        gate_up = torch.stack([gate, up], dim=1).flatten(0, 1)
    hidden = x @ gate_up.T
    if getattr(module, "gate_up_proj_bias", None) is not None:
        hidden = hidden + module.gate_up_proj_bias[expert].double()
    return module._apply_gate(hidden) @ down.T


def packed_output(model: Model, layer: LowBitExperts, index: int, expert: int, x: Tensor) -> Tensor:
    """The same of the kernels' layout, whose rows are [gate; up]."""
    module = module_gate(model, index)
    gate_up, down = (matrix.double() for matrix in layer.dequantize(expert))
    hidden = x @ gate_up.T
    if layer.gate_up_bias is not None:
        hidden = hidden + layer.gate_up_bias[expert].double()
    if not module.is_concatenated:
        hidden = torch.stack(hidden.chunk(2, dim=-1), dim=-1).flatten(-2)
    return module._apply_gate(hidden) @ down.T


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    ("architecture", "bits", "act_order"),
    [
        ("qwen2_moe", 2, True), ("mixtral", 4, True), ("deepseek_v2", 8, True), ("gpt_oss", 3, False),
        ("qwen2_moe", 3, False), ("gpt_oss", 4, True),
    ],
)  # fmt: skip
def test_every_expert_is_that_of_the_checkpoint_in_both_kinds_of_passes(
    architecture: str, bits: int, act_order: bool, tiny: Tiny, tmp_path: Path
) -> None:
    model = Model.load(tiny(architecture)[0])
    for experts in model.skeleton.experts:  # biases that a wrong order would show
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            if getattr(experts.module, name, None) is not None:
                bias = torch.randn(getattr(experts.module, name).shape)
                setattr(experts.module, name, torch.nn.Parameter(bias))
    weights = write_checkpoint(model, tmp_path / "gptq", bits, act_order=act_order)
    description, packed = model.draft(tmp_path / "gptq", packed=True)
    assert str(description) == f"INT{bits} GPTQ, group 32"
    _, matrices = model.draft(tmp_path / "gptq", packed=False)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(1)).double()
    for layer, expert in ((0, 0), (len(packed) - 1, 5)):
        wanted = reference(model, weights, layer, expert, x)
        assert (packed[layer].gate_up.columns is not None) == act_order
        torch.testing.assert_close(
            packed_output(model, packed[layer], layer, expert, x), wanted, rtol=1e-5, atol=1e-5
        )
        found = matrices[layer][expert]
        hidden = found.gate_up(x.float())
        bias = getattr(module_gate(model, layer), "gate_up_proj_bias", None)
        hidden = hidden if bias is None else hidden + bias[expert]
        y = found.down(module_gate(model, layer)._apply_gate(hidden)).double()
        assert (y - wanted).norm() < 0.02 * wanted.norm()  # the fused kernel computes in bfloat16
    module = module_gate(model, 0)
    if architecture == "gpt_oss":
        assert packed[0].gate_up_bias.data_ptr() != module.gate_up_proj_bias.data_ptr()
        assert torch.equal(module.gate_up_proj_bias[5].sort().values, packed[0].gate_up_bias[5].sort().values)
    model.store.close()


@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral"])
def test_the_engine_drafts_with_a_checkpoint_that_the_user_names(
    architecture: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    folder = tiny(architecture)[0]
    model = Model.load(folder)
    write_checkpoint(model, tmp_path / "gptq", 8, act_order=True)
    model.store.close()
    plain = EngineConfig(vram_budget_bytes=ROOMY, draft_length=0)
    with Engine.load(str(folder), plain) as engine:
        expected = ask(engine, "hello").tokens
    config = EngineConfig(vram_budget_bytes=ROOMY, draft_length=4, draft_dir=tmp_path / "gptq")
    with Engine.load(str(folder), config) as engine:
        assert engine.info().draft == "INT8 GPTQ, group 32"
        answer = ask(engine, "hello")
        assert answer.tokens == expected
        assert answer.stats.accepted > 0.8 * answer.stats.drafted > 0
    assert not (tmp_path / "home" / "drafts").exists()


def test_a_checkpoint_of_a_model_of_the_same_shape_with_other_weights_is_refused(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = Model.load(tiny("qwen2_moe")[0])
    other = Model.load(write_model(tmp_path / "other", tiny_model("qwen2_moe", seed=1)))
    write_checkpoint(other, tmp_path / "gptq")
    with pytest.raises(DraftError, match=r"no quantisation of tiny.*correlation of -?0\.0") as refusal:
        model.draft(tmp_path / "gptq", packed=False)
    assert str(refusal.value).count(".\n") == 0
    third = Model.load(tiny("qwen3_moe")[0])
    with pytest.raises(DraftError, match="model_type qwen2_moe instead of qwen3_moe"):
        third.draft(tmp_path / "gptq", packed=False)
    for loaded in (model, other, third):
        loaded.store.close()


@pytest.mark.parametrize("packed", [True, False])
def test_gate_and_up_in_different_orders_are_refused(packed: bool, tiny: Tiny, tmp_path: Path) -> None:
    model = Model.load(tiny("qwen2_moe")[0])
    write_checkpoint(model, tmp_path / "gptq", act_order=True, same_order=False)
    with pytest.raises(DraftError, match=r"different orders \(g_idx\).*desc_act false"):
        model.draft(tmp_path / "gptq", packed=packed)
    model.store.close()


def test_columns_out_of_order_where_the_config_denies_it_are_refused_by_the_kernels_alone(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = Model.load(tiny("qwen2_moe")[0])
    write_checkpoint(model, tmp_path / "gptq", act_order=True)
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    _, packed = model.draft(
        tmp_path / "gptq", packed=True
    )  # the first expert shows that columns are shuffled
    assert packed[0].gate_up.columns is not None
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        first = f"model.layers.0.mlp.experts.0.{name}.g_idx"
        tensors[first] = torch.arange(128, dtype=torch.int32) // 32
    save_file(tensors, tmp_path / "gptq" / "model.safetensors")
    with pytest.raises(DraftError, match="no quantisation of"):  # its codes were of another order
        model.draft(tmp_path / "gptq", packed=True)
    first_weights = [quantise(w.float(), 4, None) for w in model.base.experts.matrices(0, 0)]
    for name, matrix in zip(("gate_proj", "up_proj"), first_weights, strict=False):
        tensors |= pack_matrix(matrix, 2).named(f"model.layers.0.mlp.experts.0.{name}")
    save_file(tensors, tmp_path / "gptq" / "model.safetensors")
    model.draft(tmp_path / "gptq", packed=False)
    with pytest.raises(DraftError, match=r"desc_act false, and expert 1 of layer 0 has its columns"):
        model.draft(tmp_path / "gptq", packed=True)
    model.store.close()


def test_the_revision_of_a_hub_snapshot_is_its_folders_name(tmp_path: Path) -> None:
    assert snapshot_revision(tmp_path / "models--a--b" / "snapshots" / ("a" * 40)) == "a" * 40
    assert snapshot_revision(tmp_path / "models" / "b") == ""
    record = {"repo_id": "a/b", "revision": "b" * 40}
    (tmp_path / "localmoe_download.json").write_text(json.dumps(record))
    assert snapshot_revision(tmp_path) == "b" * 40


def test_records_hold_the_experts_as_plain_matrices(tiny: Tiny) -> None:
    model = Model.load(tiny("gpt_oss")[0])
    gate, up, down = model.base.experts.matrices(1, 3)
    stored, _ = model.store.views(ExpertKey(1, 3))
    assert torch.equal(stored.T[0::2], gate) and torch.equal(stored.T[1::2], up)
    assert down.shape == (128, 128)
    model.store.close()
