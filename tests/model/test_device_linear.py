"""Products that share their input are computed once for each input, and never confused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from localmoe.model import device_linear
from localmoe.model.device_linear import FusedLinears, KernelMode, join_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (24, 8, 16)


def linears(*, bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(32, size, bias=bias).to(DEVICE, torch.float16) for size in SIZES]


def rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, 32, generator=generator).to(DEVICE, torch.float16)


def exact(layer: nn.Linear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    return nn.functional.linear(x.double(), layer.weight.double(), bias)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape and got.dtype == torch.float16
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(kernel, rows, columns) of every product that runs."""
    seen: list[tuple[str, int, int]] = []
    for name in ("linear", "gemv"):
        kernel = getattr(device_linear, name)

        def watched(
            x: Tensor, weight: Tensor, bias: Tensor | None, kernel: object = kernel, name: str = name
        ) -> Tensor:
            seen.append((name, x.shape[0], weight.shape[0]))
            return kernel(x, weight, bias)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(device_linear, name, watched)
    return seen


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
def test_the_first_call_computes_all_and_the_others_take_their_part(
    bias: bool, products: list[tuple[str, int, int]]
) -> None:
    parts, mode = linears(bias=bias), KernelMode()
    x, y = rows(3, 1), rows(3, 2)
    wanted = {at: [exact(part, at) for part in parts] for at in (x, y)}
    mode.fuse(parts)
    with mode:
        for order in ((0, 1, 2), (2, 0, 1)):
            for at in (x, y):
                for i in order:
                    assert_near(parts[i](at), wanted[at][i])
    assert products == [("linear", 3, sum(SIZES))] * 4


@torch.inference_mode()
def test_another_input_in_between_is_computed_anew_even_if_it_is_equal(
    products: list[tuple[str, int, int]],
) -> None:
    parts, mode = linears(), KernelMode()
    x, y, twin = rows(2, 1), rows(2, 2), rows(2, 1)
    mode.fuse(parts)
    with mode:
        for layer, at in ((0, x), (1, y), (1, x), (2, twin), (0, twin), (0, twin)):
            assert_near(parts[layer](at), exact(parts[layer], at))
    # x; y; x anew, since y came between; the twin; a second time the same part of it is computed anew too
    assert len(products) == 5


@torch.inference_mode()
def test_an_input_that_was_taken_whole_is_let_go_of() -> None:
    parts = linears()
    group = FusedLinears(parts)
    x = rows(1, 1)
    output = torch.arange(sum(SIZES), dtype=torch.float16)[None]
    assert group.put(x, output, 1)[0].tolist() == list(range(24, 32))
    assert group.pending(x, 1) is None  # taken
    assert group.pending(x.clone(), 0) is None
    taken = group.pending(x, 0)
    assert taken is not None and taken[0].tolist() == list(range(24))
    assert group._input is x
    assert group.pending(x, 2) is not None
    assert group._input is None and group._output is None


@torch.inference_mode()
def test_one_row_of_the_draft_goes_through_the_faster_kernel(products: list[tuple[str, int, int]]) -> None:
    parts, mode = linears(), KernelMode()
    mode.fuse(parts[:2])
    mode.one_row = True
    with mode:
        for part in parts:
            assert_near(part(rows(1, 5)), exact(part, rows(1, 5)))
            assert_near(part(rows(2, 5)), exact(part, rows(2, 5)))
        mode.one_row = False
        assert_near(parts[2](rows(1, 5)), exact(parts[2], rows(1, 5)))
    assert {(name, count) for name, count, _ in products} == {("gemv", 1), ("linear", 2), ("linear", 1)}


def test_joined_weights_are_views_of_one_tensor_with_the_same_numbers() -> None:
    parts = linears(bias=False)
    before = [part.weight.detach().clone() for part in parts]
    joined = join_rows([part.weight for part in parts])
    assert joined.shape == (sum(SIZES), 32)
    storage = joined.untyped_storage().data_ptr()
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part.weight, old) and part.weight.untyped_storage().data_ptr() == storage
    joined[SIZES[0]] = 7.0
    assert (parts[1].weight[0] == 7.0).all() and torch.equal(parts[0].weight, before[0])


def test_a_product_that_the_kernels_do_not_know_is_remembered() -> None:
    mode, (layer, *_) = KernelMode(), linears()
    with mode:
        layer(rows(2, 1))
        assert not mode.others
        nn.functional.linear(rows(2, 1).float(), layer.weight.float())
    assert mode.others, "its rows may depend on each other"
