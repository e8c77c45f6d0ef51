"""Whole passes beside a CPU that computes a part of what is missing, in Triton's interpreter: experts that
the two shared are whole in their slots when the pass has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine.test_rehearsal import PLAIN, prepared_for_kernels

pytest.importorskip("triton")

from localmoe.engine.lanes import lane_block
from localmoe.engine.loading import EngineParts, assemble
from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.lane_block import LaneRates
from localmoe.kernels.activations import detect_activation
from localmoe.kernels.residency import MISS, MISS_KEPT
from localmoe.kernels.rests import COPIED, PLANNED
from localmoe.model.device_lane import DeviceLane
from localmoe.model.device_rests import RestCopies
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.expert_module import expert_biases

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
TOKENS, LAYERS = [5, 17, 5], 2
RATES = LaneRates(0.0, 1.0, 0.5, 0.7)  # of one or two that are missing one is shared


@contextmanager
def with_lane(parts: EngineParts, tokens: int = 72) -> Iterator[DeviceLane]:
    """A CPU lane for the passes, as a load on a GPU makes it."""
    runner, store = parts.runner, parts.store
    assert isinstance(runner, DeviceRunner)
    skeleton, device = parts.prepared.skeleton, torch.device("cpu")
    activation = detect_activation(skeleton.experts[0].module)
    assert activation is not None
    biases = [expert_biases(experts.module) for experts in skeleton.experts]
    threads = CpuLane(
        store, activation, biases, tokens=tokens, top_k=skeleton.experts_per_token, threads=2, pinned=False
    )
    lane = DeviceLane(threads, lane_block(threads.mailbox, skeleton, store, device), RATES, link=True)
    runner.passes.lane, runner.passes.rests = lane, RestCopies(device)
    try:
        yield lane
    finally:
        runner.passes.lane = runner.passes.rests = None
        lane.close()


@pytest.mark.slow
@pytest.mark.interpreted
def test_what_both_had_a_part_in_is_whole_when_the_pass_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.choice.prepare(torch.zeros(1, 1000)))
    prepared = prepared_for_kernels(tmp_path, "mixtral", num_hidden_layers=LAYERS, vocab_size=256)
    parts = assemble(prepared, PLAIN, progress=None, cancel=None)
    runner = parts.runner
    try:
        assert isinstance(runner, DeviceRunner)
        memory, seen = runner.passes.memory, set()
        wanted = [runner.run([token], "verify", last_only=True).clone() for token in TOKENS]
        memory.forget()
        runner.sequence.truncate(0)
        with with_lane(parts) as lane:
            rests = [lane.block.view(layer).rest for layer in range(LAYERS)]
            for token, logits in zip(TOKENS, wanted, strict=True):
                found = runner.run([token], "verify", last_only=True)
                assert (found - logits).norm() < 2e-2 * logits.norm()
                seen |= {int(kind) & 0xFF for kind in memory.block.log.flatten()}
                for rest in rests:
                    assert rest is not None and int(rest.words[COPIED]) == int(rest.words[PLANNED])
                for key in memory.resident_keys():
                    record = memory.store.record(key)
                    slot = memory.slots._arena[int(memory._slot_of[key]), : record.numel()]
                    assert torch.equal(slot, record), key
            assert MISS_KEPT in seen and MISS not in seen, "each that was shared got a slot"
            assert lane.counters().jobs > LAYERS and int(rests[0].words[COPIED]) > 0  # type: ignore[union-attr]
            assert not lane.failure
    finally:
        parts.close()
