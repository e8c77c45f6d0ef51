"""How many random examples a plain run tries: see support.fewer_examples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fewer_examples import FEW, half_of, try_half


class Tried:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    @settings(max_examples=40)
    @given(st.integers())
    def in_a_class(self, number: int) -> None:
        self.numbers.append(number)


def test_half_of_what_a_test_asks_for_is_tried() -> None:
    alone: list[int] = []

    @settings(max_examples=30)
    @given(st.integers())
    def example(number: int) -> None:
        alone.append(number)

    tried = Tried()
    items: list[Any] = [SimpleNamespace(obj=one) for one in (example, tried.in_a_class, len)]
    try_half([*items, items[0], SimpleNamespace()])  # type: ignore[list-item]
    example()
    tried.in_a_class()
    assert len(alone) == 15 and len(tried.numbers) == 20


@pytest.mark.parametrize(("asked", "tried"), [(1, 1), (FEW, FEW), (FEW + 1, FEW), (60, 30), (601, 300)])
def test_few_are_tried_all(asked: int, tried: int) -> None:
    assert half_of(asked) == tried
