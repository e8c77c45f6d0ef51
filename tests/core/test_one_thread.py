"""PyTorch's threads are as many afterwards as before, however often it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from localmoe.core.one_thread import one_pytorch_thread


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_inside_and_as_many_as_before_afterwards() -> None:
    with one_pytorch_thread():
        assert torch.get_num_threads() == 1
        with one_pytorch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), one_pytorch_thread():
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_thread_that_begins_meanwhile_gets_as_many_as_there_were() -> None:
    counts: list[int] = []

    def other() -> None:
        with one_pytorch_thread():
            counts.append(torch.get_num_threads())
        counts.append(torch.get_num_threads())

    with one_pytorch_thread():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 1 and counts == [1, 3]
    assert torch.get_num_threads() == 3
    with one_pytorch_thread():
        pass
    assert torch.get_num_threads() == 3
