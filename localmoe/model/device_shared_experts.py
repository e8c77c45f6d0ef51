"""Blocks of routed experts and a gated shared one: recognised by what their forward names, computed with the
shared expert beside the routed ones. Knows no architecture by name.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from localmoe.kernels.gpu.shared_gate import add_gated
from localmoe.model.side_stream import SideStream

# what the forward of such a block names, and what else it may name
_SHARED_NAMES = {"gate", "experts", "shared_expert", "shared_expert_gate", "sigmoid"}
_SHAPE_NAMES = {"shape", "view", "reshape", "F", "torch", "nn", "functional"}

_MOST_BESIDE = 128  # rows; a prompt's would hold memory that the first stream cannot use again


def forward_names(module: nn.Module) -> set[str]:
    """Attributes and globals that a module's forward refers to."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def has_gated_shared_expert(module: nn.Module) -> bool:
    """Whether `shared_expert_forward` computes what the module does."""
    return _SHARED_NAMES <= forward_names(module) <= _SHARED_NAMES | _SHAPE_NAMES


def shared_expert_forward(block: Any, side: SideStream, hidden_states: Tensor) -> Tensor:
    """experts(x) + sigmoid(shared_expert_gate(x)) * shared_expert(x). The shared expert runs beside the
    routed ones, which may have to wait for the link or the CPU."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, index = block.gate(x)
    if x.shape[0] > _MOST_BESIDE:
        shared, routed = block.shared_expert(x), block.experts(x, index, weights)
    else:
        with side:
            shared = block.shared_expert(x)
        routed = block.experts(x, index, weights)
        side.join()
    gated = add_gated(routed, shared, x, block.shared_expert_gate.weight)
    return gated.view_as(hidden_states)
