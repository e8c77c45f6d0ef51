"""Blocks of routed and shared experts: recognised by what their forward names, computed with the shared ones
beside the routed ones. Knows no architecture by name.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from localmoe.kernels.gpu.shared_gate import add_gated
from localmoe.model.side_stream import MOST_BESIDE, SideStream, beside

# what the forward of such a block names, and what else it may name
_SHARED_NAMES = {"gate", "experts", "shared_expert", "shared_expert_gate", "sigmoid"}
_PLAIN_NAMES = {"gate", "experts", "shared_experts"}
_SHAPE_NAMES = {"shape", "view", "reshape", "F", "torch", "nn", "functional"}


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
    with beside(side, x.shape[0]):
        shared = block.shared_expert(x)
    routed = block.experts(x, index, weights)
    side.join()
    gated = add_gated(routed, shared, x, block.shared_expert_gate.weight)
    return gated.view_as(hidden_states)


def has_plain_shared_experts(module: nn.Module) -> bool:
    """Whether `SharedBeside` may run the module's shared experts."""
    shared = getattr(module, "shared_experts", None)
    return forward_names(module) >= _PLAIN_NAMES and isinstance(shared, nn.Module)


class SharedBeside:
    """A block's own forward, for which its shared experts have begun before its routed ones. Where the
    forward gives them something else than the block was given, they run when they are asked for."""

    def __init__(self, block: Any, side: SideStream) -> None:
        """block: its modules have their kernels already."""
        self._side = side
        self._block, self._shared = block.forward, block.shared_experts.forward
        self._ready: tuple[Tensor, Tensor] | None = None  # (given, what comes of it)
        block.forward, block.shared_experts.forward = self._run, self._take

    def _run(self, hidden_states: Tensor, **for_block: Any) -> Any:
        if hidden_states.numel() // hidden_states.shape[-1] > MOST_BESIDE:
            return self._block(hidden_states, **for_block)
        with self._side:
            self._ready = hidden_states, self._shared(hidden_states)
        try:
            return self._block(hidden_states, **for_block)
        finally:
            if self._ready is not None:  # nobody took it
                self._ready = None
                self._side.join()

    def _take(self, hidden_states: Tensor) -> Any:
        if self._ready is None or self._ready[0] is not hidden_states:
            return self._shared(hidden_states)
        (_, shared), self._ready = self._ready, None
        self._side.join()
        return shared
