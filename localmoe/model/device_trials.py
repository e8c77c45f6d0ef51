"""Modules that are recognised by what they compute: a norm, a rotary embedding or a router gets the first
kernel that gives what the module itself gives on a trial. Knows no architecture by name.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.gpu.launch import compiling
from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.rope import apply_rope
from localmoe.kernels.gpu.router import MOST_CHOSEN, MOST_EXPERTS, route
from localmoe.model.device_linear import KERNEL_DTYPES
from localmoe.model.norms import norm_parts
from localmoe.model.rebound import looked_up, rebind

_SAME = 2e-2  # relative error of two roundings to 16 bits
_CORRECTION = "e_score_correction_bias"  # added to scores for the choice
_ROWS, _ROUTED_ROWS = 5, 64


@dataclass(frozen=True, slots=True)
class Trial:
    """Kernels of which one may compute what a module does.

    Attributes:
        kernels: the likeliest first.
        run: what a kernel gives on the trial's input.
        agrees: whether that is what the module gives.
        adopt: let the module use a kernel.
    """

    kernels: Sequence[Callable[..., Any]]
    run: Callable[[Callable[..., Any]], Any]
    agrees: Callable[[Any], bool]
    adopt: Callable[[Callable[..., Any]], None]


def settle(trials: Sequence[Trial], stop: threading.Event | None = None) -> None:
    """Give each module the first kernel that agrees with it, if any does; see `compiling` for `stop`."""
    with compiling(stop):  # the likeliest of all modules side by side: one by one they take seconds
        for trial in trials:
            trial.run(trial.kernels[0])
    for trial in trials:
        for kernel in trial.kernels:
            if trial.agrees(trial.run(kernel)):
                trial.adopt(kernel)
                break


def _close(got: Tensor, wanted: Tensor) -> bool:
    got, wanted = got.float(), wanted.float()
    return got.shape == wanted.shape and bool((got - wanted).norm() <= _SAME * wanted.norm())


def _all_close(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(_close(a, b) for a, b in zip(got, wanted, strict=True))


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device=like.device, dtype=like.dtype)


# -- norms


def norm_trial(module: nn.Module) -> Trial | None:
    """None where the module has no weight and epsilon by the usual names."""
    parts = norm_parts(module)
    if parts is None:
        return None
    weight, eps = parts
    x = _random((_ROWS, weight.shape[0]), weight)
    wanted = module(x)
    if wanted.dtype != x.dtype:
        return None
    kernels = [partial(_norm, weight=weight, eps=eps, offset=offset) for offset in (0.0, 1.0)]
    return Trial(
        kernels, lambda kernel: kernel(x), lambda got: _close(got, wanted), partial(_adopt_norm, module)
    )


def _norm(x: Tensor, residual: Tensor | None = None, *, weight: Tensor, eps: float, offset: float) -> Any:
    return rms_norm(x, weight, eps, residual, weight_offset=offset)


def _adopt_norm(module: Any, kernel: Callable[..., Any]) -> None:
    module.localmoe_norm = module.forward = kernel


# -- rotary embedding of queries and keys


def rope_trial(module: Any) -> Trial | None:
    """Of an attention module whose forward looks `apply_rotary_pos_emb` up; it finds the kernel there."""
    original = looked_up(module, "apply_rotary_pos_emb")
    if original is None:
        return None
    head_dim = int(module.head_dim)
    weight = module.q_proj.weight
    q, k = _random((1, 3, _ROWS, head_dim), weight), _random((1, 2, _ROWS, head_dim), weight)
    cos, sin = _random((1, _ROWS, head_dim), weight), _random((1, _ROWS, head_dim), weight)
    try:
        wanted = original(q, k, cos, sin)
    except (RuntimeError, TypeError):  # a rotation of another form, e.g. of part of a head
        return None
    return Trial(
        [partial(_rope, original)], lambda kernel: kernel(q, k, cos, sin),
        lambda got: _all_close(got, wanted), partial(rebind, module, "apply_rotary_pos_emb"),
    )  # fmt: skip


def _rope(
    original: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    assert unsqueeze_dim == 1, "heads come before tokens"
    if cos.dtype != q.dtype:  # a model that rotates in 32 bits, which nothing told while it was tried
        return original(q, k, cos, sin)
    return apply_rope(q, k, cos, sin)


# -- routers


def router_trial(module: Any, dtype: torch.dtype) -> Trial | None:
    """None where the module is not called as transformers' routers are, or too large for the kernel. dtype:
    of what it is given; its weights may be float32 beside that."""
    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if weight is None or not isinstance(top_k, int) or weight.dim() != 2 or weight.is_meta:
        return None
    if dtype not in KERNEL_DTYPES or weight.dtype not in (dtype, torch.float32):
        return None
    if top_k > MOST_CHOSEN or weight.shape[0] > MOST_EXPERTS:
        return None
    groups = max(int(getattr(module, name, None) or 1) for name in ("n_group", "num_group"))
    if groups > 1 and hasattr(module, _CORRECTION):
        return None  # a correction may outweigh all scores of a trial, and leave nothing of groups to be seen
    x = _random((_ROUTED_ROWS, weight.shape[1]), weight).to(dtype)
    chosen = (_ROUTED_ROWS, top_k)
    try:
        # on the CPU: the first product of every thread that uses PyTorch's library would take 32 MiB for good
        found = copy.deepcopy(module).cpu()(x.cpu())
        wanted = tuple(part.to(x.device) for part in found)
        if len(wanted) != 3 or wanted[2].shape != chosen or wanted[1].shape != chosen:
            return None
    except (RuntimeError, TypeError, ValueError):
        return None
    return Trial(
        _routers(module, weight, top_k, wanted), lambda kernel: kernel(x),
        lambda got: _same_routing(got[1], got[2], wanted[1], wanted[2]) and _close(got[0], wanted[0]),
        lambda kernel: setattr(module, "forward", kernel),
    )  # fmt: skip


def _routers(
    module: Any, weight: Tensor, top_k: int, wanted: tuple[Tensor, ...]
) -> list[Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    bias = getattr(module, "bias", None)
    choice_bias = getattr(module, _CORRECTION, None)
    scale = float(getattr(module, "routed_scaling_factor", 1.0) or 1.0)
    return [
        partial(
            _route, weight=weight, top_k=top_k, score=score, renormalise=renormalise, bias=bias,
            choice_bias=choice_bias, scale=scale, dtypes=(wanted[0].dtype, wanted[1].dtype),
        )
        for score in ("softmax", "softmax_after_topk", "sigmoid")
        for renormalise in (False, True)
    ]  # fmt: skip


def _route(
    x: Tensor,
    *,
    weight: Tensor,
    top_k: int,
    score: Any,
    renormalise: bool,
    bias: Tensor | None,
    choice_bias: Tensor | None,
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, index), as transformers' routers return them."""
    weights, index, logits = route(
        x.reshape(-1, x.shape[-1]),
        weight,
        top_k,
        score=score,
        renormalise=renormalise,
        bias=bias,
        choice_bias=choice_bias,
        out_dtype=dtypes[1],
        logits_dtype=dtypes[0],
    )
    return logits, weights if scale == 1.0 else weights * scale, index


def _same_routing(weights: Tensor, index: Tensor, wanted_weights: Tensor, wanted_index: Tensor) -> bool:
    """The same experts (but for near-ties in a few rows) with the same weights."""
    mine, order = index.sort(dim=-1)
    theirs, wanted_order = wanted_index.sort(dim=-1)
    same = (mine == theirs).all(dim=-1)
    if float(same.float().mean()) < 0.9:
        return False
    return _close(weights.gather(1, order)[same], wanted_weights.gather(1, wanted_order)[same])
