"""Weights published as integers of four bits with a scale, and often a zero point, for a group of columns
(GPTQ, AWQ, AutoRound, "compressed-tensors"): whether a model's config says so, and which tensors belong to
which. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localmoe.core.errors import CheckpointError, UnsupportedModelError
from localmoe.hub.nvfp4_tensors import OTHER_ORDERS, weight_groups
from localmoe.hub.safetensors_header import IntegerGroups, Packing, TensorHeader, shown

DTYPE = "I4"  # of such weights here; the format has no name for them
_BITS = 4
_IN_WORD = 8
_PACKED = "weight_packed"
_WORDS = "qweight"
# behind the name of what they belong to: scales, zero points, and the group of each column
_OF_ROWS = ("weight_scale", "weight_zero_point", "weight_g_idx")
_OF_COLUMNS = ("scales", "qzeros", "g_idx")
_BESIDE = (*_OF_ROWS, *_OF_COLUMNS, "weight_shape")
_SCALE_DTYPES = ("F16", "BF16", "F32")
_AUTO_ROUND = ("auto-round", "intel/auto-round")
# how AutoRound writes what it makes
_AS_GPTQ, _AS_AWQ = ("auto_round:auto_gptq", "auto_gptq"), ("auto_round:auto_awq", "auto_awq")
_GPTQ = ("gptq", "gptq_v2")  # as `checkpoint_format` has them
_ROTATED = ("transform_config", "rotation", "spinquant_config", "rotation_config")  # of rotated weights
_PLAIN_FORMATS = (None, "pack-quantized", "mixed-precision")  # the latter: each group names its own


def is_int4(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json says that weights are integers of four bits, and others of 16."""
    values = config.get("quantization_config")
    if not isinstance(values, Mapping) or any(values.get(name) for name in _ROTATED):
        return False
    if values.get("quant_method") == "compressed-tensors":
        groups = weight_groups(values)
        return bool(groups) and _is_packed(values) and all(map(_are_integers, groups))
    four = [values.get("bits", values.get("w_bit")), *(rule.get("bits", _BITS) for rule in _rules(values))]
    return _packing(values) is not None and all(bits == _BITS for bits in four)


def group_sizes(config: Mapping[str, Any]) -> list[int]:
    """Columns that share a scale in a model that is_int4, 0: all of a row; several where they differ."""
    values = config["quantization_config"]
    groups: list[Mapping[str, Any]] = [values]
    if values.get("quant_method") == "compressed-tensors":
        groups = weight_groups(values)
    else:
        groups += [rule for rule in _rules(values) if "group_size" in rule]
    named = [group.get("group_size", group.get("q_group_size")) for group in groups]
    return sorted({size if type(size) is int and size > 0 else 0 for size in named})


def are_in_order(config: Mapping[str, Any]) -> bool:
    """Whether columns side by side share their scales in a model that is_int4, as far as its config tells:
    not where activations have ordered them."""
    values = config["quantization_config"]
    if values.get("quant_method") == "compressed-tensors":
        return all(group.get("actorder") not in OTHER_ORDERS for group in weight_groups(values))
    by_activations = values.get("desc_act") is True and not values.get("static_groups")
    return not by_activations or group_sizes(config) == [0]


