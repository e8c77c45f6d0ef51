"""Routers that norm and scale what they are given, and scale what they chose (Gemma 4): known by what their
forward names and by what they compute on a trial. Decides nothing else.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.router import MOST_CHOSEN, MOST_EXPERTS, route
from localmoe.model.device_linear import KERNEL_DTYPES
from localmoe.model.device_shared_experts import forward_names
from localmoe.model.device_trials import Trial, close, random_like

_NAMES = {"norm", "scale", "scalar_root_size", "proj", "config", "top_k_experts", "per_expert_scale"}
_OPERATIONS = {"nn", "functional", "torch", "softmax", "float32", "topk", "sum"}
_ROWS, _ALIKE = 64, 0.9  # share of rows whose experts are the same; near-ties may fall either way


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
    with torch.no_grad():
        for parameter in (tried.scale, tried.per_expert_scale):  # a new model's are ones
            parameter.copy_(1 + random_like(tuple(parameter.shape), parameter) / 4)
    x = random_like((_ROWS, weight.shape[1]), weight)
    wanted = [part.to(x.device) for part in tried(x.cpu())]
    kernel = partial(_choose, tried.to(x.device))
    return Trial([kernel], lambda kernel: kernel(x), partial(_agrees, wanted), lambda _: _adopt(module))


def choose(router: Any, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(T, H), normed and scaled -> weights (T, k) float32, indices and logits, as of `route`."""
    return route(
        normed, router.proj.weight, router.config.top_k_experts, score="softmax", renormalise=True,
        expert_scale=router.per_expert_scale,
    )  # fmt: skip


def _choose(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    normed = rms_norm(x, router.scale, router.norm.eps, factor=float(router.scalar_root_size))
    return choose(router, normed)


def _agrees(wanted: list[Tensor], got: tuple[Tensor, ...]) -> bool:
    """The same probabilities, and the same weights wherever the experts are the same, as they are in most
    rows."""
    weights, index, logits = got
    shares, wanted_weights, wanted_index = wanted
    mine, order = index.sort(dim=-1)
    theirs, wanted_order = wanted_index.sort(dim=-1)
    same = (mine == theirs).all(dim=-1)
    if float(same.float().mean()) < _ALIKE or not close(logits.float().softmax(-1), shares):
        return False
    return close(weights.gather(1, order)[same], wanted_weights.gather(1, wanted_order)[same])


def _adopt(module: Any) -> None:
    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, index, logits = _choose(module, hidden_states)
        return logits.float().softmax(-1), weights, index

    module.localmoe_choose, module.forward = partial(choose, module), forward
