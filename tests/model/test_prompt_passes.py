"""Of which kind a prompt's passes are that ask for their experts: each is tried, then the fastest one is
taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from localmoe.experts.lane_balance import LanePass
from localmoe.model import device_prompt_passes
from localmoe.model.device_prompt_passes import PromptPasses

MISSING, STREAM_S = 4000, 0.5
BOTH = (LanePass.PROMPT, LanePass.UNIT)


class Runner:
    """Runs nothing: its clock says what passes take."""

    def __init__(self, kinds: tuple[LanePass, ...], took: dict[str, float]) -> None:
        self.capture_s, self.now, self.took = 0.0, 0.0, took
        self.done: list[str] = []
        self.lane = SimpleNamespace(
            rows=1024, link=True, needed=False, brief=False, may_be_on=True, on=True, prompt_kinds=kinds
        )
        self.lane.settle = lambda memory: None
        self.opened = 0
        store = SimpleNamespace(num_experts=128)
        memory = SimpleNamespace(store=store, copy_s=took["stream"] / MISSING, missing=MISSING)
        self.passes = SimpleNamespace(lane=self.lane, memory=memory, experts_per_token=8)
        self.sequence = SimpleNamespace(copy_states=lambda: None)
        self.issue: Any = SimpleNamespace(prefill_chunk=8192, ask=self.ask, stream=self.stream)

    def _run(self, name: str) -> None:
        self.now += self.took[name]
        self.done.append(name)

    def open_pass(self, *, kind: LanePass) -> None:
        self.kind = kind
        self.opened += 1

    def ask(self, tokens: list[int], start: int) -> tuple[torch.Tensor, None]:
        self._run(self.kind.name if self.lane.may_be_on else "alone")
        return torch.zeros(1), None

    def stream(self, tokens: list[int], start: int) -> tuple[torch.Tensor, None]:
        self._run("stream")
        return torch.zeros(1), None

    def window(self, tokens: list[int], start: int, phase: str) -> torch.Tensor:
        self._run("window")
        return torch.zeros(1)

    def failed(self, report: None) -> bool:
        return False

    def take_over(self, report: None, phase: str) -> None:
        pass

    def take_over_stream(self, experts: None) -> None:
        pass


def run(monkeypatch: pytest.MonkeyPatch, runner: Runner, lengths: list[int]) -> list[str]:
    passes = PromptPasses(runner)  # type: ignore[arg-type]
    monkeypatch.setattr(device_prompt_passes, "time", SimpleNamespace(perf_counter=lambda: runner.now))
    for length in lengths:
        passes.run([1] * length, 0)
    return runner.done


def test_where_no_kernel_is_to_wait_long_short_prompts_are_no_windows_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took = {"PROMPT": 0.2, "stream": STREAM_S, "window": 0.1}
    runner = Runner((LanePass.PROMPT,), took)
    assert run(monkeypatch, runner, [8, 9, 72, 73]) == ["window", "window", "window", "PROMPT"]
    runner = Runner((LanePass.PROMPT,), took)
    runner.lane.brief = runner.lane.needed = True
    assert run(monkeypatch, runner, [8, 9, 72, 73]) == ["window", "PROMPT", "PROMPT", "PROMPT"]


@pytest.mark.parametrize(("slower", "faster"), [BOTH, BOTH[::-1]])
def test_both_kinds_are_tried_and_the_faster_one_is_kept(
    slower: LanePass, faster: LanePass, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = {"window": 0.1, "stream": STREAM_S, slower.name: 0.3, faster.name: 0.2}
    done = run(monkeypatch, Runner(BOTH, took), [60, *[256] * 6])
    assert done[0] == "window" and set(done[1:3]) == {"PROMPT", "UNIT"}
    assert done[3:] == [faster.name] * 4


def test_a_kind_that_takes_long_for_many_tokens_is_left_for_the_other_there() -> None:
    took = {"window": 0.05, "stream": STREAM_S, "PROMPT": 0.1, "UNIT": 0.15}
    runner = Runner(BOTH, took)
    with pytest.MonkeyPatch.context() as patch:
        passes = PromptPasses(runner)  # type: ignore[arg-type]
        patch.setattr(device_prompt_passes, "time", SimpleNamespace(perf_counter=lambda: runner.now))
        for length in (60, 200, 200, 200):
            passes.run([1] * length, 0)
        assert runner.done[3] == "PROMPT"
        took |= {"PROMPT": 0.4, "UNIT": 0.2}
        for _ in range(4):
            passes.run([1] * 900, 0)
        assert runner.done[4:6] == ["PROMPT", "UNIT"] and runner.done[6:] == ["UNIT"] * 2
        passes.run([1] * 200, 0)
        assert runner.done[-1] == "PROMPT", "what is known of shorter ones stays"


def test_where_every_kind_takes_longer_experts_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"window": 0.1, "stream": 0.1, "PROMPT": 0.3, "UNIT": 0.2}
    done = run(monkeypatch, Runner(BOTH, took), [900, 900, 900, 900, 900])
    assert done == ["PROMPT", "UNIT", "stream", "stream", "stream"]


def test_without_the_cpu_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(BOTH, {"window": 0.05, "stream": STREAM_S, "alone": 0.1})
    runner.lane.may_be_on = False
    assert run(monkeypatch, runner, [900, 60, 200, 200]) == ["stream", "window", "alone", "alone"]


def test_where_the_host_has_no_room_for_a_state_experts_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_states() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    runner = Runner(BOTH, {"window": 0.05, "stream": STREAM_S, "PROMPT": 0.1, "UNIT": 0.1})
    monkeypatch.setattr(runner.sequence, "copy_states", copy_states)
    passes = PromptPasses(runner)  # type: ignore[arg-type]
    passes.run([1] * 60, 0)
    passes.run([1] * 200, 60)
    assert runner.done == ["window", "stream"] and not runner.opened, "none is left open"
    passes.run([1] * 200, 0)  # from the beginning on there is no state to go back to
    assert runner.done[-1] in ("PROMPT", "UNIT")
    monkeypatch.setattr(runner.sequence, "copy_states", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        passes.run([1] * 200, 60)
