"""Cases of attention over a cache, and the plain formula in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from localmoe.kernels.attention import KV_BLOCK

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Case:
    """One sequence: `start` tokens are cached, `rows` more ask."""

    heads: int = 4
    kv_heads: int = 2
    rows: int = 3
    blocks: int = 2
    head_dim: int = 16
    value_dim: int = 16
    start: int = 140
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def length(self) -> int:
        return self.blocks * KV_BLOCK

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        return (
            normal(self.heads, self.rows, self.head_dim),
            normal(self.kv_heads, self.length, self.head_dim),
            normal(self.kv_heads, self.length, self.value_dim),
            normal(self.heads) if self.sinks else None,
        )

    def causal(self) -> Tensor:
        """(1, T, L): row t is position start + t."""
        return torch.arange(self.length) <= self.start + torch.arange(self.rows)[None, :, None]


def naive(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Head by head and row by row in float64."""
    heads, rows, _ = q.shape
    group = heads // k.shape[0]
    out = torch.empty(rows, heads, v.shape[-1], dtype=torch.float64)
    for h in range(heads):
        for t in range(rows):
            seen = mask[h if mask.shape[0] > 1 else 0, t].nonzero()[:, 0]
            score = k[h // group, seen].double() @ q[h, t].double() * scale
            score = score if softcap is None else softcap * torch.tanh(score / softcap)
            weight = torch.exp(score - score.max())
            total = weight.sum()
            if sinks is not None:
                total = total + torch.exp(sinks[h].double() - score.max())
            out[t, h] = weight @ v[h // group, seen].double() / total
    return out


cases = st.builds(
    lambda kv_heads, group, rows, blocks, head_dim, value_dim, softcap, sinks, dtype, seed, fill: Case(
        kv_heads * group, kv_heads, rows, blocks, head_dim, value_dim,
        int(fill * (blocks * KV_BLOCK - rows)), softcap, sinks, dtype, seed,
    ),
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 8, 24]),
    st.sampled_from([1, 8, 40]), st.sampled_from([None, 1.5, 30.0]), st.booleans(), st.sampled_from(DTYPES),
    st.integers(0, 999), st.floats(0, 1),
)  # fmt: skip
