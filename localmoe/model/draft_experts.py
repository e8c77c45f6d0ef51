"""Low-bit experts that are computed one by one, where no kernel of a GPU takes a whole layer of them. Chooses
none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from localmoe.kernels.activations import detect_activation, inner_function
from localmoe.kernels.experts import combine
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_linear import LowBitLinear
from localmoe.model.expert_module import expert_biases
from localmoe.model.pair_rows import pair_rows, rows_by_expert


@dataclass(frozen=True, slots=True)
class DraftExpert:
    """One expert's INT4 matrices, ready to multiply; gate_up has the row order of the module's own
    gate_up."""

    gate_up: LowBitLinear
    down: LowBitLinear

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device."""
        return self.gate_up.num_bytes + self.down.num_bytes


def run_experts(
    experts: Sequence[DraftExpert],
    x: Tensor,
    chosen: list[list[int]],
    inner: Callable[[Tensor], Tensor],
    biases: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Output (T, K, H) of each chosen expert for each token of x (T, H). inner: between the two products;
    biases: (E, 2I) and (E, H)."""
    out = x.new_zeros(len(chosen), len(chosen[0]), x.shape[1])
    flat = out.view(-1, x.shape[1])
    gate_up_bias, down_bias = biases
    by_expert = rows_by_expert(chosen, len(experts))
    for expert, rows in pair_rows(by_expert, len(chosen[0]), x.device).items():
        hidden = experts[expert].gate_up(x.index_select(0, rows.tokens))
        hidden = hidden if gate_up_bias is None else hidden + gate_up_bias[expert]
        y = experts[expert].down(inner(hidden))
        flat.index_copy_(0, rows.places, y if down_bias is None else y + down_bias[expert])
    return out


class LowBitLayer:
    """All routed experts of a MoE layer, in low bits (model.takeover.ExpertLayer)."""

    def __init__(self, module: Any, experts: LowBitExperts | list[DraftExpert]) -> None:
        """module: whose place they take. experts: packed for the GPU's kernels, or one by one."""
        self._experts = experts
        self._inner = inner_function(module)
        self._activation = detect_activation(module)
        self._biases = expert_biases(module)

    @property
    def num_bytes(self) -> int:
        """Bytes that they hold on the device."""
        if isinstance(self._experts, LowBitExperts):
            return self._experts.num_bytes
        return sum(expert.num_bytes for expert in self._experts)

    def release(self) -> None:
        """Give the memory back."""
        self._experts = []

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H), (T, K), (T, K) -> (T, H)."""
        if not isinstance(self._experts, LowBitExperts):
            out = run_experts(self._experts, hidden, top_k_index.tolist(), self._inner, self._biases)
            return combine(out, top_k_index, top_k_weights, hidden.dtype)
        from localmoe.kernels.gpu.lowbit_experts import lowbit_moe

        assert self._activation is not None, "packed layers are for kernels that know it"
        return lowbit_moe(hidden, self._experts, top_k_index, top_k_weights, activation=self._activation)
