"""GPTQ checkpoints that others made: every layout that public packers write, held against the model they are
used with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_samples import gaussian
from safetensors.torch import load_file, save_file
from torch import Tensor

from localmoe.core.errors import DraftError
from localmoe.kernels.codes import BITS, CodeMatrix, dequantize, quantize_rtn
from localmoe.quant import DraftCheckpoint, ExpertNaming
from localmoe.quant.base_check import DraftBase, check_draft, correlation
from localmoe.quant.expert_names import find_naming
from localmoe.quant.packing import GptqVersion, pack_matrix

QWEN = ExpertNaming("model.layers.{layer}.mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ExpertNaming("model.layers.{layer}.block_sparse_moe.experts.{expert}", "w1", "w3", "w2")
NEMOTRON = ExpertNaming("backbone.layers.{layer}.mixer.experts.{expert}", None, "up_proj", "down_proj")
HIDDEN, INNER, EXPERTS, LAYERS = 320, 64, 3, 2
CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": 99,
    "moe_intermediate_size": INNER, "num_experts": EXPERTS, "torch_dtype": "bfloat16",
}  # fmt: skip


class Weights:
    """A model's experts; MoE layer i is decoder layer i."""

    num_layers = LAYERS
    num_experts = EXPERTS

    def __init__(self, seed: int = 0, size: float = 1.0, gated: bool = True) -> None:
        self._seed, self._size, self._gated = seed, size, gated

    def decoder_layer(self, layer: int) -> int:
        return layer

    def matrices(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        seed = self._seed + 100 * layer + 10 * expert
        gate, up = gaussian(INNER, HIDDEN, seed), gaussian(INNER, HIDDEN, seed + 1)
        down = gaussian(HIDDEN, INNER, seed + 2)
        matrices = (gate, up, down) if self._gated else (up, down)
        return tuple((matrix * self._size).bfloat16() for matrix in matrices)


def base(weights: Weights | None = None, **config: object) -> DraftBase:
    return DraftBase("some/model", "f" * 64, "", {**CONFIG, **config}, weights or Weights())


def weights_named(naming: ExpertNaming) -> Weights:
    return Weights(gated=naming.gate is not None)


def in_activation_order(matrix: CodeMatrix, weight: Tensor, seed: int) -> CodeMatrix:
    """The codes of a quantisation whose groups are made of shuffled columns."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    order = torch.cat([part.sort().values for part in order.split(matrix.group_size)])
    shuffled = quantize_rtn(weight[:, order], matrix.bits, matrix.group_size)
    return CodeMatrix(shuffled.codes, shuffled.scales, weight.shape[1], matrix.group_size, matrix.bits, order)


def checkpoint(
    folder: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    version: GptqVersion = 1,
    act_order: bool = False,
    naming: ExpertNaming = QWEN,
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """A whole GPTQ checkpoint of `Weights()`, attention and all, as a packer leaves it."""
    tensors = {"model.embed_tokens.weight": torch.ones(99, HIDDEN), **(extra or {})}
    for layer in range(LAYERS):
        attention = quantize_rtn(gaussian(64, 64), bits, 32)
        tensors |= pack_matrix(attention).named(f"model.layers.{layer}.self_attn.q_proj")
        for expert in range(EXPERTS):
            weights = weights_named(naming).matrices(layer, expert)
            for projection, weight in zip(naming.projections, weights, strict=True):
                matrix = quantize_rtn(weight, bits, weight.shape[1] if group_size == -1 else group_size)
                if act_order:  # gate and up share their inputs, so their order
                    matrix = in_activation_order(matrix, weight, 10 * expert + (projection == "down"))
                tensors |= pack_matrix(matrix, version).named(naming.module(layer, expert, projection))
    folder.mkdir()
    save_file(tensors, folder / "gptq_model-4bit-32g.safetensors")
    quantization = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": True, "desc_act": act_order,
    }  # fmt: skip
    if version == 2:
        quantization["checkpoint_format"] = "gptq_v2"
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    return folder


def error_of(folder: Path, naming: ExpertNaming = QWEN) -> float:
    """The largest relative error of all matrices; checks the draft on the way."""
    draft = DraftCheckpoint.open(folder)
    assert draft.provenance is None and draft.naming() == naming
    weights = weights_named(naming)
    check_draft(draft, base(weights), naming)
    worst = 0.0
    for layer in range(LAYERS):
        for expert, found in enumerate(draft.reader(naming).layer(layer, EXPERTS, (INNER, HIDDEN))):
            for matrix, weight in zip(found, weights.matrices(layer, expert), strict=True):
                assert matrix.group_size == draft.group_size
                difference = dequantize(matrix, torch.float64) - weight.double()
                worst = max(worst, float(difference.norm() / weight.double().norm()))
    return worst


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("version", "act_order", "group_size"), [(1, True, 32), (2, False, 64), (1, True, -1)]
)
def test_every_layout_gives_the_weights_that_were_quantised(
    tmp_path: Path, bits: int, version: GptqVersion, act_order: bool, group_size: int
) -> None:
    folder = checkpoint(
        tmp_path / "x", bits=bits, version=version, act_order=act_order, group_size=group_size
    )
    assert error_of(folder) < {2: 0.5, 3: 0.26, 4: 0.14, 8: 0.01}[bits]


def test_mixtrals_names_are_known(tmp_path: Path) -> None:
    assert error_of(checkpoint(tmp_path / "x", naming=MIXTRAL), MIXTRAL) < 0.12


@pytest.mark.parametrize(("group_size", "expected"), [(-1, 128), (512, 128), (256, 256), (128, 128)])
def test_wide_groups_are_cut_without_changing_a_weight(
    tmp_path: Path, group_size: int, expected: int
) -> None:
    draft = DraftCheckpoint.open(checkpoint(tmp_path / "x", group_size=group_size))
    assert draft.group_size == expected
    for expert, found in enumerate(draft.reader(QWEN).layer(1, EXPERTS, (INNER, HIDDEN))):
        for matrix, weight in zip(found, Weights().matrices(1, expert), strict=True):
            stored = quantize_rtn(weight, 4, weight.shape[1] if group_size == -1 else group_size)
            assert torch.equal(dequantize(matrix, torch.float32), dequantize(stored, torch.float32))
            assert matrix.padded_features == -(-weight.shape[1] // expected) * expected


def move_config(folder: Path) -> None:
    """As older packers did: all about the quantisation in a file of its own, which names no method."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    quantization.pop("quant_method")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(quantization))


def test_quantize_config_json_alone_will_do(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x", act_order=True)
    move_config(folder)
    assert error_of(folder) < 0.14
    (folder / "quantize_config.json").write_text("{")
    with pytest.raises(DraftError, match=r"quantize_config\.json is not valid JSON"):
        DraftCheckpoint.open(folder)
    (folder / "quantize_config.json").unlink()
    with pytest.raises(DraftError, match="plain weights"):
        DraftCheckpoint.open(folder)


def test_a_bias_of_zeros_is_skipped_and_any_other_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.bias"
    bias = torch.zeros(HIDDEN, dtype=torch.float16)
    assert error_of(checkpoint(tmp_path / "zeros", extra={name: bias})) < 0.14
    bias[7] = 1e-4
    folder = checkpoint(tmp_path / "other", extra={name: bias})
    with pytest.raises(DraftError, match=rf"{name} \(F16\) is not all zeros"):
        error_of(folder)


def test_a_checkpoint_of_whole_layers_has_no_experts_to_take(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x")
    file = next(folder.glob("*.safetensors"))
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    save_file(tensors, file)
    with pytest.raises(DraftError, match="no quantised experts"):
        DraftCheckpoint.open(folder).naming()


CHANGES: dict[str, Any] = {
    "model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 100,
    "moe_intermediate_size": 128, "num_experts": 60,
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGES)
def test_a_checkpoint_of_a_model_of_another_shape_is_refused_with_the_numbers(
    tmp_path: Path, key: str
) -> None:
    draft = DraftCheckpoint.open(checkpoint(tmp_path / "x"))
    sentence = f"of another model than some/model .{key} {CONFIG[key]} instead of {CHANGES[key]}"
    with pytest.raises(DraftError, match=sentence):
        check_draft(draft, base(**{key: CHANGES[key]}), QWEN)
    check_draft(draft, base(text_config={**CONFIG}, model_type="wrapper"), QWEN)


@pytest.mark.parametrize("size", [1.0, 0.01, 100.0])
@pytest.mark.parametrize("bits", BITS)
def test_a_quantisation_of_other_weights_is_refused(tmp_path: Path, bits: int, size: float) -> None:
    draft = DraftCheckpoint.open(checkpoint(tmp_path / "x", bits=bits))
    with pytest.raises(
        DraftError, match=r"no quantisation of some/model: its .*gate_proj has a corr.* of -?0\.0\d"
    ):
        check_draft(draft, base(Weights(seed=5, size=size)), QWEN)


class LastExpertOfTheLastLayerDiffers(Weights):
    def matrices(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = super().matrices(layer, expert)
        return gate, up, down.flip(0) if (layer, expert) == (LAYERS - 1, EXPERTS - 1) else down


def test_the_last_experts_are_looked_at_too(tmp_path: Path) -> None:
    draft = DraftCheckpoint.open(checkpoint(tmp_path / "x"))
    with pytest.raises(DraftError, match=r"layers\.1\.mlp\.experts\.2\.down_proj has a correlation"):
        check_draft(draft, base(LastExpertOfTheLastLayerDiffers()), QWEN)


def test_the_correlation_is_the_cosine_over_all_features_in_their_true_order() -> None:
    weight = gaussian(700, 96, seed=3)
    matrix = in_activation_order(quantize_rtn(weight, 2, 32), weight, seed=1)
    rows = slice(None, None, 2)  # of more than 512 rows every second
    cosine = torch.cosine_similarity(
        dequantize(matrix, torch.float64)[rows].flatten(), weight[rows].double().flatten(), dim=0
    )
    assert correlation(matrix, weight) == pytest.approx(float(cosine), rel=1e-6) and cosine > 0.8
    assert abs(correlation(matrix, weight.roll(1, dims=1))) < 0.05


def test_the_correlation_of_nothing() -> None:
    nothing, something = quantize_rtn(torch.zeros(8, 32), 4, 32), quantize_rtn(torch.ones(8, 32), 4, 32)
    assert correlation(nothing, torch.zeros(8, 32)) == 1
    assert correlation(something, torch.zeros(8, 32)) == 0
    assert correlation(nothing, torch.ones(8, 32)) == 0
    assert correlation(something, torch.ones(8, 32)) == pytest.approx(1)


def test_experts_without_a_gate_are_read_for_a_model_of_such_alone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x", naming=NEMOTRON)
    assert error_of(folder, NEMOTRON) < 0.2
    with pytest.raises(DraftError, match="2 matrices each, the model's 3"):
        check_draft(DraftCheckpoint.open(folder), base(), NEMOTRON)
    gated = DraftCheckpoint.open(checkpoint(tmp_path / "y"))
    with pytest.raises(DraftError, match="3 matrices each, the model's 2"):
        check_draft(gated, base(weights_named(NEMOTRON)), QWEN)


@pytest.mark.parametrize("power", [16, 33, 60, 200])
def test_a_group_that_no_row_can_fill_is_refused_at_once(tmp_path: Path, power: int) -> None:
    folder = checkpoint(tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 128 * 2**power
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftError, match="wider than any row"):
        DraftCheckpoint.open(folder)


def test_braces_in_the_names_of_a_file_are_characters_like_others(tmp_path: Path) -> None:
    name = "mo{del.{0}layers.7.mlp.experts.1.gate_proj.qweight"
    naming = find_naming([name, name.replace("gate", "up"), name.replace("gate", "down")], "qweight")
    assert naming is not None and naming.module(7, 1, "gate") + ".qweight" == name
