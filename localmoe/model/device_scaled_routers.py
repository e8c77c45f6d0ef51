"""Routers that norm and scale what they are given, and scale what they chose (Gemma 4): known by what their
forward names and by what they compute on a trial. Decides nothing else.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.router import MOST_CHOSEN, MOST_EXPERTS, route
from localmoe.model.device_linear import KERNEL_DTYPES
from localmoe.model.device_routers import ROUTED_ROWS, same_routing
from localmoe.model.device_shared_experts import forward_names
from localmoe.model.device_trials import Trial, random_like

_NAMES = {"norm", "scale", "scalar_root_size", "proj", "config", "top_k_experts", "per_expert_scale"}
_OPERATIONS = {"nn", "functional", "torch", "softmax", "float32", "topk", "sum"}


def scaled_router_trial(module: Any) -> Trial | None:
    """None where the module is no such router, or too large for the kernel."""
    if forward_names(module) != _NAMES | _OPERATIONS or getattr(module.norm, "weight", None) is not None:
        return None
    weight, top_k = module.proj.weight, module.config.top_k_experts
    if module.proj.bias is not None or weight.is_meta or weight.dtype not in KERNEL_DTYPES:
        return None
    if not isinstance(top_k, int) or top_k > MOST_CHOSEN or weight.shape[0] > MOST_EXPERTS:
        return None
    # on the CPU: the first product of every thread that uses PyTorch's library would take 32 MiB for good
    tried = copy.deepcopy(module).cpu()
    drawn = [1 + random_like(tuple(old.shape), old) / 4 for old in (module.scale, module.per_expert_scale)]
    with torch.no_grad():  # a new model's are ones
        for parameter, new in zip((tried.scale, tried.per_expert_scale), drawn, strict=True):
            parameter.copy_(new)
    x = random_like((ROUTED_ROWS, weight.shape[1]), weight)
    shares, weights, index = (part.to(x.device) for part in tried(x.cpu()))
    wanted = shares.log(), weights, index

    def agrees(got: tuple[Tensor, Tensor, Tensor]) -> bool:
        weights, index, logits = got
        return same_routing("softmax", (logits.float().log_softmax(-1), weights, index), wanted, None)

    return Trial(
        [_choose], lambda kernel: kernel(module, x, *drawn), agrees, lambda kernel: _adopt(module)
    )  # fmt: skip


def _choose(router: Any, x: Tensor, scale: Tensor, expert_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(T, H) -> as `_choose_normed`."""
    normed = rms_norm(x, scale, router.norm.eps, factor=float(router.scalar_root_size))
    return _choose_normed(router, normed, expert_scale)


def _choose_normed(router: Any, normed: Tensor, expert_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(T, H), normed and scaled -> weights (T, k) float32, indices and logits, as of `route`."""
    return route(
        normed, router.proj.weight, router.config.top_k_experts, score="softmax", renormalise=True,
        expert_scale=expert_scale,
    )  # fmt: skip


def _adopt(module: Any) -> None:
    def choose(normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _choose_normed(module, normed, module.per_expert_scale)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, index, logits = _choose(module, hidden_states, module.scale, module.per_expert_scale)
        return logits.float().softmax(-1), weights, index

    module.localmoe_choose, module.forward = choose, forward
