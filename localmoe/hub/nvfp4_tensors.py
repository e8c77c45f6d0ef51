"""Weights published as four-bit floats in NVFP4 (two E2M1 to a byte, an E4M3 scale for 16 columns, a 32-bit
one for the tensor), alone or beside eight-bit ones: whether a model's config says so, and which tensors scale
which. Reads no weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localmoe.core.errors import CheckpointError, UnsupportedModelError
from localmoe.hub.safetensors_header import BlockScales, TensorHeader, shown

DTYPE = "F4"  # the format's name for such floats, which lie in bytes as published
GROUP = 16  # columns that share a scale
_FOURS = ("NVFP4", "W4A16_NVFP4")
EIGHTS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN")
MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mixed")
OTHER_ORDERS = ("group", "dynamic", True)  # of columns, by which their groups' scales are found
_PACKED = "_packed"  # behind a weight's name, of compressed-tensors
_FACTORS = (("_scale_2", False), ("_global_scale", True))  # behind a weight's name; whether it divides


def is_nvfp4(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json says that weights are in NVFP4, and others in FP8 or 16 bits, as NVIDIA
    publishes them ("modelopt") and others do ("compressed-tensors")."""
    values = config.get("quantization_config")
    if not isinstance(values, Mapping):
        return False
    method = values.get("quant_method")
    if method in MODELOPT and (layers := modelopt_layers(values)):
        fours = [layer for layer in layers if layer.get("quant_algo") in _FOURS]
        known = all(layer.get("quant_algo") in (*_FOURS, *EIGHTS) for layer in layers)
        return bool(fours) and known and all(layer.get("group_size", GROUP) == GROUP for layer in fours)
    if method != "compressed-tensors" and method not in MODELOPT:
        return False
    if values.get("transform_config"):  # of rotated weights
        return False
    groups = weight_groups(values)
    fours = [group for group in groups if group.get("num_bits") == 4]
    floats = all(are_plain_floats(group) and group.get("num_bits") in (4, 8) for group in groups)
    return bool(fours) and floats and all(group.get("group_size") == GROUP for group in fours)


def modelopt_layers(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What "modelopt" says of all weights, or in mixed precision of those of each layer; nothing where
    groups say it."""
    if values.get("quant_algo") != "MIXED_PRECISION":
        return [values] if values.get("quant_algo") else []
    layers = values.get("quantized_layers")
    entries = layers.values() if isinstance(layers, Mapping) else ()
    return [entry if isinstance(entry, Mapping) else {} for entry in entries]


def weight_groups(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How weights are stored, of compressed-tensors, and of others that say it likewise."""
    groups = values.get("config_groups")
    entries = groups.values() if isinstance(groups, Mapping) else ()
    weights = [entry.get("weights") if isinstance(entry, Mapping) else None for entry in entries]
    return [entry if isinstance(entry, Mapping) else {} for entry in weights]


def are_plain_floats(group: Mapping[str, Any]) -> bool:
    """Whether such weights are floats times scales, in the order of the columns."""
    symmetric, ordered = group.get("symmetric") is not False, group.get("actorder") not in OTHER_ORDERS
    return group.get("type") == "float" and symmetric and ordered


def with_fours(tensors: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint, where its config says that it is_nvfp4: each one of four bits by the name
    and in the shape of its weights, with its scales, which are not among them any more. Others as they are.

    Raises:
        CheckpointError: scales do not fit what they are of, or are missing.
        UnsupportedModelError: matrices are transposed.
    """
    if not is_nvfp4(config):
        return dict(tensors)
    found, used = dict(tensors), set()
    for name, header in tensors.items():
        fused = f"{name}_weight"  # of all experts, whose tensor is called as the model calls it
        base = fused if f"{fused}_scale" in tensors else name.removesuffix(_PACKED)
        if header.dtype != "U8" or not base.endswith("weight"):
            continue
        weight = name if base == fused else base
        scales = tensors.get(f"{base}_scale")
        factors = [(tensors.get(base + end), divides) for end, divides in _FACTORS]
        factor, divides = next((pair for pair in factors if pair[0] is not None), (None, False))
        if scales is None or factor is None:
            raise CheckpointError(
                f"Tensor {shown(name)} in {header.file.name} has four-bit weights without both their scales, "
                "without which they say nothing: download the model again."
            )
        del found[name]
        found[weight] = _unpacked(weight, header, scales, factor, divides)
        used |= {scales.name, factor.name}
    return {name: header for name, header in found.items() if name not in used}


def _unpacked(
    name: str, header: TensorHeader, scales: TensorHeader, factor: TensorHeader, divides: bool
) -> TensorHeader:
    """As weights."""
    *matrices, rows, half = (0, 0, *header.shape)[-max(2, len(header.shape)) :]
    shape, groups = (*matrices, rows, 2 * half), 2 * half // GROUP
    if matrices and scales.shape == (*matrices, rows // 8, half):  # as transposed modules have them
        raise UnsupportedModelError(
            f"Tensor {shown(header.name)} in {header.file.name} has pairs of weights of one column, and "
            "localmoe reads pairs of one row: choose another version of the model."
        )
    fits = scales.dtype == "F8_E4M3" and scales.shape == (*matrices, rows, groups) and groups * 8 == half
    if not fits or factor.dtype != "F32" or math.prod(factor.shape) not in (1, math.prod(matrices)):
        raise CheckpointError(
            f"Tensors {shown(scales.name)} {list(scales.shape)} of {scales.dtype} and {shown(factor.name)} "
            f"{list(factor.shape)} of {factor.dtype} are no scales of {shown(header.name)} "
            f"{list(header.shape)}: config.json and weights do not belong together."
        )
    by_group = BlockScales(scales, 1, GROUP, (rows, groups), factor, divides)
    return replace(header, name=name, dtype=DTYPE, shape=shape, scales=by_group)
