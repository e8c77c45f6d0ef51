"""Modules that are recognised by what they compute: a norm or a rotary embedding gets the first kernel that
gives what the module itself gives on a trial (routers: device_routers). Knows no architecture by name.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.gpu.launch import compiling
from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.rope import apply_rope, rotate
from localmoe.model.norms import norm_parts
from localmoe.model.rebound import looked_up, rebind

_SAME = 2e-2  # relative error of two roundings to 16 bits
_ROWS, _ANY_WIDTH = 5, 64


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


def close(got: Tensor, wanted: Tensor) -> bool:
    """But for rounding to 16 bits."""
    got, wanted = got.float(), wanted.float()
    return got.shape == wanted.shape and bool((got - wanted).norm() <= _SAME * wanted.norm())


def _all_close(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(close(a, b) for a, b in zip(got, wanted, strict=True))


def random_like(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The same numbers each time, in the dtype and on the device of `like`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device=like.device, dtype=like.dtype)


# -- norms


def norm_trial(module: nn.Module, like: Tensor) -> Trial | None:
    """None where the module has no epsilon, and weight or none, by the usual names. like: has the device and
    dtype of what one without a weight is given."""
    parts = norm_parts(module)
    if parts is not None:
        weight, eps = parts
        x = random_like((_ROWS, weight.shape[0]), weight)
        kernels = [partial(_norm, weight=weight, eps=eps, offset=offset) for offset in (0.0, 1.0)]
    elif getattr(module, "weight", None) is None and isinstance(getattr(module, "eps", None), float):
        x = random_like((_ROWS, _ANY_WIDTH), like)
        kernels = [partial(_norm, weight=None, eps=float(vars(module)["eps"]), offset=0.0)]
    else:
        return None
    wanted = module(x)
    if wanted.dtype != x.dtype:
        return None
    return Trial(
        kernels, lambda kernel: kernel(x), lambda got: close(got, wanted), partial(_adopt_norm, module)
    )


def _norm(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    weight: Tensor | None,
    eps: float,
    offset: float,
    scale: float = 1.0,
) -> Any:
    return rms_norm(x, weight, eps, residual, weight_offset=offset, scale=scale)


def _adopt_norm(module: Any, kernel: Callable[..., Any]) -> None:
    module.localmoe_norm = module.forward = kernel


# -- rotary embedding of queries and keys


def rope_trial(module: Any) -> Trial | None:
    """Of an attention module whose forward looks `apply_rotary_pos_emb` up; it finds the kernel there. Some
    rotate queries and keys together, some one after the other."""
    original = looked_up(module, "apply_rotary_pos_emb")
    if original is None:
        return None
    head_dim = int(module.head_dim)
    weight = module.q_proj.weight
    q, k = random_like((1, 3, _ROWS, head_dim), weight), random_like((1, 2, _ROWS, head_dim), weight)
    cos, sin = random_like((1, _ROWS, head_dim), weight), random_like((1, _ROWS, head_dim), weight)
    adopt = partial(rebind, module, "apply_rotary_pos_emb")
    try:
        if next(iter(inspect.signature(original).parameters)) == "x":
            turned = original(q, cos, sin)
            return Trial(
                [partial(_rope_of_one, original)], lambda kernel: kernel(q, cos, sin),
                lambda got: close(got, turned), adopt,
            )  # fmt: skip
        wanted = original(q, k, cos, sin)
    except (RuntimeError, TypeError):  # a rotation of another form, e.g. of part of a head
        return None
    return Trial(
        [partial(_rope, original)], lambda kernel: kernel(q, k, cos, sin),
        lambda got: _all_close(got, wanted), adopt,
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


def _rope_of_one(
    original: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Tensor:
    if cos.dtype != x.dtype:
        return original(x, cos, sin, unsqueeze_dim)
    if unsqueeze_dim == 1:
        return rotate(x, cos, sin)
    assert unsqueeze_dim == 2, "heads come before tokens, or behind"
    return rotate(x.transpose(1, 2), cos, sin).transpose(1, 2)
