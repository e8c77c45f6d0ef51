"""Products in full float32, whatever the program around has chosen, and its choice afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gptq_reference import activations, second_moments, weights
from torch.utils._python_dispatch import TorchDispatchMode

from localmoe.kernels.codes import quantize_rtn
from localmoe.quant.gptq import gptq_quantize
from localmoe.quant.gptq_error import output_error
from localmoe.quant.gptq_precision import exact_float32
from localmoe.quant.hessian import HessianSums

BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
CHOICE = ("tf32", "bf16")


@pytest.fixture(autouse=True)
def a_program_that_wants_speed() -> Iterator[None]:
    before = [backend.fp32_precision for backend in BACKENDS]
    for backend, precision in zip(BACKENDS, CHOICE, strict=True):
        backend.fp32_precision = precision
    yield
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


def chosen() -> tuple[str, ...]:
    return tuple(backend.fp32_precision for backend in BACKENDS)


class Products(TorchDispatchMode):
    """Notes the precision that every matrix product runs with."""

    def __init__(self) -> None:
        super().__init__()
        self.precisions: list[tuple[str, ...]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operator.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            self.precisions.append(chosen())
        return operator(*args, **(kwargs or {}))


INPUTS = activations(2, 200, 96, 0)
HESSIANS = second_moments(INPUTS)


def sum_moments() -> None:
    x = INPUTS[0, :40, :16]
    sums = HessianSums.zeros(2, 16, "cpu")
    sums.add(0, x, torch.rand(40))
    sums.add_routed(x, torch.randint(2, (40, 1)))


def quantise() -> None:
    gptq_quantize(weights(2, 8, 96, 0), HESSIANS, 4, 32, block=48)


def measure_error() -> None:
    weight = weights(1, 8, 32, 0)[0]
    output_error(weight, quantize_rtn(weight, 4, 32), torch.eye(32))


@pytest.mark.parametrize("run", [sum_moments, quantise, measure_error])
def test_every_product_is_exact(run: Callable[[], None]) -> None:
    with Products() as products:
        run()
    assert products.precisions and set(products.precisions) == {("ieee", "ieee")}
    assert chosen() == CHOICE


def test_the_choice_is_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), exact_float32():
        assert chosen() == ("ieee", "ieee")
        raise RuntimeError("inside")
    assert chosen() == CHOICE