def _rules(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What others than "compressed-tensors" say of some weights alone, but for those that stay in 16 bits."""
    said = [values.get(name) for name in ("dynamic", "extra_config")]
    rules = [rule for one in said if isinstance(one, Mapping) for rule in one.items()]
    known = [rule for name, rule in rules if isinstance(rule, Mapping) and not str(name).startswith("-:")]
    return [rule for rule in known if rule.get("bits") not in (16, 32)]


def _is_packed(values: Mapping[str, Any]) -> bool:
    """Whether "compressed-tensors" wrote eight to a word."""
    groups = values.get("config_groups")
    entries = [entry for entry in groups.values() if isinstance(entry, Mapping)] if groups else []
    return all(one.get("format") in _PLAIN_FORMATS for one in (values, *entries))


def _are_integers(group: Mapping[str, Any]) -> bool:
    by_rows = group.get("strategy") in (None, "group", "channel")
    return group.get("type") in (None, "int") and group.get("num_bits") == _BITS and by_rows


def _packing(values: Mapping[str, Any]) -> Packing | None:
    """Of what others than "compressed-tensors" write."""
    method = values.get("quant_method")
    if method == "gptq":
        known = values.get("checkpoint_format") or "gptq"
        return Packing.COLUMNS if known in _GPTQ and not values.get("is_marlin_format") else None
    if method == "awq":
        return Packing.MIXED if str(values.get("version") or "gemm").lower() == "gemm" else None
    if method in _AUTO_ROUND and values.get("data_type", "int") == "int":
        written = values.get("packing_format")
        return Packing.COLUMNS if written in _AS_GPTQ else Packing.MIXED if written in _AS_AWQ else None
    return None


def with_integers(tensors: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint, where its config says that it is_int4: each packed one by the name and in
    the shape (R, C) of its weights, with what belongs to it, which is not among them any more. Others as they
    are.

    Raises:
        CheckpointError: what belongs to them does not fit, or is missing.
        UnsupportedModelError: experts are packed together.
    """
    if not is_int4(config):
        return dict(tensors)
    packing = _packing(config["quantization_config"])
    more = 0 if packing is not Packing.COLUMNS or _is_second_version(config) else 1
    sizes, needed = group_sizes(config), _needed(config)
    found, used = dict(tensors), set[str]()
    for name, header in tensors.items():
        if header.dtype != "I32" or not name.endswith(_PACKED if packing is None else _WORDS):
            continue
        base = name.removesuffix(_PACKED if packing is None else _WORDS)
        if len(header.shape) != 2:
            raise UnsupportedModelError(
                f"Tensor {shown(name)} in {header.file.name} has the weights of several experts packed "
                "together: localmoe reads them one by one; choose another version of the model."
            )
        if any(base + end not in tensors for end in needed):
            raise CheckpointError(
                f"Tensor {shown(name)} in {header.file.name} has four-bit weights without all of their "
                "scales, zero points and groups, without which they say nothing: download the model again."
            )
        weights = _together(tensors, base, header, packing or Packing.ROWS, more, sizes)
        del found[name]
        found[weights.name] = weights
        used |= {base + end for end in _BESIDE}
    return {name: header for name, header in found.items() if name not in used}


def _needed(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What each weight has beside it. Where "compressed-tensors" leaves groups of columns out, these lie side
    by side."""
    values = config["quantization_config"]
    if values.get("quant_method") == "compressed-tensors":
        shifted = all(group.get("symmetric") is False for group in weight_groups(values))
        return ("weight_scale", "weight_zero_point") if shifted else ("weight_scale",)
    several = values.get("desc_act") is True and not _rules(values) and 0 not in group_sizes(config)
    return ("scales", "qzeros", "g_idx") if several else ("scales", "qzeros")


def _is_second_version(config: Mapping[str, Any]) -> bool:
    """Whether zero points are stored as they are, of GPTQ."""
    return bool(config["quantization_config"].get("checkpoint_format") == "gptq_v2")


def _together(
    tensors: Mapping[str, TensorHeader], base: str, header: TensorHeader, packing: Packing, more: int,
    sizes: list[int],
) -> TensorHeader:  # fmt: skip
    """As weights, with what belongs to them."""
    by_rows = packing is Packing.ROWS
    names = _OF_ROWS if by_rows else _OF_COLUMNS
    zeros, places = (tensors.get(base + name) for name in names[1:])
    scales = tensors[base + names[0]]
    first, second = header.shape
    rows, columns = {
        Packing.ROWS: (first, second * _IN_WORD),
        Packing.COLUMNS: (second, first * _IN_WORD),
        Packing.MIXED: (second * _IN_WORD, first),
    }[packing]
    grid = scales.shape if by_rows else scales.shape[::-1]
    groups = grid[1] if len(grid) == 2 else 0
    group = next((size or columns for size in sizes if groups == -(-columns // (size or columns or 1))), 0)
    fits = scales.dtype in _SCALE_DTYPES and group > 0 and grid[0] == rows
    if zeros is not None and (zeros.dtype, zeros.shape) != ("I8", scales.shape):
        packed = -(-rows // _IN_WORD)
        wanted = (packed, groups) if by_rows else (groups, packed)
        fits = fits and zeros.dtype == "I32" and zeros.shape == wanted
    if places is not None:
        fits = fits and places.dtype in ("I32", "I64") and places.shape == (columns,)
    if not fits:
        raise CheckpointError(
            f"Tensor {shown(scales.name)} {list(scales.shape)} of {scales.dtype}, or what else lies beside "
            f"it, does not belong to {shown(header.name)} {list(header.shape)} as integers of four bits: "
            "config.json and weights do not belong together."
        )
    integers = IntegerGroups(packing, group, scales, zeros, more, places)
    return replace(header, name=f"{base}weight", dtype=DTYPE, shape=(rows, columns), integers=integers)
