"""Codes of 2, 3, 4 or 8 bits packed end to end into 32-bit words, and back. Knows neither matrices nor files.

GPTQ's words are one stream of bits, lowest first: code j of a row takes the bits b j .. b j + b - 1. With 3
bits codes then straddle words (32 codes take 3 words; the 11th begins with the last two bits of the first
word). Read in bytes, which little-endian words keep in the same order, a unit of at most 8 codes fills whole
bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNITS = {2: (4, 1), 3: (8, 3), 4: (2, 1), 8: (1, 1)}  # bits -> codes and bytes of a unit


def codes_multiple(bits: int) -> int:
    """The fewest codes that fill whole words: 16, 32, 8 or 4."""
    return {2: 16, 3: 32, 4: 8, 8: 4}[bits]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """int32 (rows, n * bits / 32) of uint8 codes (rows, n), n a multiple of `codes_multiple`."""
    assert codes.dtype == torch.uint8 and codes.shape[1] % codes_multiple(bits) == 0
    per_unit, unit_bytes = _UNITS[bits]
    units = codes.reshape(codes.shape[0], -1, per_unit)
    stream = torch.zeros((*units.shape[:2], unit_bytes), dtype=torch.uint8, device=codes.device)
    for j in range(per_unit):
        byte, shift = divmod(j * bits, 8)
        stream[..., byte] |= units[..., j] << shift  # what does not fit the byte falls off
        if shift + bits > 8:
            stream[..., byte + 1] |= units[..., j] >> 8 - shift
    return stream.flatten(1).view(torch.int32)


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """uint8 codes (rows, n) of int32 words (rows, n * bits / 32), contiguous."""
    assert words.dtype == torch.int32 and words.is_contiguous()
    per_unit, unit_bytes = _UNITS[bits]
    stream = words.view(torch.uint8).view(words.shape[0], -1, unit_bytes)
    codes = torch.empty((*stream.shape[:2], per_unit), dtype=torch.uint8, device=words.device)
    for j in range(per_unit):
        byte, shift = divmod(j * bits, 8)
        code = stream[..., byte] >> shift
        if shift + bits > 8:
            code |= stream[..., byte + 1] << 8 - shift
        codes[..., j] = code & ((1 << bits) - 1)
    return codes.flatten(1)
