"""The bytes that GPTQ says it takes against a count of the tensors that live while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gptq_reference import activations, second_moments, weights
from torch.utils._python_dispatch import TorchDispatchMode

from localmoe.kernels import codes
from localmoe.quant import gptq_memory
from localmoe.quant.gptq import gptq_quantize
from localmoe.quant.gptq_memory import gptq_bytes


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators return, from their first appearance until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def measured(run: Callable[[], Any], *inputs: torch.Tensor) -> int:
    """Most bytes that live at once, inputs included."""
    with LiveBytes() as live:
        for tensor in inputs:
            live.count(tensor)
        result = run()
        del result
    return live.peak


def test_the_count_sees_what_lives_and_forgets_what_died() -> None:
    def run() -> None:
        for _ in range(3):
            torch.zeros(1000).add(1)  # two tensors at once

    assert measured(run, torch.zeros(10)) == 2 * 4000 + 40


SHAPES = [
    (1, 64, 1024, False),
    (6, 96, 512, False),
    (3, 1024, 256, False),
    (8, 300, 200, False),
    (5, 512, 384, True),
]
WAYS = [
    [(torch.bfloat16, "mse"), (torch.float32, "weighted-mse")],
    [(torch.bfloat16, "weighted-mse"), (torch.float32, "mse")],
]
# every two of shape, type and search meet, not every three: what is said knows nothing of the search, which
# works on float32 whatever the weights are
CASES = [(*shape, *way) for number, shape in enumerate(SHAPES) for way in WAYS[number % 2]]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("experts", "rows", "features", "shared", "dtype", "search"), CASES)
def test_no_more_lives_at_once_than_is_said_and_not_much_less(
    experts: int, rows: int, features: int, shared: bool, dtype: torch.dtype, search: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(codes, "_CHUNK_ELEMENTS", 1 << 12)  # so that the search's share is small here too
    monkeypatch.setattr(gptq_memory, "_SEARCH_BYTES", 8 * 4 * (1 << 12))
    weight = weights(experts, rows, features, 0).to(dtype)
    hessian = second_moments(activations(1 if shared else experts, 64, features, 0))
    hessian[0, 0, 0] = -10  # does not factor: the retries count too
    peak = measured(lambda: gptq_quantize(weight, hessian, 4, 64, scale_search=search), weight, hessian)
    said = gptq_bytes(experts, rows, features, 64, weight_itemsize=dtype.itemsize, shared_hessian=shared)
    assert 0.75 * said < peak <= said


def test_a_layer_of_qwen_takes_what_a_consumer_card_has() -> None:
    assert 1 << 30 < gptq_bytes(60, 2816, 2048, 128) < 5 << 30
