"""Low-bit experts of a draft on the GPU: launches two kernels, gate_up with its activation and down with the
weighted sum. Decides their tiles; neither the routing nor the layout of the codes (kernels.lowbit_rows).

Made for 1 to 32 tokens, where reading the codes is most of the work: every (token, chosen expert) reads its
own rows, in 16-byte loads of which many are under way before the first is used. Results are deterministic,
but a row's last bits may differ with the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.dependent import after_previous
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.lowbit_kernels import down_kernel, gate_up_kernel
from localmoe.kernels.gpu.sizes import cdiv
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_rows import PackedRows, codes_per_word

_LANES = 32  # threads of a warp


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of a kernel covers. A vector is the codes that a thread loads at once: 16 bytes, or 8
    where a group's codes are no multiple of that.

    Attributes:
        rows: rows of the matrix, a power of two (gate_up: pairs of a gate and an up row, if there is a gate).
        vectors: vectors of a row side by side, a power of two.
        depth: steps of that size whose loads come before the first use.
    """

    rows: int
    vectors: int
    depth: int


def lowbit_moe(
    x: Tensor,
    experts: LowBitExperts,
    index: Tensor,
    weights: Tensor,
    *,
    activation: Activation,
    gate_up_tile: Tile | None = None,
    down_tile: Tile | None = None,
) -> Tensor:
    """Sum over the chosen experts of weight * down(act(gate_up(x))), with their biases.

    Products are accumulated in float32; between the two the hidden values are rounded to x's dtype.
    Allocates with torch.empty, never waits for the device, and may be captured in a CUDA graph.

    Args:
        x: (T, H) bfloat16, float16 or float32.
        index: (T, K) int64; an index outside 0..E-1 means no expert and contributes nothing.
        weights: (T, K), float32 or x's dtype.
        activation: its `interleaved` plays no part: rows of `experts` are always [gate; up].
        gate_up_tile, down_tile: tiles other than the built-in choice, for measurements.

    Returns:
        (T, H) in x's dtype.
    """
    tokens, top_k = index.shape
    hidden, inner = experts.hidden_size, experts.intermediate_size
    assert x.shape == (tokens, hidden) and weights.shape == index.shape and index.dtype == torch.int64
    x, index, weights = x.contiguous(), index.contiguous(), weights.contiguous()
    gated = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    tile = gate_up_tile or choose_gate_up_tile(experts)
    launch(
        gate_up_kernel, (cdiv(inner, tile.rows), tokens * top_k),
        x, index, *_tensors(experts.gate_up), _or_other(experts.gate_up.columns, index),
        _or_other(experts.gate_up_bias, x), gated,
        **gate_up_constants(experts, top_k, activation, tile, ptx=x.is_cuda), **after_previous(x.device),
    )  # fmt: skip
    tile = down_tile or choose_down_tile(experts, top_k)
    launch(
        down_kernel, (cdiv(hidden, tile.rows), tokens),
        gated, index, weights, *_tensors(experts.down), _or_other(experts.down_bias, x), out,
        **down_constants(experts, top_k, tile, ptx=x.is_cuda), **after_previous(x.device),
    )  # fmt: skip
    return out


def choose_gate_up_tile(experts: LowBitExperts) -> Tile:
    """One warp a program, so that none waits at a barrier, with eight rows' loads under way at once."""
    return Tile(
        4 if experts.gated else 8, _LANES, _depth(-(-_vectors(experts.gate_up) // _LANES), experts.bits)
    )


def choose_down_tile(experts: LowBitExperts, top_k: int) -> Tile:
    """Lanes side by side over vectors and experts, so that few idle in the last step of a row."""
    vectors = _vectors(experts.down)
    fitting = [n for n in (32, 16, 8) if n * experts_side_by_side(top_k) >= _LANES]
    step = min(fitting, key=lambda n: -(-vectors // n) * n)  # of equals the first: longest reads in a row
    return Tile(4, step, _depth(-(-vectors // step), experts.bits))


def _depth(steps: int, bits: int) -> int:
    """The most steps at once that leave no more than a sixth of the work idle at a row's end."""
    depths = (1,) if bits == 3 else (3, 2, 1)  # two planes of codes fill the registers
    return next(depth for depth in depths if -steps % depth * 6 <= steps)


def experts_side_by_side(top_k: int) -> int:
    """Experts of a token that a down program reads at once: the largest power of two that divides K, at
    most 8."""
    return min(8, top_k & -top_k)


def gate_up_constants(
    experts: LowBitExperts, top_k: int, activation: Activation, tile: Tile, *, ptx: bool
) -> dict[str, object]:
    """Compile-time constants of the gate_up kernel and its warps; ptx: inline assembly for NVIDIA devices."""
    return {
        **_constants(experts, experts.gate_up, top_k, tile, ptx),
        "BIASED": experts.gate_up_bias is not None,
        "INDEXED": experts.gate_up.columns is not None,
        "GATED": experts.gated,
        "KIND": activation.kind,
        "ALPHA": activation.alpha,
        "CLAMP": activation.limit,
        "num_warps": max(1, tile.vectors // _LANES),
    }


def down_constants(experts: LowBitExperts, top_k: int, tile: Tile, *, ptx: bool) -> dict[str, object]:
    """Compile-time constants of the down kernel and its warps; ptx as above."""
    side_by_side = experts_side_by_side(top_k)
    return {
        **_constants(experts, experts.down, top_k, tile, ptx),
        "BIASED": experts.down_bias is not None,
        "KB": side_by_side,
        "num_warps": max(1, side_by_side * tile.vectors // _LANES),
    }


def _constants(
    experts: LowBitExperts, packed: PackedRows, top_k: int, tile: Tile, ptx: bool
) -> dict[str, object]:
    return {
        "K": top_k,
        "E": experts.num_experts,
        "COLUMNS": packed.in_features,
        "ROWS": packed.out_features,
        "GROUP": packed.group_size,
        "BITS": packed.bits,
        "BN": tile.rows,
        "NL": tile.vectors,
        "DEPTH": tile.depth,
        "TABLE": packed.codebooks is not None,
        "PTX": ptx,
    }


def _vectors(packed: PackedRows) -> int:
    """Loads of at most 16 bytes in a row of codes."""
    per_group = packed.group_size // codes_per_word(packed.bits)
    return packed.words.shape[2] // (4 if per_group % 4 == 0 else 2)


def _tensors(packed: PackedRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, top bits, scales and codebooks; another of them in the place of one that is not there."""
    top_bits = packed.top_bits if packed.bits == 3 else packed.words
    return packed.words, top_bits, packed.scales, _or_other(packed.codebooks, packed.scales)


def _or_other(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
