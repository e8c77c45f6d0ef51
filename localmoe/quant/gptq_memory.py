"""Bytes that GPTQ takes for a chunk of experts. Allocates nothing and does not choose the chunk."""

from __future__ import annotations

from localmoe.quant.gptq import BLOCK

_SEARCH_BYTES = 8 * (16 << 20)  # of one search for scales: eight buffers of a chunk at most


def gptq_bytes(
    num_experts: int,
    out_features: int,
    in_features: int,
    group_size: int,
    *,
    weight_itemsize: int = 2,
    shared_hessian: bool = False,
    block: int = BLOCK,
) -> int:
    """Most bytes that `gptq_quantize` of (E, N, K) holds at once: weights, Hessians, results, temporaries.

    An upper bound of tensors; a library's own workspace (a factorisation's on a GPU) comes on top.

    Args:
        weight_itemsize: bytes of a weight.
        shared_hessian: one Hessian for all experts, which are then one problem with E N rows.
    """
    experts, rows = (1, num_experts * out_features) if shared_hessian else (num_experts, out_features)
    groups = -(-in_features // group_size)
    matrix, padded, square = rows * in_features, rows * groups * group_size, in_features**2
    held = experts * (weight_itemsize * matrix + 4 * square)  # the caller's
    held += experts * (4 * square + 16 * in_features)  # feedback, importance and order
    factorising = 3 * 4 * square  # an expert at a time: rows in order, columns too, the factor
    results = experts * rows * groups * 2
    searching = results + (weight_itemsize + 4) * padded + _SEARCH_BYTES
    columns = (
        experts * rows * (4 * in_features + in_features + 2 * 4 * groups + 4 * 4 * min(block, in_features))
    )
    columns += experts * in_features * 8 + weight_itemsize * matrix
    storing = experts * (rows * in_features + padded + 4 * rows * groups) + matrix
    return held + max(factorising, searching, results + columns, results + storing)
