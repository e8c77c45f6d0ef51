"""Round to nearest as `kernels.codes.quantize_rtn` does, in one thread and a fraction of its time, outside
Python's lock. Importing this compiles it, which takes a second the first time.

Letters: N output features, K input features in whole groups of G.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from localmoe.kernels.codes import SCALE_RATIOS, CodeMatrix, check_bits, check_group_size, stored_scales
from localmoe.kernels.compiled_loops import compile_loop

_CHUNK_ELEMENTS = 1 << 18  # 1 MiB of float32, which stays in a core's own cache
_TINY = np.float32(1e-30)
_REORDERED = {"reassoc", "nsz", "contract"}  # sums of several elements at once


def round_bfloat16(weight: Tensor, bits: int, group_size: int) -> CodeMatrix:
    """`quantize_rtn` of a bfloat16 matrix (N, K) on the CPU: the same codes and scales, but that sums in
    another order may choose another one of two scales that are as good.

    Raises:
        ValueError: as quantize_rtn.
    """
    check_group_size(group_size)
    check_bits(bits)
    assert weight.dtype == torch.bfloat16 and weight.dim() == 2 and weight.device.type == "cpu"
    rows, in_features = weight.shape
    stored = weight.detach().contiguous().view(torch.int16).numpy()
    padded = -(-in_features // group_size) * group_size
    ratios, half = np.asarray(SCALE_RATIOS[bits], dtype=np.float32), np.float32(1 << bits - 1)
    codes = np.empty((rows, padded), dtype=np.uint8)
    scales = torch.empty(rows, padded // group_size, dtype=torch.float16)
    step = max(1, _CHUNK_ELEMENTS // max(1, padded))
    values = np.zeros((min(step, rows), padded), dtype=np.float32)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        mine = values[: part.stop - start]
        if not _widen(stored[part], mine.view(np.int32)):
            kind = "NaN" if bool(weight.isnan().any()) else "infinite"
            raise ValueError(f"the matrix has a weight that is {kind}")
        groups = mine.reshape(-1, group_size)
        found = np.empty(len(groups), dtype=np.float32)
        _search(groups, ratios, half, found)
        kept = stored_scales(torch.from_numpy(found), lambda: float(weight.abs().max()))
        scales[part] = kept.view(part.stop - start, -1)
        _round(groups, kept.float().numpy(), half, codes[part].reshape(-1, group_size))
    return CodeMatrix(torch.from_numpy(codes), scales, in_features, group_size, bits)


def _compiled(loop: Any, signature: str, **options: Any) -> Any:
    return compile_loop(loop, signature, "rounding to nearest", nogil=True, **options)


def _widen_loop(stored: Any, values: Any) -> bool:
    """bfloat16 (N, k) to float32 (N, K), both as bits; whether all are finite."""
    special = 0
    for n in range(stored.shape[0]):
        for k in range(stored.shape[1]):
            bits = np.int32(stored[n, k]) << 16
            values[n, k] = bits
            special |= (bits & 0x7F800000) == 0x7F800000
    return special == 0


def _search_loop(groups: Any, ratios: Any, half: Any, scales: Any) -> None:
    """The scale of least squared error of each group (N K / G, G), as search_scales finds it."""
    unit = np.empty(groups.shape[1], np.float32)
    for g in range(groups.shape[0]):
        group = groups[g]
        low, high = np.float32(0), np.float32(0)
        for j in range(len(group)):
            low, high = min(low, group[j]), max(high, group[j])
        largest = high if high > -low else low  # with its sign
        turned = np.float32(0) if abs(largest) < _TINY else np.float32(-1) / largest
        for j in range(len(group)):
            unit[j] = group[j] * turned  # the largest is now -1
        best_gain, best = np.float32(-1), np.float32(0)
        for ratio in ratios:
            product, square = np.float32(0), np.float32(0)
            for j in range(len(group)):
                rounded = min(max(np.rint(unit[j] * ratio), -half), half - np.float32(1))
                product += rounded * unit[j]
                square += rounded * rounded
            scale = product / max(square, _TINY)
            gain = product * scale
            if gain > best_gain:
                best_gain, best = gain, scale
        scales[g] = best * -largest


def _round_loop(groups: Any, scales: Any, half: Any, codes: Any) -> None:
    """uint8 codes, as round_to_codes finds them."""
    for g in range(groups.shape[0]):
        inverse = np.float32(1) / scales[g]
        for j in range(groups.shape[1]):
            rounded = min(max(np.rint(groups[g, j] * inverse), -half), half - np.float32(1))
            codes[g, j] = np.uint8(rounded + half)


_FLOATS = "float32[:,::1]"
_widen = _compiled(_widen_loop, "boolean(int16[:,::1], int32[:,::1])")
_search = _compiled(
    _search_loop, f"void({_FLOATS}, float32[::1], float32, float32[::1])", fastmath=_REORDERED
)
_round = _compiled(_round_loop, f"void({_FLOATS}, float32[::1], float32, uint8[:,::1])")
