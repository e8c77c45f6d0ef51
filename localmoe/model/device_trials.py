"""Modules that are recognised by what they compute: a norm gets the first kernel that gives what the module
itself gives on a trial (routers: device_routers, rotations: device_rotations). Knows no architecture by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.gpu.launch import compiling
from localmoe.kernels.gpu.norm import rms_norm
from localmoe.model.norms import norm_parts

_SAME = 2e-2  # relative error of two roundings to 16 bits
TRIAL_ROWS, _ANY_WIDTH = 5, 64


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


def all_close(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(close(a, b) for a, b in zip(got, wanted, strict=True))


def random_like(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The same numbers each time, in the dtype and on the device of `like`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(
        device=like.device, dtype=like.dtype
    )


# -- norms


def norm_trial(module: nn.Module, like: Tensor) -> Trial | None:
    """None where the module has no epsilon, and weight or none, by the usual names. like: has the device and
    dtype of what one without a weight is given."""
    parts = norm_parts(module)
    if parts is not None:
        weight, eps = parts
        x = random_like((TRIAL_ROWS, weight.shape[0]), weight)
        kernels = [partial(_norm, weight=weight, eps=eps, offset=offset) for offset in (0.0, 1.0)]
    elif getattr(module, "weight", None) is None and isinstance(getattr(module, "eps", None), float):
        x = random_like((TRIAL_ROWS, _ANY_WIDTH), like)
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
