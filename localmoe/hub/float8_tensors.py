"""Weights published as eight-bit floats (FP8 E4M3), with scales in tensors beside them: whether a model's
config says so, and which tensor scales which. Reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localmoe.core.errors import CheckpointError
from localmoe.hub.int4_tensors import is_int4
from localmoe.hub.nvfp4_tensors import (
    EIGHTS,
    MODELOPT,
    are_plain_floats,
    is_nvfp4,
    modelopt_layers,
    weight_groups,
)
from localmoe.hub.safetensors_header import BlockScales, TensorHeader, shown

DTYPE = "F8_E4M3"
POWERS = ("F8_E8M0", "U8")  # of scales that are powers of two: the latter are the same bits
# behind the name of what is scaled, the last one of fused experts; all are multiplied with
_SUFFIXES = ("_scale_inv", "_scale", "_weight_scale")
_BESIDE = ("scale", "qscale_weight")  # in the place of "weight", of DeepSeek V4 and Mistral Large 4
# of inputs and of the KV cache, of no use where these have 16 bits
_OF_INPUTS = ("input_scale", "activation_scale", "input_global_scale", "k_proj.k_scale", "v_proj.v_scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", *POWERS)
_USUAL_BLOCK = (128, 128)  # which transformers takes where "fp8" says nothing, and "modelopt" has


def is_float8(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json says that its weights are E4M3, as those of DeepSeek V3, MiniMax M2 and
    the FP8 versions of Qwen are ("fp8"), of GLM ("compressed-tensors") or of Nemotron ("modelopt")."""
    values = config.get("quantization_config")
    if not isinstance(values, Mapping):
        return False
    method = values.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        experts = values.get("expert_dtype", config.get("expert_dtype"))  # four bits are DeepSeek V4's
        return "e4m3" in str(values.get("fmt") or "e4m3") and experts in (None, "fp8")
    if method in MODELOPT and (layers := modelopt_layers(values)):
        return all(layer.get("quant_algo") in EIGHTS for layer in layers)
    if method != "compressed-tensors" and method not in MODELOPT:
        return False
    if values.get("transform_config"):  # of rotated weights
        return False
    groups = weight_groups(values)
    return bool(groups) and all(group.get("num_bits") == 8 and are_plain_floats(group) for group in groups)


def is_in_codes(config: Mapping[str, Any]) -> bool:
    """Whether weights are floats of eight or four bits, or integers of four, with scales, of which bfloat16
    is made."""
    return is_float8(config) or is_nvfp4(config) or is_int4(config)


def with_scales(tensors: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint, where its config says that it is_float8, or that some are: each one of
    eight bits with its scales, which are not among them any more. Others as they are.

    Raises:
        CheckpointError: scales do not fit what they are of, or are missing.
    """
    if not (is_float8(config) or is_nvfp4(config)):
        return dict(tensors)
    block, found, used = _block(config["quantization_config"]), dict(tensors), set()
    for name, header in tensors.items():
        if header.dtype != DTYPE:
            continue
        scales = next((tensors[other] for other in _names(name) if other in tensors), None)
        if scales is None:
            raise CheckpointError(
                f"Tensor {shown(name)} in {header.file.name} has eight-bit weights without scales, which say "
                "nothing: download the model again."
            )
        found[name] = replace(header, scales=_fitting(header, scales, block))
        used.add(scales.name)
    return {
        name: header for name, header in found.items() if name not in used and not name.endswith(_OF_INPUTS)
    }


def _names(name: str) -> list[str]:
    """That the scales of a tensor may have."""
    found = [name + end for end in _SUFFIXES]
    if name.endswith(".weight"):
        found += [name.removesuffix("weight") + end for end in _BESIDE]
    return found


def _block(values: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale where not all of a row or a tensor do; (1, 1) if it does not
    say."""
    usual = _USUAL_BLOCK if values.get("quant_method") == "fp8" else None
    named = [values.get("weight_block_size", usual)]
    for group in weight_groups(values):
        if group.get("num_bits") != 8:  # NVFP4 has groups of its own
            continue
        block = group.get("block_structure")
        if isinstance(block, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", block):  # of older versions
            block = [int(side) for side in block.split("x")]
        named += [block, (1, group.get("group_size"))]
    for block in named:
        if isinstance(block, (list, tuple)) and len(block) == 2:
            rows, columns = block
            if type(rows) is int and type(columns) is int and min(rows, columns) > 0:
                return rows, columns
    return _USUAL_BLOCK if values.get("quant_method") in MODELOPT else (1, 1)


def _fitting(header: TensorHeader, scales: TensorHeader, block: tuple[int, int]) -> BlockScales:
    """A scale for each block, for each row or column, or one for a matrix."""
    shape, has = header.shape, scales.shape
    if len(shape) >= 2 and scales.dtype in _SCALE_DTYPES:
        matrices = shape[:-2]
        if len(has) == len(shape) + 2 and has[-3] == has[-1] == 1:  # of a block's rows and columns
            has = (*has[:-3], has[-2])
        if len(has) == len(shape) - 1 and has == shape[:-1]:
            has = (*has, 1)
        if has == matrices or (has == (1,) and not matrices):
            has = (*matrices, 1, 1)
        if len(has) == len(shape) and has[:-2] == matrices:
            down, across = has[-2:]
            rows, columns = _size(shape[-2], down, block[0]), _size(shape[-1], across, block[1])
            if rows and columns:
                return BlockScales(scales, rows, columns, (down, across))
    raise CheckpointError(
        f"Tensor {shown(scales.name)} has shape {list(scales.shape)} of {scales.dtype}, which are no scales "
        f"of {shown(header.name)} {list(shape)}: config.json and weights do not belong together."
    )


def _size(length: int, count: int, side: int) -> int:
    """Numbers in a line of `length` that share one of `count` scales; 0 if that does not go."""
    if count == 1:
        return max(1, length)
    if count == length:
        return 1
    return side if count == -(-length // side) else 0
