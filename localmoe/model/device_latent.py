"""Let attention modules that cache latent vectors attend in latent space on the GPU, instead of expanding the
cache in every pass. A module is changed only if its `expand_kv` computes, on a trial, what its kv_b_proj
says. Knows no architecture by name, and launches nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.gpu.latent_attention import MOST_RANK, MOST_ROPE, latent_attention
from localmoe.model.device_linear import KernelMode

_SAME = 2e-2  # relative error of two roundings to 16 bits
_TRIAL_ROWS = 5
_SIZES = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class Latent:
    """Where a module's heads find their weights: the projection itself, whose tensor may still move.

    Attributes:
        projection: rows of each head's keys and then of its values, over latent vectors.
        heads: count. plain: dimensions of a head's key that are not rotated.
    """

    projection: nn.Linear
    heads: int
    plain: int

    def weights(self) -> tuple[Tensor, Tensor]:
        """(heads, Dn, R) of keys and (heads, Dv, R) of values, views."""
        weight = self.projection.weight
        by_head = weight.view(self.heads, -1, weight.shape[1])
        return by_head[:, : self.plain], by_head[:, self.plain :]

    def attend(
        self, query: Tensor, latent: Tensor, rope: Tensor, start: Tensor, scale: float, max_length: int
    ) -> Tensor:
        """See kernels.gpu.latent_attention."""
        keys, values = self.weights()
        return latent_attention(
            query, latent, rope, keys, values, start, scale=scale, max_length=max_length
        )  # fmt: skip


@torch.inference_mode()
def attend_in_latent_space(module: Any) -> None:
    """Have the module hand its cache on as it is, for `Latent.attend`, where that computes the same."""
    projection, expand = getattr(module, "kv_b_proj", None), getattr(module, "expand_kv", None)
    sizes = [getattr(module, name, None) for name in _SIZES]
    if (
        not isinstance(projection, nn.Linear)
        or expand is None
        or not all(type(size) is int for size in sizes)
    ):
        return
    heads, rank, plain, rope, values = sizes
    if projection.bias is not None or rank > MOST_RANK or rope > MOST_ROPE:
        return
    if projection.weight.shape != (heads * (plain + values), rank) or projection.weight.is_meta:
        return
    latent = Latent(projection, heads, plain)
    if _expands_alike(expand, latent, rope):
        module.localmoe_latent = latent
        module.expand_kv = _as_it_is


def _as_it_is(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return latent, rope


def expanded(module: Any, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the module's own code makes them."""
    key, value = type(module).expand_kv(module, latent, rope)
    return key, value


def _expands_alike(expand: Any, latent: Latent, rope: int) -> bool:
    weight = latent.projection.weight
    generator = torch.Generator().manual_seed(0)

    def trial(size: int) -> Tensor:
        made = torch.randn((1, 1, _TRIAL_ROWS, size), generator=generator, dtype=torch.float32)
        return made.to(device=weight.device, dtype=weight.dtype)

    vectors, turned = trial(weight.shape[1]), trial(rope)
    keys, values = latent.weights()
    try:
        with KernelMode():
            found = [part.cpu() for part in expand(vectors, turned)]
    except (RuntimeError, TypeError, ValueError):  # of another form
        return False
    # on the CPU: PyTorch's library would take 32 MiB of the GPU for good, for each thread that asks it
    vectors, turned, keys, values = (part.float().cpu() for part in (vectors, turned, keys, values))
    wanted_keys = vectors @ keys.mT
    wanted = (
        torch.cat((wanted_keys, turned.expand(-1, latent.heads, -1, -1)), -1),
        vectors @ values.mT,
    )
    return all(
        a.shape == b.shape and bool((a.float() - b).norm() <= _SAME * b.norm())
        for a, b in zip(found, wanted, strict=True)
    )
