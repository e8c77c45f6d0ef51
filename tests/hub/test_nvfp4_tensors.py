"""Which tensors of a checkpoint scale which in NVFP4, and what is no such checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from localmoe.core.errors import CheckpointError, UnsupportedModelError
from localmoe.hub.nvfp4_tensors import is_nvfp4, with_fours
from localmoe.hub.safetensors_header import TensorHeader, read_file_header

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
FOUR, EIGHT = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
GROUP = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
EIGHTS = {"weights": {"num_bits": 8, "type": "float"}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}


def grouped(**changed: Any) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"a": {"weights": {**GROUP["weights"], **changed}}}}


@pytest.mark.parametrize(
    ("said", "nvfp4"),
    [
        (MODELOPT, True), ({**MODELOPT, "quant_algo": "W4A16_NVFP4"}, True), (COMPRESSED, True),
        ({**MODELOPT, "quant_algo": "FP8"}, False), ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, False),
        ({**MODELOPT, "group_size": 32}, False), (MIXED, False),
        ({**MIXED, "quantized_layers": {"a": FOUR, "b": EIGHT}}, True),
        ({**MIXED, "quantized_layers": {"b": EIGHT}}, False),
        ({**MIXED, "quantized_layers": {"a": FOUR, "b": {"quant_algo": "W4A16_AWQ"}}}, False),
        ({**MIXED, "quantized_layers": {"a": {**FOUR, "group_size": 32}}}, False),
        ({**MIXED, "quantized_layers": {"a": FOUR, "b": {"quant_algo": ["FP8"]}}}, False),
        ({**MIXED, "quantized_layers": {"a": {**FOUR, "group_size": [16]}}}, False),
        ({**MIXED, "quantized_layers": {"a": None}}, False), ({**MIXED, "quantized_layers": [1]}, False),
        ({**MIXED, "config_groups": {"a": GROUP, "b": EIGHTS}}, True),
        ({"quant_method": "modelopt", "config_groups": {"a": GROUP}}, True),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": EIGHTS}}, True),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": None}}, False),
        ({**COMPRESSED, "config_groups": {"a": EIGHTS}}, False),
        (grouped(group_size=32), False), (grouped(type="int"), False), (grouped(actorder="group"), False),
        (grouped(symmetric=False), False), (grouped(actorder=None, symmetric=True), True),
        ({**COMPRESSED, "transform_config": {"R1": {}}}, False),
        ({"quant_method": "fp8"}, False), ("nvfp4", False), (None, False), ({}, False),
    ],
)  # fmt: skip
def test_configs(said: Any, nvfp4: bool) -> None:
    assert is_nvfp4({"quantization_config": said}) is nvfp4
    assert not is_nvfp4({})


def headers(folder: Path, tensors: dict[str, Tensor]) -> dict[str, TensorHeader]:
    save_file(tensors, folder / "model.safetensors")
    return {one.name: one for one in read_file_header(folder / "model.safetensors").tensors}


def tensors_of(*matrices: int, rows: int = 48, columns: int = 64, each: bool = False) -> dict[str, Tensor]:
    return {
        "a.weight": torch.zeros(*matrices, rows, columns // 2, dtype=torch.uint8),
        "a.weight_scale": torch.zeros(*matrices, rows, columns // 16, dtype=torch.float8_e4m3fn),
        "a.weight_scale_2": torch.zeros(*matrices) if each else torch.zeros(()),
        "b.bias": torch.zeros(3), "counts": torch.zeros(5, dtype=torch.uint8),
    }  # fmt: skip


@pytest.mark.parametrize(("matrices", "each"), [((), False), ((3,), False), ((3,), True)])
def test_weights_have_their_shape_and_scales(tmp_path: Path, matrices: tuple[int, ...], each: bool) -> None:
    found = headers(tmp_path, tensors_of(*matrices, each=each))
    kept = with_fours(found, {"quantization_config": MODELOPT})
    assert kept.keys() == {"a.weight", "b.bias", "counts"} and kept["counts"] is found["counts"]
    weight = kept["a.weight"]
    assert weight.shape == (*matrices, 48, 64) and weight.num_bytes == found["a.weight"].num_bytes
    scales = weight.scales
    assert scales is not None and scales.factor is not None and not scales.divides
    assert (scales.rows, scales.columns, scales.grid) == (1, 16, (48, 4))
    assert with_fours(found, {}) == found, "another config says nothing of scales"


def test_names_of_compressed_tensors(tmp_path: Path) -> None:
    names = {"weight": "weight_packed", "weight_scale_2": "weight_global_scale"}
    tensors = tensors_of()
    for name, other in names.items():
        tensors[f"a.{other}"] = tensors.pop(f"a.{name}").clone()
    kept = with_fours(headers(tmp_path, tensors), {"quantization_config": COMPRESSED})
    weight = kept["a.weight"]
    assert weight.name == "a.weight" and weight.scales is not None and weight.scales.divides
    assert kept.keys() == {"a.weight", "b.bias", "counts"}


def test_fused_experts_whose_pairs_are_of_a_column_are_refused(tmp_path: Path) -> None:
    tensors = {
        "experts.down_proj": torch.zeros(2, 32, 48, dtype=torch.uint8),
        "experts.down_proj_weight_scale": torch.zeros(2, 4, 48, dtype=torch.float8_e4m3fn),
        "experts.down_proj_weight_scale_2": torch.zeros(()),
    }
    with pytest.raises(UnsupportedModelError, match=r"of one column.*choose another version"):
        with_fours(headers(tmp_path, tensors), {"quantization_config": MODELOPT})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a.weight_scale": None}, "without both their scales"),
        ({"a.weight_scale_2": None}, "without both their scales"),
        ({"a.weight_scale": torch.zeros(48, 4)}, r"\[48, 4\] of F32 and .* are no scales"),
        ({"a.weight_scale": torch.zeros(48, 3, dtype=torch.float8_e4m3fn)}, r"\[48, 3\] .* are no scales"),
        ({"a.weight": torch.zeros(48, 33, dtype=torch.uint8)}, "are no scales"),
        ({"a.weight": torch.zeros(48, dtype=torch.uint8)}, "are no scales"),
        ({"a.weight_scale_2": torch.zeros(2)}, "are no scales"),
        ({"a.weight_scale_2": torch.zeros(0)}, "are no scales"),
        ({"a.weight_scale_2": torch.zeros(1, dtype=torch.float16)}, "are no scales"),
    ],
)
def test_scales_that_do_not_fit_are_said_so(
    tmp_path: Path, changed: dict[str, Tensor | None], said: str
) -> None:
    tensors = {name: one for name, one in {**tensors_of(), **changed}.items() if one is not None}
    with pytest.raises(CheckpointError, match=said):
        with_fours(headers(tmp_path, tensors), {"quantization_config": MODELOPT})
