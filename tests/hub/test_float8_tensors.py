"""Which tensors of a checkpoint scale which, and what is no FP8 checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localmoe.core.errors import CheckpointError
from localmoe.hub.float8_tensors import is_float8, with_scales
from localmoe.hub.safetensors_header import TensorHeader, read_file_header

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
FOUR_BITS = {"weights": {"num_bits": 4, "type": "int"}}


def compressed(**weights: Any) -> dict[str, Any]:
    """A config that says more of weights."""
    group = {**GROUP, "weights": {**GROUP["weights"], **weights}}
    return {**COMPRESSED, "config_groups": {"group_0": group}}


def headers(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    """Those ending in "weight" and "proj" are of eight bits."""
    tensors = {
        name: torch.zeros(shape, dtype=torch.float8_e4m3fn if name.endswith(("weight", "proj")) else None)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return {one.name: one for one in read_file_header(folder / "model.safetensors").tensors}


@pytest.mark.parametrize(
    ("said", "float8"),
    [
        (FP8, True), (COMPRESSED, True), ({"quant_method": "fp8"}, True), ({**FP8, "fmt": "e5m2"}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True), ({"quant_method": "fbgemm_fp8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False), ({"quant_method": "modelopt"}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, True),
        ({**MIXED, "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "FP8_PB_WO"}}}, True),
        ({**MIXED, "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}}, False),
        ({**MIXED, "quantized_layers": {"a": {"quant_algo": ["FP8"]}}}, False), (MIXED, False),
        ({**MIXED, "config_groups": {"a": GROUP}}, True),
        ({**FP8, "expert_dtype": "fp8"}, True), ({**FP8, "expert_dtype": "fp4"}, False),
        ({"quant_method": "mxfp4"}, False), ({"quant_method": "compressed-tensors"}, False), ("fp8", False),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": FOUR_BITS}}, False), (None, False),
        ({**COMPRESSED, "transform_config": {}}, True),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R4": {}}}}, False),  # activations are, too
        (compressed(actorder="weight"), True), (compressed(actorder="group"), False),
        (compressed(symmetric=True), True), (compressed(symmetric=False), False),
        ({**COMPRESSED, "config_groups": {"a": None}}, False), ({**COMPRESSED, "config_groups": [1]}, False),
    ],
)  # fmt: skip
def test_configs(said: Any, float8: bool) -> None:
    assert is_float8({"quantization_config": said}) is float8
    assert not is_float8({})
    assert not is_float8({"quantization_config": FP8, "expert_dtype": "fp4"}), "as DeepSeek V4 says it"


@pytest.mark.parametrize(
    ("shape", "scales", "block", "wanted"),
    [
        ((300, 200), (3, 2), [128, 128], (128, 128)),
        ((300, 200), (3, 1), [128, 256], (128, 200)),
        ((300, 200), (300, 1), None, (1, 200)),
        ((300, 200), (300,), None, (1, 200)),
        ((300, 200), (1,), None, (300, 200)),
        ((300, 200), (), None, (300, 200)),
        ((300, 200), (1, 200), None, (300, 1)),
        ((4, 300, 200), (4, 3, 2), [128, 128], (128, 128)),
        ((4, 300, 200), (4, 300, 1), None, (1, 200)),
        ((4, 300, 200), (4,), None, (300, 200)),
        ((4, 300, 200), (4, 1, 1), None, (300, 200)),
    ],
)
def test_scales_of_all_shapes(
    tmp_path: Path, shape: tuple[int, ...], scales: tuple[int, ...], block: list[int] | None,
    wanted: tuple[int, int],
) -> None:  # fmt: skip
    found = headers(
        tmp_path, {"a.weight": shape, "a.weight_scale_inv": scales, "b.input_scale": (1,), "c": (3,)}
    )
    config = {"quantization_config": {**FP8, "weight_block_size": block}}
    kept = with_scales(found, config)
    assert kept.keys() == {"a.weight", "c"} and kept["c"] is found["c"]
    scaled = kept["a.weight"].scales
    assert scaled is not None and (scaled.rows, scaled.columns) == wanted
    assert scaled.header.name == "a.weight_scale_inv" and scaled.grid[0] * wanted[0] >= shape[-2]
    assert with_scales(found, {}) == found, "another config says nothing of scales"


@pytest.mark.parametrize(
    ("said", "scales", "wanted"),
    [
        ({"quant_method": "fp8"}, (3, 2), (128, 128)),  # what transformers takes where nothing is said
        ({"quant_method": "fp8", "weight_block_size": None}, (300, 1), (1, 200)),
        ({"block_structure": [100, 50], "group_size": None}, (3, 4), (100, 50)),
        ({"block_structure": "100x50"}, (3, 4), (100, 50)),  # as older files have it
        ({"strategy": "group", "group_size": 32, "block_structure": None}, (300, 7), (1, 32)),
        ({"strategy": "group", "group_size": 32, "block_structure": None}, (300, 1), (1, 200)),
    ],
    ids=str,
)
def test_blocks_as_configs_say_them(
    tmp_path: Path, said: dict[str, Any], scales: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    weights = {"weights": {"num_bits": 8, "type": "float", **said}}
    compressed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": weights}}
    config = {"quantization_config": said if "quant_method" in said else compressed}
    found = headers(tmp_path, {"a.weight": (300, 200), "a.weight_scale": scales})
    scaled = with_scales(found, config)["a.weight"].scales
    assert scaled is not None and (scaled.rows, scaled.columns) == wanted


@pytest.mark.parametrize("scales", [(3, 2), (3, 1, 2, 1), (300, 1), ()])
@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_blocks_beside_weights_of_four_bits(tmp_path: Path, method: str, scales: tuple[int, ...]) -> None:
    """Whose groups are no blocks of others'. "modelopt" has blocks without saying so."""
    fours = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    said = {} if method == "modelopt" else {"block_structure": [128, 128]}
    eights = {"weights": {"num_bits": 8, "type": "float", **said}}
    config = {"quant_method": method, "config_groups": {"group_0": fours, "group_1": eights}}
    found = headers(tmp_path, {"a.weight": (300, 200), "a.weight_scale": scales})
    scaled = with_scales(found, {"quantization_config": config})["a.weight"].scales
    assert scaled is not None
    wanted = {(): (300, 200), (300, 1): (1, 200)}.get(scales, (128, 128))
    assert (scaled.rows, scaled.columns) == wanted


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("experts.up_proj", "experts.up_proj_scale"), ("a.weight", "a.weight_scale"),
        ("experts.up_proj", "experts.up_proj_weight_scale"),
        ("a.weight", "a.scale"), ("a.weight", "a.qscale_weight"),
    ],
)  # fmt: skip
def test_names_that_scales_have(tmp_path: Path, name: str, scales: str) -> None:
    tensors = {name: torch.zeros(2, 64, 32, dtype=torch.float8_e4m3fn), scales: torch.zeros(2, 64, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = {one.name: one for one in read_file_header(tmp_path / "model.safetensors").tensors}
    (kept,) = with_scales(found, {"quantization_config": COMPRESSED}).values()
    assert kept.scales is not None and (kept.scales.rows, kept.scales.columns) == (1, 32)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"a.weight": (300, 200)}, "without scales"),
        ({"a.weight": (300, 200), "a.weight_scale_inv": (2, 2)}, r"\[2, 2\] of F32, which are no scales"),
        ({"a.weight": (300, 200), "a.weight_scale_inv": (3, 2, 1)}, "which are no scales"),
        ({"a.weight": (300,), "a.weight_scale_inv": (300,)}, "which are no scales"),
        ({"a.weight": (3, 300, 200), "a.weight_scale_inv": (2, 3, 2)}, "which are no scales"),
        ({"a.weight": (300, 200), "a.weight_scale_inv": (0,)}, "which are no scales"),
    ],
)
def test_scales_that_do_not_fit_are_said_so(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        with_scales(headers(tmp_path, shapes), {"quantization_config": FP8})
