"""Every matrix product of a model through localmoe's row-invariant kernels, and products that share their
input in one. Active inside `with mode:` only; elsewhere PyTorch's own run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from localmoe.kernels.gpu.linear import gemv, linear

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class FusedLinears:
    """Several nn.Linear of one input: their weights lie one after another, and the first call computes
    all."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        sizes = [layer.out_features for layer in linears]
        self.weight = join_rows([layer.weight for layer in linears])
        biases = [layer.bias for layer in linears]
        self.bias = join_rows(biases) if biases[0] is not None else None
        self.parts = list(torch.arange(sum(sizes)).split(sizes))
        self._bounds = [(int(part[0]), int(part[-1]) + 1) for part in self.parts]
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._left: set[int] = set()

    def pending(self, x: Tensor, part: int) -> Tensor | None:
        """The part's output, if it was computed for this very input and not taken yet."""
        if self._input is not x or part not in self._left:
            return None
        return self._take(part)

    def put(self, x: Tensor, output: Tensor, part: int) -> Tensor:
        """Keep the output (T, sum N) of all parts for the calls that follow; return the part's own."""
        self._input, self._output, self._left = x, output, set(range(len(self._bounds)))
        return self._take(part)

    def _take(self, part: int) -> Tensor:
        assert self._output is not None
        begin, end = self._bounds[part]
        taken = self._output[..., begin:end]
        self._left.discard(part)
        if not self._left:
            self._input = self._output = None
        return taken


def join_rows(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows, which the parameters become views of."""
    joined = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


class KernelMode(TorchFunctionMode):
    """Sends F.linear of 16-bit tensors to kernels.gpu.linear.

    Attributes:
        one_row: use the faster one-row kernels, whose bits differ (the draft).
        others: whether a product went elsewhere, e.g. of 32 bits, or a norm does (device_modules); its rows
            may depend on each other.
        joined: tensors that parameters became views of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one_row = False
        self.others = False
        self.joined: list[Tensor] = []
        self._fused: dict[int, tuple[FusedLinears, int]] = {}

    def fuse(self, linears: Sequence[nn.Linear]) -> None:
        """Compute these together from now on."""
        group = FusedLinears(linears)
        self.joined += [group.weight] if group.bias is None else [group.weight, group.bias]
        for part, layer in enumerate(linears):
            self._fused[id(layer.weight)] = (group, part)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept F.linear."""
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype not in KERNEL_DTYPES or weight.dtype != x.dtype:
            self.others = True
            return F.linear(x, weight, bias)
        group, part = self._fused.get(id(weight), (None, 0))
        if group is None:
            return self._product(x, weight, bias)
        waiting = group.pending(x, part)
        return group.put(x, self._product(x, group.weight, group.bias), part) if waiting is None else waiting

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        run = gemv if self.one_row and rows.shape[0] == 1 else linear
        return run(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])
