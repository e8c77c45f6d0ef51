"""Device code that reads tiles of a matrix in MXFP4 (kernels.mxfp4_tiles) and makes 16-bit weights of them,
the same bits as decoding on the host does (quant.mxfp4). Multiplies nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STRIP = tl.constexpr(16)  # rows
_WORDS = tl.constexpr(8)  # of a row in a tile
_TILE = tl.constexpr(128)  # words
# A code's exponent and mantissa, put where those of a bfloat16 end and begin, are its value times 2^-126,
# also where its exponent is 0. Two factors, as 2^126 times the scale's power may be too large for one.
_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b, up, none;"
    " mov.b32 up, 0x7E807E80; mov.b32 none, 0x80008000;"  # 2^126 and -0, which adds nothing to any zero
    " shl.b32 a, $4, 6; shl.b32 b, $4, 12; and.b32 a, a, 0x01C001C0;"
    " lop3.b32 a, b, 0x80008000, a, 0xEA; fma.rn.bf16x2 a, a, up, none; fma.rn.bf16x2 $0, a, $5, none;"
    " shl.b32 a, $4, 2; shl.b32 b, $4, 8; and.b32 a, a, 0x01C001C0;"
    " lop3.b32 a, b, 0x80008000, a, 0xEA; fma.rn.bf16x2 a, a, up, none; fma.rn.bf16x2 $1, a, $5, none;"
    " shr.b32 a, $4, 2; shl.b32 b, $4, 4; and.b32 a, a, 0x01C001C0;"
    " lop3.b32 a, b, 0x80008000, a, 0xEA; fma.rn.bf16x2 a, a, up, none; fma.rn.bf16x2 $2, a, $5, none;"
    " shr.b32 a, $4, 6; and.b32 a, a, 0x01C001C0;"
    " lop3.b32 a, $4, 0x80008000, a, 0xEA; fma.rn.bf16x2 a, a, up, none; fma.rn.bf16x2 $3, a, $5, none; }"
)


@triton.jit
def code_places(n, C: tl.constexpr, BK: tl.constexpr):
    """Where the words of codes (N, BK / 8) of rows n are, for columns 0 to BK; those from column c on are 2 c
    words further."""
    at = n // _STRIP * (_STRIP * C // 8) + n % _STRIP * _WORDS
    j = tl.arange(0, BK // 8)
    if BK == 64:
        return at[:, None] + j[None, :]
    return at[:, None] + (j // _WORDS * _TILE + j % _WORDS)[None, :]


@triton.jit
def scale_places(n, C: tl.constexpr):
    """Where the words of scales (N,) of rows n begin; that for column c is c // 128 * 16 words further."""
    words: tl.constexpr = (C + 127) // 128
    return n // _STRIP * (_STRIP * words) + n % _STRIP


@triton.jit
def _float_pair(codes, power, j: tl.constexpr):
    """As _PAIRS, in plain code: bits of the j-th pair, the one in the lower half first."""
    v = codes >> (4 * j)
    low = (((v & 7) << 22) | ((v & 8) << 28)).to(tl.float32, bitcast=True)
    high = ((((v >> 16) & 7) << 22) | (((v >> 16) & 8) << 28)).to(tl.float32, bitcast=True)
    scale = ((power & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    low, high = low * 8.507059173023462e37 * scale, high * 8.507059173023462e37 * scale  # 2^126
    low_bits = (low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF  # exact: the rest is zeros
    return low_bits | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def decode(codes, scales, start, BK: tl.constexpr, PTX: tl.constexpr):
    """bfloat16 weights (N, BK) of columns start on. codes: int32 (N, BK / 8). scales: int32 (N,), the word
    for those columns."""
    group = (start % 128 // 32 + tl.arange(0, BK // 8) // 4) * 8
    exponent = (scales[:, None] >> group[None, :]) & 255
    power = tl.where(exponent == 0, 0x00400040, exponent << 7 | exponent << 23)  # 2^-127 has none of its own
    return weights(codes, power, BK, PTX)


@triton.jit
def weights(codes, power, BK: tl.constexpr, PTX: tl.constexpr):
    """bfloat16 (N, BK) of codes times what both halves of a word's `power` are, int32 (N, BK / 8) each."""
    if PTX:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _PAIRS, "=r,=r,=r,=r,r,r", [codes, power], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    else:
        p0, p1 = _float_pair(codes, power, 0), _float_pair(codes, power, 1)
        p2, p3 = _float_pair(codes, power, 2), _float_pair(codes, power, 3)
    rows: tl.constexpr = codes.shape[0]
    pairs = tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (rows, BK // 2))
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.interleave(low, high)
