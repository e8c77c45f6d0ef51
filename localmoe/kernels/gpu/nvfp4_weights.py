"""Device code that reads tiles of a matrix in NVFP4 (kernels.nvfp4_tiles) and multiplies with them. A code
times its scale is a bfloat16 number, and a row's sum is multiplied by its factor, so no weight is rounded,
here as on the CPU. Decides nothing.

Dimension letters: R rows and C columns of a matrix, N rows of a block, M rows of the other factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.bf12_weights import dot
from localmoe.kernels.gpu.mxfp4_weights import weights

_STRIP = tl.constexpr(16)  # rows
# A scale's exponent and mantissa, put where those of a bfloat16 end and begin, are its value times 2^-120; in
# both halves of a word.
_BOTH = tl.constexpr(
    "{ .reg .b32 a, up, none; mov.b32 up, 0x7B807B80; mov.b32 none, 0x80008000;"
    " shl.b32 a, $1, 4; prmt.b32 a, a, a, 0x1010; fma.rn.bf16x2 $0, a, up, none; }"
)


@triton.jit
def scale_places(n, C: tl.constexpr):
    """Where the words of scales (N,) of rows n begin; that for column c is c // 64 * 16 further."""
    return n // _STRIP * (_STRIP * (C // 64 + 1)) + n % _STRIP


@triton.jit
def _scale(code, PTX: tl.constexpr):
    """int32: in both halves the bfloat16 of a scale."""
    if PTX:
        found = tl.inline_asm_elementwise(_BOTH, "=r,r", [code], tl.int32, True, 1)
    else:
        number = (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        upper = number.to(tl.int32, bitcast=True) & -65536  # exact: the rest is zeros
        found = upper | ((upper >> 16) & 0xFFFF)
    return found


@triton.jit
def decode(codes, scales, PTX: tl.constexpr):
    """bfloat16 (N, 64) of codes, int32 (N, 8), and their scales, int32 (N,)."""
    group = (tl.arange(0, 8) // 2) * 8
    return weights(codes, _scale((scales[:, None] >> group[None, :]) & 255, PTX), 64, PTX)


@triton.jit
def add(acc, a, codes, scales, PTX: tl.constexpr):
    """acc (M, N) and a (M, 64) times codes, int32 (N, 8), times their scales, int32 (N,)."""
    return dot(a, tl.trans(decode(codes, scales, PTX)), acc, PTX)


@triton.jit
def scaled(acc, scales, kept_scales, C: tl.constexpr, KEEP: tl.constexpr):
    """Sums (M, N) times their rows' factors, which lie behind the scales."""
    factors = tl.load(scales + C // 64 * 16)
    if KEEP:
        tl.store(kept_scales + C // 64 * 16, factors)
    return acc * factors.to(tl.float32, bitcast=True)[None, :]
