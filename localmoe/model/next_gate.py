"""What the next MoE layer's gate makes of this layer's router input, for policies that prefetch by it.
Prefetches nothing, and changes nothing that is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from localmoe.core.events import NextGateGuessed
from localmoe.model.skeleton import Skeleton

Gate = Callable[[Tensor], tuple[Tensor, Tensor]]  # (T, H) -> weights and experts, (T, K) each


@torch.inference_mode()
def find_gates(skeleton: Skeleton, dtype: torch.dtype | None = None) -> list[Gate | None]:
    """The router of each MoE layer: a sibling of its experts that gives (logits, weights, experts), as a
    trial shows; its weights have to be there. None where there is no such module, or it does not read what
    the experts read.

    Args:
        dtype: of hidden states; None: the model's, which is another one where some layers keep theirs.
    """
    size = int(skeleton.text_config.hidden_size)
    gates = [
        _gate_beside(skeleton, experts.path) if experts.layout.hidden == size else None
        for experts in skeleton.experts
    ]
    return [gate if gate is not None and _answers(gate, skeleton, dtype) else None for gate in gates]


def _answers(gate: Gate, skeleton: Skeleton, dtype: torch.dtype | None) -> bool:
    model, size = skeleton.model, int(skeleton.text_config.hidden_size)
    trial = torch.zeros(1, size, dtype=dtype or model.dtype, device=next(model.parameters()).device)
    try:
        weights, experts = gate(trial)
        return weights.shape == experts.shape == (1, experts.shape[1]) and not experts.is_floating_point()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # a router of another form
        return False


def _gate_beside(skeleton: Skeleton, path: str) -> Gate | None:
    parent: nn.Module = skeleton.model.get_submodule(path.rpartition(".")[0])
    hidden_size = int(skeleton.text_config.hidden_size)
    for name in ("gate", "router"):
        router = getattr(parent, name, None)
        weight = getattr(router, "weight", None)
        if not (isinstance(router, nn.Module) and isinstance(weight, Tensor)):
            continue
        if tuple(weight.shape) == (skeleton.num_experts, hidden_size):
            return _gate_of(router, parent, skeleton.num_experts)
    return None


def _gate_of(router: nn.Module, parent: nn.Module, num_experts: int) -> Gate:
    """A router may have to be given what its parent adds for the choice alone."""
    given: list[Tensor] = []
    if len(inspect.signature(type(router).forward).parameters) == 3:  # with self
        own = (*parent.named_parameters(recurse=False), *parent.named_buffers(recurse=False))
        given = [tensor for _, tensor in own if tuple(tensor.shape) == (num_experts,)][:1]

    def choose(hidden: Tensor) -> tuple[Tensor, Tensor]:
        first, weights, last = router(hidden, *given)
        return weights, first if last.is_floating_point() else last  # either order is in use

    return choose


def guess(
    gates: Sequence[Gate | None], layer: int, hidden: Tensor, num_experts: int
) -> NextGateGuessed | None:
    """What the gate of `layer` would choose for `hidden` (T, H); None where that cannot be told. An index
    outside the experts means "none"."""
    gate = gates[layer] if layer < len(gates) else None
    if gate is None:
        return None
    weights, experts = gate(hidden)
    known = (experts >= 0) & (experts < num_experts)
    experts, weights = experts[known], weights[known]
    wanted = torch.zeros(num_experts, dtype=torch.float32, device=hidden.device)
    wanted.index_add_(0, experts, weights.float())
    order = wanted.argsort(descending=True, stable=True)[: experts.unique().numel()]
    return NextGateGuessed(layer, tuple(order.tolist()), tuple(wanted[order].tolist()), len(hidden))
