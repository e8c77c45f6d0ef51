"""Gated MLPs of a transformers model on the GPU: both first products in one kernel with the activation. Known
by what their forward names, in the forms that are in use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.activations import PLAIN_KINDS, Activation
from localmoe.kernels.gpu.linear import gemv_gated, linear_gated
from localmoe.model.device_linear import KernelMode, join_rows
from localmoe.model.device_shared_experts import forward_names

_THREE = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_NUMBERED = {"w1", "w2", "w3", "F", "silu"}  # w2(silu(w1(x)) * w3(x))
_JOINED = {"input_linear", "chunk", "activation", "output_linear"}  # gate's rows before up's


def replace_gated_mlp(module: Any, mode: KernelMode) -> None:
    """Do so if the module is one."""
    found = _gated_mlp(module)
    if found is None:
        return
    weight, down, activation = found
    mode.joined.append(weight)

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        run = gemv_gated if mode.one_row and rows.shape[0] == 1 else linear_gated
        out: Tensor = down(run(rows, weight, activation=activation))
        return out.view(*x.shape[:-1], out.shape[-1])

    module.forward = forward


def _gated_mlp(module: Any) -> tuple[Tensor, nn.Linear, Activation] | None:
    """Rows of gate and up, (2I, H), what comes behind them, and what is between."""
    names = forward_names(module)
    first: tuple[Any, ...]
    if names == _THREE:
        first, down = (module.gate_proj, module.up_proj), module.down_proj
    elif names == _NUMBERED:
        first, down = (module.w1, module.w3), module.w2
    elif names == _JOINED:
        first, down = (module.input_linear,), module.output_linear
    else:
        return None
    if not all(isinstance(part, nn.Linear) for part in (*first, down)):
        return None
    activation = _activation(module)
    if any(part.bias is not None for part in first) or activation is None:
        return None
    weight = first[0].weight if len(first) == 1 else join_rows([part.weight for part in first])
    return weight, down, activation


def _activation(module: Any) -> Activation | None:
    """Found by feeding it numbers; None: another one."""
    act = getattr(module, "act_fn", None) or getattr(module, "activation", None) or nn.SiLU()
    x = torch.linspace(-8, 8, 97, dtype=torch.float32)
    if not isinstance(act, nn.Module):
        return None
    found, known = act(x), (Activation(kind) for kind in PLAIN_KINDS)
    same = (one for one in known if torch.allclose(found, one.apply(x, torch.ones_like(x)), atol=1e-6))
    return next(same, None)
