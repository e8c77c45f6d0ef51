"""The CPU lane as passes use it: when they take it, how its share is corrected, and what follows a
failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from experts.device_rig import DeviceRig
from experts.test_cpu_lane import Rig as LaneRig
from model.device_table import CPU, EXPERTS, LAYERS, NO_END, PROMPT, Rig
from speculative.table_model import Table

from localmoe.core.errors import HardwareError
from localmoe.core.types import ExpertKey
from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.lane_balance import LanePass
from localmoe.experts.lane_block import LaneBlock, LaneRates, LaneReport
from localmoe.experts.lane_trial import LaneTrial
from localmoe.experts.late_answers import why_late
from localmoe.experts.slot_worth import SlotWorth
from localmoe.kernels.lanes import REST_US
from localmoe.kernels.mailbox import EXPERT
from localmoe.model.device_lane import DeviceLane
from localmoe.model.device_steps import RUN_BEHIND_AFTER
from localmoe.model.step_graphs import PassOutput
from localmoe.model.window_report import WindowReport
from localmoe.speculative.prompt_lookup import PromptLookupDrafter

RATES = LaneRates(30.0, 150.0, 10.0, 350.0)


@pytest.fixture
def lane() -> Iterator[DeviceLane]:
    made = LaneRig(48, 40)
    yield DeviceLane(made.lane, LaneBlock(made.lane.mailbox, [40, 40], [16, 16], 4, CPU), RATES, link=True)
    made.lane.close()


def test_passes_of_one_token_may_do_without_it_and_others_do_not(lane: DeviceLane) -> None:
    rig, lane.trial = DeviceRig(3), LaneTrial()
    lane.trial.out = True
    lane.prepare_pass(rig.memory)
    lane.open_pass(rig.memory, single=True)
    assert not lane.on and not lane.open_passes
    for kind in (LanePass.WINDOW, LanePass.PROMPT):
        lane.prepare_pass(rig.memory)
        lane.open_pass(rig.memory, kind)
        assert lane.on
    assert lane.open_passes == 2


def test_the_trial_hears_how_long_passes_took_while_the_lane_may_be_on(lane: DeviceLane) -> None:
    lane.trial = LaneTrial()
    for lane.allowed in (True, False):
        for _ in range(64):
            lane.note_pass(0.004, 0.001, 20)
        assert lane.trial.trying, "the last ones were of an answer without it"
    lane.begin_answer(allowed=True)
    assert lane.allowed and not lane.trial.trying, "what comes is of another text"


def test_a_pass_takes_the_lane_only_where_an_expert_may_be_missing(lane: DeviceLane) -> None:
    rig = DeviceRig(12)
    lane.open_pass(rig.memory)
    assert lane.on
    for key in rig.keys:
        rig.memory.prefetch(key, 0.0)
    rig.memory.pump()
    lane.open_pass(rig.memory)
    assert not lane.on
    rig = DeviceRig(3)
    lane.allowed = False
    lane.open_pass(rig.memory)
    assert not lane.on


def test_what_was_not_answered_is_said_by_what_it_waited_for() -> None:
    made = LaneRig(48, 40)
    box, addresses = made.lane.mailbox, np.ones((2, 4), dtype=np.int64)
    made.lane.close()
    box.head[:], box.entries[EXPERT, :3], box.answered[0] = (1, 3, 1), (0, 2, 3), 6
    box.posted[0] = 6
    assert why_late(box, 7, addresses) == "the GPU's job did not arrive"
    box.posted[0] = 7
    assert why_late(box, 7, addresses) == why_late(box, 7, None) == "the CPU did not answer in time"
    addresses[1, [1, 2, 3]] = addresses[0] = 0
    assert why_late(box, 7, addresses) == "the disk did not bring 2 of 3 experts of layer 1 in time"
    box.answered[0] = 7  # while nobody waits any more
    assert why_late(box, 7, addresses) == "the CPU did not answer in time"


def test_what_is_needed_and_answered_late_is_asked_for_again_but_not_for_ever(
    lane: DeviceLane, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, box, words = DeviceRig(3), lane.lane.mailbox, lane.block.words
    lane.needed = True
    lane.lane.close()
    monkeypatch.setattr(CpuLane, "healthy", True)

    def fail(posted: int) -> None:
        words[:3] = torch.tensor([posted, 1, 2])
        box.posted[0], box.answered[0] = posted, posted - 1

    def answer() -> None:
        box.answered[0] = box.posted[0]

    lane.open_pass(rig.memory)
    lane.open_pass(rig.memory)  # behind it
    fail(7)
    later = threading.Timer(0.1, answer)
    later.start()
    assert not lane.close_pass(LaneReport(7, 2, True))
    later.join()
    assert words[:3].tolist() == [7, 0, 2] and not lane.failure and "again" in caplog.text
    words[0] = 8  # what comes behind
    assert not lane.close_pass(LaneReport(7, 2, True)), "it ran behind the one that failed"
    assert words[0] == 8
    lane.open_pass(rig.memory)
    fail(8)
    answer()
    lane.abandon_pass()  # an answer that was stopped just then
    assert words[:3].tolist() == [8, 0, 2] and not lane.failure
    lane.open_pass(rig.memory)
    assert lane.close_pass(LaneReport(8, 2, False))
    for posted in (9, 11):
        lane.open_pass(rig.memory)
        fail(posted)
        answer()
        assert not lane.close_pass(LaneReport(posted, 3, True)) and words[:3].tolist() == [posted, 0, 3]
    lane.open_pass(rig.memory)
    assert lane.close_pass(LaneReport(12, 4, False)) and lane.waited == 4  # all is well again
    for posted in (20, 21, 22):
        lane.open_pass(rig.memory)
        fail(posted)
        answer()
        assert not lane.close_pass(LaneReport(posted, 1, True))
    lane.open_pass(rig.memory)
    fail(23)
    with pytest.raises(HardwareError, match="load the model again"):
        lane.close_pass(LaneReport(23, 1, True))


@pytest.mark.parametrize("healthy", [True, False])
def test_what_is_needed_and_never_answered_ends_the_lane(
    healthy: bool, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane.needed = True
    lane.lane.close()
    monkeypatch.setattr(CpuLane, "healthy", True)
    lane.open_pass(DeviceRig(3).memory)
    monkeypatch.setattr(CpuLane, "healthy", healthy)
    monkeypatch.setattr(CpuLane, "longest_job_s", 0.05 if healthy else 60.0)
    lane.lane.mailbox.posted[0], lane.lane.mailbox.answered[0] = 3, 2
    with pytest.raises(HardwareError, match=r"did not answer in time.*load the model again"):
        lane.close_pass(LaneReport(3, 1, True))


def test_the_host_waits_for_an_answer_while_there_may_be_one(
    lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = lane.lane.mailbox
    lane.brief = lane.on = True
    lane.wait_on_host()  # nothing was asked for
    lane.lane.close()
    box.answered[0], box.posted[0] = 4, 5
    lane.wait_on_host()  # nobody is there
    healthy = [True]
    monkeypatch.setattr(CpuLane, "healthy", property(lambda self: healthy[0]))
    for ends in (lambda: box.answered.__setitem__(0, 5), lambda: healthy.__setitem__(0, False)):
        box.answered[0], healthy[0] = 4, True
        waiting = threading.Thread(target=lane.wait_on_host)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        ends()
        waiting.join(30)
        assert not waiting.is_alive()
    box.answered[0], healthy[0] = 4, True
    monkeypatch.setattr(CpuLane, "longest_job_s", 0.05)
    lane.wait_on_host()
    monkeypatch.setattr(CpuLane, "longest_job_s", 60.0)
    lane.brief = False  # a kernel may wait
    lane.wait_on_host()


def test_rates_and_copies_under_way_reach_the_device(lane: DeviceLane) -> None:
    rig = DeviceRig(3)
    for expert in range(3):
        rig.memory.prefetch(ExpertKey(0, expert), 0.0)
    rig.memory.pump()
    lane.open_pass(rig.memory)
    view = lane.block.view(1)
    assert view.issued.tolist() == [3] and view.rates.tolist()[:4] == [30.0, 150.0, 10.0, 350.0]


def test_what_was_prepared_for_a_pass_is_uploaded_once_unless_a_copy_was_issued_since(
    lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[int] = []
    upload = lane.block.upload

    def counted(issued: int, rates: LaneRates) -> None:
        uploads.append(issued)
        upload(issued, rates)

    monkeypatch.setattr(lane.block, "upload", counted)
    rig = DeviceRig(3)
    lane.prepare_pass(rig.memory)
    assert uploads == [0] and lane.on and not lane.open_passes
    lane.open_pass(rig.memory)
    assert uploads == [0] and lane.open_passes == 1
    lane.open_pass(rig.memory)
    assert uploads == [0, 0]  # another one, for which nothing was prepared
    lane.prepare_pass(rig.memory)
    rig.memory.prefetch(ExpertKey(0, 0), 0.0)
    rig.memory.pump()
    lane.open_pass(rig.memory)
    assert uploads == [0, 0, 0, 1]
    lane.abandon_pass()
    lane.prepare_pass(rig.memory)
    lane.abandon_pass()  # it did not come
    lane.open_pass(rig.memory)
    assert uploads == [0, 0, 0, 1, 1, 1]
    lane.allowed = False
    lane.prepare_pass(rig.memory)
    assert len(uploads) == 6 and not lane.on


def test_a_rest_may_take_the_time_that_the_link_is_idle_and_what_a_change_of_slots_saves(
    lane: DeviceLane,
) -> None:
    worth = SlotWorth()
    assert lane.rest_us(worth) == worth.gain * RATES.link_us
    lane.note_pass(0.006, 0.002, 20)
    worth.gain = 0.2
    assert lane.rest_us(worth) == pytest.approx(200.0 + 0.2 * RATES.link_us)
    for worth.gain in (0.1, -3.0):
        assert lane.rest_us(worth) == 0.0  # which may be chance
    for _ in range(200):
        lane.note_pass(0.002, 0.0, 20)
    rig = DeviceRig(3)
    rig.memory.worth.gain = worth.gain = 0.5
    lane.open_pass(rig.memory)
    on_device = float(lane.block.view(0).rates[REST_US])
    assert on_device == pytest.approx(100.0 + 0.5 * RATES.link_us, rel=0.01)
    rig.memory.copies_beside = False
    lane.open_pass(rig.memory)
    assert float(lane.block.view(0).rates[REST_US]) == 0.0
    lane.link = False
    assert lane.rest_us(worth) == 0.0


def test_the_share_grows_while_the_cpu_is_never_waited_for_and_shrinks_while_it_always_is(
    lane: DeviceLane,
) -> None:
    posted = waited = 0
    for late, direction in ((0, -1), (24, 1)):
        for _ in range(60):
            before = lane.rates
            posted, waited = posted + 24, waited + late
            assert lane.close_pass(LaneReport(posted, waited, False))
            step = lane.rates.first_us - before.first_us
            assert step * direction >= 0 and lane.rates.link_us == RATES.link_us
        assert 1 / 3.01 < lane.rates.first_us / RATES.first_us < 3.01
        assert (lane.rates.first_us > RATES.first_us) == (direction > 0)
    rates = lane.rates
    assert (
        lane.close_pass(LaneReport(posted, waited, False)) and lane.rates == rates
    )  # no job, nothing learnt
    assert lane.close_pass(LaneReport(posted + 2, waited + 1, False)) and lane.rates == rates  # balanced


def test_without_the_link_the_cpu_takes_all(lane: DeviceLane) -> None:
    alone = DeviceLane(lane.lane, lane.block, RATES, link=False)
    assert (alone.rates.handover_us, alone.rates.first_us, alone.rates.further_us) == (0.0, 0.0, 0.0)


def test_a_lane_that_failed_is_not_taken_again(lane: DeviceLane) -> None:
    rig = DeviceRig(3)
    lane.open_pass(rig.memory)
    lane.lane.mailbox.posted[0] = 3
    assert not lane.close_pass(LaneReport(3, 1, True))
    assert "did not answer" in lane.failure
    lane.open_pass(rig.memory)
    assert not lane.on


def test_threads_that_ended_are_noticed_before_a_pass(lane: DeviceLane) -> None:
    lane.lane.close()
    lane.open_pass(DeviceRig(3).memory)
    assert not lane.on and "given up" in lane.failure


@pytest.mark.interpreted
@pytest.mark.parametrize(("length", "looks_up"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("fails_at", [1, pytest.param(4, marks=pytest.mark.slow), 9])
def test_a_failed_pass_is_run_again_without_the_lane(
    lane: DeviceLane, length: int, looks_up: bool, fails_at: int
) -> None:
    def answer(rig: Rig) -> list[int]:
        lookup = PromptLookupDrafter(NO_END) if looks_up else None
        return [token for step in rig.loop(length, lookup=lookup).run(PROMPT, 30) for token in step.tokens]

    table = Table(agreement=0.8, seed=3)
    plain = Rig(table, 5)
    wanted = answer(plain)
    assert wanted == table.greedy(PROMPT, 30)
    rig = Rig(table, 5)
    rig.state.lane = lane
    passes = rig.passes
    read, issue, windows, with_lane = passes.read_window, passes.window, [0], []

    def issued(count: int, start: int) -> PassOutput:
        with_lane.append(lane.on)
        return issue(count, start)

    def reported(report: object, count: int, rows: int) -> WindowReport:
        found = read(report, count, rows)  # type: ignore[arg-type]
        if not with_lane.pop(0):
            return found
        windows[0] += 1
        failed = windows[0] == fails_at
        if failed:  # whatever it computed is wrong
            found.choices[:] = [0] * len(found.choices)
        return replace(found, lane=LaneReport(windows[0], 0, failed))

    passes.read_window, passes.window = reported, issued  # type: ignore[method-assign]
    given = answer(rig)
    # once more, and so is a pass that was issued behind it
    behind = windows[0] - fails_at
    plain_steps = length == 0 or looks_up  # those that nothing was found for
    assert behind == 0 or (behind == 1 and plain_steps and fails_at > RUN_BEHIND_AFTER)
    assert given == wanted and lane.failure and (behind == 1 or length or fails_at <= RUN_BEHIND_AFTER)
    more = passes.issued.count("window") - plain.passes.issued.count("window")
    # what is found while a pass runs waits for it, unless that is run again
    assert more == 1 + behind or (looks_up and behind and more == 1)
    assert lane.open_passes == 0
    assert rig.tokens() == plain.tokens()
    rig.experts.check()


def test_an_interrupted_pass_lets_the_lane_go_on(lane: DeviceLane) -> None:
    lane.open_pass(DeviceRig(3).memory)
    lane.block.words[:] = torch.tensor([7, 0, 2, 0, -1])
    lane.abandon_pass()
    assert lane.waited == 2 and not lane.failure
    lane.block.words[1] = 1
    lane.abandon_pass()
    assert not lane.failure  # no pass is open
    lane.open_pass(DeviceRig(3).memory)
    lane.abandon_pass()
    assert lane.failure
    assert (LAYERS, EXPERTS) == (2, 6)  # what the rigs above are made for


def test_passes_of_each_kind_have_rates_and_a_correction_of_their_own(lane: DeviceLane) -> None:
    unit = LaneRates(30.0, 80.0, 1.0, 350.0)
    both = {LanePass.PROMPT: RATES, LanePass.UNIT: unit}
    made = DeviceLane(lane.lane, lane.block, RATES, link=True, of_prompts=both)
    rig, used = DeviceRig(3), []
    made.lane.use_matrix_unit = used.append  # type: ignore[method-assign]
    assert made.prompt_kinds == (LanePass.PROMPT, LanePass.UNIT) and lane.prompt_kinds == (LanePass.PROMPT,)
    for number, (kind, rates) in enumerate(((LanePass.UNIT, unit), (LanePass.WINDOW, RATES)), 1):
        made.open_pass(rig.memory, kind)
        assert made.rates.first_us == rates.first_us and made.rates.further_us == rates.further_us
        made.close_pass(LaneReport(4 * number, 4 * number, False))  # the GPU waited for every job
    assert used == [True, False]
    made.open_pass(rig.memory, LanePass.UNIT)
    assert made.rates.first_us > unit.first_us
    made.open_pass(rig.memory, LanePass.PROMPT)
    assert made.rates.first_us == RATES.first_us
