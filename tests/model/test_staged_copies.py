"""Copies between a GPU and RAM: all bytes, whatever the pieces are."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from localmoe.model import staged_copies
from localmoe.model.sequence_copy import from_host, to_host

KINDS = (torch.bfloat16, torch.float32, torch.int64, torch.uint8)


def random_tensors(seed: int, device: str) -> list[Tensor]:
    """From nothing to several times what is copied at once."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 7, 100, chance.randrange(1 << 16)]) for _ in range(chance.randrange(1, 30))]
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 120, (size,), generator=generator).to(chance.choice(KINDS)).to(device)
        for size in sizes
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(12))
def test_every_byte_is_there_both_ways(device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        staged_copies, "_PINNED_BYTES", random.Random(seed).choice([64, 1000, 1 << 14, 1 << 24])
    )
    tensors = random_tensors(seed, device)
    kept = to_host(tensors)
    assert all(part.device.type == "cpu" and not part.is_pinned() for part in kept)
    assert all(torch.equal(part, tensor.cpu()) for part, tensor in zip(kept, tensors, strict=True))
    back = [torch.zeros_like(tensor) for tensor in tensors]
    from_host(kept, back)
    assert all(torch.equal(part, tensor) for part, tensor in zip(back, tensors, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_keys_are_copied_as_far_as_they_are_wanted(device: str) -> None:
    keys = [torch.randn(1, heads, 96, dim, device=device) for heads, dim in ((1, 8), (4, 16))]
    kept = to_host(keys, 70)
    assert all(torch.equal(part, key[:, :, :70].cpu()) for part, key in zip(kept, keys, strict=True))
    back = [torch.zeros_like(key) for key in keys]
    from_host(kept, back, cut=True)
    for part, key in zip(back, keys, strict=True):
        assert torch.equal(part[:, :, :70], key[:, :, :70]) and not part[:, :, 70:].any()


def test_where_nothing_more_can_be_pinned_other_memory_is_taken_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def make(*size: int, pin_memory: bool = False, **options: torch.dtype) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", make)
    found = staged_copies._pinned(100)
    assert found.nbytes == 100 and not found.is_pinned()
    assert "100 bytes that stay unpinned: CUDA error: out of memory" in caplog.text
