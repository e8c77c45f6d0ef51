"""Scales of a vector of code words in NVFP4 (kernels.nvfp4_tiles), as vector code; its codes are those of
MXFP4 (mxfp4_vectors). Multiplies nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from localmoe.kernels.cpu.mxfp4_vectors import BY_BYTES
from localmoe.kernels.cpu.processor import LANES
from localmoe.kernels.cpu.strip_vectors import INTS, TOGETHER, WORDS
from localmoe.kernels.cpu.vector_loops import I8, I32, VECTOR, load_at
from localmoe.kernels.fp8_tiles import UP

_PAIR = 2  # code words that have a scale together


def _ints(number: int) -> Any:
    return ir.Constant(INTS, [number] * LANES)


def scales(builder: Any, address: Any, half: Any, part: int) -> list[Any]:
    """float32 of the scales that each lane's columns have. address: of the first row's word."""
    loaded = load_at(builder, address, ir.VectorType(I8, 4 * TOGETHER), 4)
    if BY_BYTES:  # a lane has numbers of every other word and of the one next to it, one after the other
        return [
            _spread(builder, loaded, [lane // 4 * 2 + side for lane in range(LANES)]) for side in range(2)
        ]
    return [_spread(builder, loaded, [(part * LANES + lane) % WORDS // _PAIR for lane in range(LANES)])]


def _spread(builder: Any, loaded: Any, groups: list[int]) -> Any:
    """float32 of the scale of each lane's group of columns."""
    b, size = builder, 4 * TOGETHER
    rows = [min(lane // WORDS, TOGETHER - 1) for lane in range(LANES)]
    chosen = [
        4 * row + group if byte == 0 else size  # of the zeros
        for row, group in zip(rows, groups, strict=True)
        for byte in range(4)
    ]
    zeros = ir.Constant(loaded.type, [0] * size)
    spread = b.shuffle_vector(loaded, zeros, ir.Constant(ir.VectorType(I32, 4 * LANES), chosen))
    bits = b.shl(b.bitcast(spread, INTS), _ints(20))
    # scales without an exponent are subnormal numbers here, which some processors are slow with, but rare:
    # such columns are next to nothing beside others of their tensor
    return b.fmul(b.bitcast(bits, VECTOR), ir.Constant(VECTOR, [UP] * LANES))
