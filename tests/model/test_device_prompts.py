"""A long prompt's pass: what it is lent, that it lets go of it whatever happens, and how long it may be."""

from __future__ import annotations

import pytest
import torch
from experts.device_rig import DeviceRig
from torch import Tensor

pytest.importorskip("triton")

from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.types import ExpertKey
from localmoe.hardware import prefill_chunk
from localmoe.kernels.rows import RowPadding
from localmoe.model import device_prompts
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_experts import DevicePassState
from localmoe.model.device_prompts import DevicePrompts
from localmoe.model.device_window import DeviceWindow
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policy import CacheShape
from localmoe.prefetch.scheduler import Scheduler

LAYERS, EXPERTS, TOP_K, SLOTS = 3, 8, 2, 16
CPU = torch.device("cpu")


class Prompts:
    """Of a model that routes token t to experts t and t + 1 in every layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
        monkeypatch.setattr(device_prompts, "DEVICE_PREFILL_CHUNK", 8)
        self.rig = DeviceRig(SLOTS, layers=LAYERS, experts=EXPERTS)
        scheduler = Scheduler(MoeSpeqPolicy(CacheShape(LAYERS, EXPERTS, TOP_K, SLOTS)))
        window = DeviceWindow(16, CPU)
        self.state = DevicePassState(
            self.rig.memory, scheduler, LookaheadBuffer(LAYERS), RowPadding(1, 16), window,
            row_bytes=self.rig.slots.slot_bytes // 8, prompt_rows=most_rows,
        )  # fmt: skip
        self.lent: list[int] = []
        self.fails_in: int | None = None
        cache = DeviceKVCache(1, 512, window)
        self.prompts = DevicePrompts(self.state, cache, self.forward)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        stream = self.state.stream
        assert stream is not None and self.state.phase == "prefill"
        self.lent.append(0 if stream.lent is None else len(stream.lent))
        for layer in range(LAYERS):
            for group in stream.bring(layer, stream.plan(layer)):
                for expert, address in zip(group.experts, group.addresses, strict=True):
                    assert self.rig.is_right(ExpertKey(layer, expert), address)
                if stream.lent is not None:
                    stream.lent.fill_(255)
            if layer == self.fails_in:
                raise KeyboardInterrupt
            index = torch.stack((tokens, tokens + 1), 1) % EXPERTS
            self.state.routed[layer] = (index, torch.ones(index.shape))
        return positions[None, -1:].float()

    def has_all_slots(self) -> bool:
        self.rig.check()
        return sorted(self.rig.memory.reserve(SLOTS)) == list(range(SLOTS))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Prompts:
    return Prompts(monkeypatch, most_rows=24)


def test_only_a_pass_that_is_longer_than_usual_is_lent_slots(made: Prompts) -> None:
    row = made.state.row_bytes
    for count, least in ((5, 0), (8, 0), (9, 9 * row), (20, 20 * row)):
        logits, experts = made.prompts.stream(list(range(count)), 40)
        assert float(logits) == 39 + count and experts.shape == (LAYERS, count, TOP_K)
        assert experts[1, :, 1].tolist() == [(token + 1) % EXPERTS for token in range(count)]
        assert least <= made.lent[-1] <= least + 2 * made.rig.slots.slot_bytes * (least > 0)
        assert not made.state.routed, "what thousands of tokens were routed to stays in memory"
        assert made.state.stream is None
        made.rig.check()
    assert made.has_all_slots()


@pytest.mark.parametrize("count", [6, 20])
@pytest.mark.parametrize("fails_in", [0, LAYERS - 1])
def test_a_pass_that_fails_gives_back_its_slots_once_it_is_read_no_more(
    made: Prompts, count: int, fails_in: int
) -> None:
    waited = []
    made.rig.transfers.wait_for_compute = lambda: waited.append(True)  # type: ignore[method-assign]
    made.fails_in = fails_in
    with pytest.raises(KeyboardInterrupt):
        made.prompts.stream(list(range(count)), 0)
    assert waited and made.state.stream is None and made.has_all_slots()


def test_a_pass_that_cannot_begin_gives_back_its_slots(made: Prompts) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        made.prompts.stream([2**70] * 20, 0)  # no token has such a number
    assert made.state.stream is None and made.has_all_slots()


def test_a_pass_is_the_shorter_the_fewer_slots_it_can_be_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_chunk, "DEVICE_PREFILL_CHUNK", 8)
    for most_rows, longest in ((8, 8), (24, 24), (64, 32)):  # eight rows a slot, of a quarter of 16
        assert Prompts(monkeypatch, most_rows).prompts.chunk == longest
    made = Prompts(monkeypatch, 64)
    made.state.row_bytes *= 8
    assert made.prompts.chunk == 8
