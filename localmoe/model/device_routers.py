"""Routers that are recognised by what they compute: one gets the first kernel that gives what it gives on a
trial. Knows no architecture by name.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.gpu.router import MOST_CHOSEN, MOST_EXPERTS, route
from localmoe.model.device_linear import KERNEL_DTYPES
from localmoe.model.device_trials import Trial, close, random_like

ROUTED_ROWS = 64
_ALIKE = 0.9  # share of rows whose experts are the same; near-ties may fall either way
_TIE = 1e-2  # by which what decides on two experts differs then, of its spread in a row
_HELD_BIAS = "e_score_correction_bias"  # of the choice alone (DeepSeek-V3), where the router holds it


def router_trial(module: Any, dtype: torch.dtype) -> Trial | None:
    """None where the module is not called as transformers' routers are, or too large for the kernel. dtype:
    of what it is given; its weights may be float32 beside that.

    What a router adds for the choice alone, it holds or is given as a second argument: in the trial it is
    random, since a new model's is zero.
    """
    weight, top_k = _weight(module), getattr(module, "top_k", None)
    if weight is None or not isinstance(top_k, int) or weight.dim() != 2 or weight.is_meta:
        return None
    if dtype not in KERNEL_DTYPES or weight.dtype not in (dtype, torch.float32):
        return None
    if top_k > MOST_CHOSEN or weight.shape[0] > MOST_EXPERTS:
        return None
    held = _held_bias(module)
    given = held is None and _takes_bias(module)
    x = random_like((ROUTED_ROWS, weight.shape[1]), weight).to(dtype)
    drawn = random_like((weight.shape[0],), weight).float() / 4
    bias = drawn if given or held is not None else None
    chosen = (ROUTED_ROWS, top_k)
    try:
        # on the CPU: the first product of every thread that uses PyTorch's library would take 32 MiB for good
        on_host = copy.deepcopy(module).cpu()
        if held is not None:
            _held_bias(on_host).copy_(drawn.cpu())  # type: ignore[union-attr]
        found = on_host(x.cpu(), drawn.cpu()) if given else on_host(x.cpu())
        wanted = tuple(part.to(x.device) for part in found)
        reverse = len(wanted) == 3 and wanted[0].dtype == torch.int64  # indices come first
        wanted = wanted[::-1] if reverse else wanted
        if len(wanted) != 3 or wanted[2].shape != chosen or wanted[1].shape != chosen:
            return None
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None

    def adopt(kernel: Any) -> None:
        named: dict[str, Any] = {"reverse": True} if reverse else {}
        module.forward = partial(kernel, **named | ({} if held is None else {"choice_bias": held}))

    def run(kernel: Any) -> Any:
        return kernel.keywords["score"], kernel(x, choice_bias=bias)

    return Trial(
        _routers(module, weight, top_k, wanted),
        run,
        lambda tried: same_routing(tried[0], tried[1], wanted, bias),
        adopt,
    )


def _weight(module: nn.Module) -> Any:
    """(E, H): the router's own, or that of the linear layer that is all of it."""
    children = list(module.children())
    alone = len(children) == 1 and isinstance(children[0], nn.Linear) and children[0].bias is None
    return getattr(module, "weight", children[0].weight if alone else None)


def _held_bias(module: nn.Module) -> Tensor | None:
    """(E,), of the router itself or of a part of it."""
    named = (*module.named_parameters(), *module.named_buffers())
    found = next((tensor for name, tensor in named if name.rpartition(".")[2] == _HELD_BIAS), None)
    return None if found is None else found.detach().view(-1)


def _takes_bias(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 2


def _routers(
    module: Any, weight: Tensor, top_k: int, wanted: tuple[Tensor, ...]
) -> list[partial[tuple[Tensor, Tensor, Tensor]]]:
    bias = getattr(module, "bias", None)
    scale = float(getattr(module, "routed_scaling_factor", 1.0) or 1.0)
    groups = dict.fromkeys((_groups(module, len(weight)), (1, 1)))  # it may have some and use none
    return [
        partial(
            _route, weight=weight, top_k=top_k, score=score, renormalise=renormalise, bias=bias, scale=scale,
            dtypes=(wanted[0].dtype, wanted[1].dtype), groups=grouped,
        )
        for grouped in groups
        for score in ("softmax", "softmax_after_topk", "sigmoid")
        for renormalise in (False, True)
    ]  # fmt: skip


def _groups(module: Any, experts: int) -> tuple[int, int]:
    """Count, and how many are chosen from; one of all where the kernel has no such groups."""
    count = getattr(module, "num_group", getattr(module, "n_group", None))
    kept = getattr(module, "topk_group", None)
    if not isinstance(count, int) or not isinstance(kept, int) or not 0 < kept < count:
        return 1, 1
    return (count, kept) if experts & (experts - 1) == 0 and experts >= 2 * count else (1, 1)


def _route(
    x: Tensor,
    choice_bias: Tensor | None = None,
    *,
    weight: Tensor,
    top_k: int,
    score: Any,
    renormalise: bool,
    bias: Tensor | None,
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype],
    groups: tuple[int, int],
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, index), as transformers' routers return them, or the other way round."""
    weights, index, logits = route(
        x.reshape(-1, x.shape[-1]),
        weight,
        top_k,
        score=score,
        renormalise=renormalise,
        bias=bias,
        choice_bias=choice_bias,
        groups=groups,
        scale=scale,
        out_dtype=dtypes[1],
        logits_dtype=dtypes[0],
    )
    return (index, weights, logits) if reverse else (logits, weights, index)


def same_routing(
    score: str, got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], choice_bias: Tensor | None
) -> bool:
    """The same logits, the same experts but for near-ties in a few rows, and the same weights for them."""
    if not close(got[0], wanted[0]):
        return False
    mine, order = got[2].sort(dim=-1)
    theirs, wanted_order = wanted[2].sort(dim=-1)
    same = (mine == theirs).all(dim=-1)
    if float(same.float().mean()) < _ALIKE:
        return False
    deciding = wanted[0].float()
    if score != "softmax_after_topk":
        deciding = deciding.sigmoid() if score == "sigmoid" else deciding.softmax(dim=-1)
    if choice_bias is not None:
        deciding = deciding + choice_bias
    least, wanted_least = (deciding.gather(1, index).amin(dim=-1) for index in (mine, theirs))
    spread = deciding.amax(dim=-1) - deciding.amin(dim=-1)
    if not bool(((least - wanted_least).abs() <= _TIE * spread).all()):
        return False
    weights, wanted_weights = got[1].gather(1, order), wanted[1].gather(1, wanted_order)
    return close(weights[same], wanted_weights[same])
