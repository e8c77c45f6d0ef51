"""Weights published in microscaling FP4 (OCP Microscaling Formats 1.0), as gpt-oss's experts are: 32 weights
of 4 bits share a power of two. All of them are 16-bit floats too, so nothing is lost where they become such.
Reads no file and knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from localmoe.core.errors import CheckpointError
from localmoe.hub.safetensors_header import TensorHeader
from localmoe.kernels.compiled_loops import optional_loops

METHOD = "mxfp4"  # as `quantization_config` has it
BLOCK = 32  # weights that share a scale
BLOCK_BYTES = BLOCK // 2
# of a sign, two bits of exponent and one of mantissa (the same, FP4 E2M1)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCKS, _SCALES = "_blocks", "_scales"  # behind the parameter's name
_BIAS = 127  # of a scale's exponent


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json says that its experts are stored so."""
    values = config.get("quantization_config")
    return isinstance(values, Mapping) and values.get("quant_method") == METHOD


def parameter_of(name: str) -> str:
    """The parameter whose weights the tensor `name` holds as blocks; "" if it holds none."""
    return name.removesuffix(_BLOCKS) if name.endswith(_BLOCKS) else ""


def scales_of(name: str) -> str:
    """The tensor that has the scales of the blocks in tensor `name`."""
    return name.removesuffix(_BLOCKS) + _SCALES


def check_layout(
    blocks: TensorHeader, scales: TensorHeader | None, rows: tuple[int, int, int]
) -> TensorHeader:
    """See that both tensors hold a parameter of `rows` (E, N, K): blocks (E, N, K / 32, 16) and scales
    (E, N, K / 32). Returns the scales.

    Raises:
        CheckpointError: they do not.
    """
    experts, outputs, inputs = rows
    expected = (experts, outputs, inputs // BLOCK)
    if scales is None:
        raise CheckpointError(
            f"Tensor {scales_of(blocks.name)} is missing, without which {blocks.name} says nothing: download "
            "the model again."
        )
    for header, shape in ((blocks, (*expected, BLOCK_BYTES)), (scales, expected)):
        if inputs % BLOCK or tuple(header.shape) != shape or header.dtype != "U8":
            raise CheckpointError(
                f"Tensor {header.name} has shape {list(header.shape)} of {header.dtype}, the model expects "
                f"{list(shape)} of U8: config.json and weights do not belong together."
            )
    return scales


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 (N, 32 G), exactly: of a byte's two weights the one in the lower bits comes first.

    Args:
        blocks: uint8 (N, G, 16). scales: uint8 (N, G), exponents of two, 127 more than they are.
    """
    rows, groups, _ = blocks.shape
    places = torch.bitwise_or(blocks, (scales.int() << 8)[:, :, None])
    return _pairs().index_select(0, places.flatten()).view(torch.bfloat16).view(rows, groups * BLOCK)


def decode_into(blocks: Tensor, scales: Tensor, target: Tensor) -> None:
    """The same into (N, 32 G) in RAM, of any strides and floating dtype."""
    loops = _loops()
    if loops is None or target.dtype != torch.bfloat16:
        target.copy_(decode(blocks, scales))
        return
    by_rows, out = target.stride(1) == 1, target.view(torch.int16).numpy()
    fill = loops.fill_rows if by_rows else loops.fill_columns
    fill(blocks.numpy(), scales.numpy(), _pairs().numpy(), out if by_rows else out.T)


def _loops() -> Any:
    return optional_loops("localmoe.quant.mxfp4_loops", "MXFP4 is decoded")


def _powers(scales: Tensor) -> Tensor:
    return torch.exp2(scales.float() - _BIAS)


@cache
def _pairs() -> Tensor:
    """int32 (256 * 256,): the bits of the two bfloat16 that each byte stands for, with each scale."""
    values, byte = torch.tensor(_VALUES, dtype=torch.float32), torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    return (pairs * _powers(byte)[:, None, None]).to(torch.bfloat16).view(torch.int32).flatten()
