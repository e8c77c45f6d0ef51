"""Passes on a device that a table plays, and all that a runner needs around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton")

from experts.device_rig import DeviceRig
from speculative.table_model import Table

from localmoe.core.config import SamplingConfig
from localmoe.core.events import (
    DraftFinished,
    Event,
    PrefetchRequest,
    Rates,
    RatesMeasured,
    StepStarted,
)
from localmoe.core.gates import Gate
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.types import ExpertKey, Phase
from localmoe.experts.prefill_stream import PrefillStream
from localmoe.kernels.choices import NEVER, reference_choices
from localmoe.kernels.rows import RowPadding
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_choice import DeviceChoice
from localmoe.model.device_experts import DevicePassState
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.device_steps import DeviceSteps
from localmoe.model.device_window import DeviceWindow
from localmoe.model.prompt_ways import WINDOW
from localmoe.model.step_graphs import PassOutput
from localmoe.model.window_report import DraftReport, WindowReport
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import CacheShape, Policy
from localmoe.prefetch.scheduler import Scheduler
from localmoe.speculative.drafters import SelfDrafter
from localmoe.speculative.found_instead import FoundInstead
from localmoe.speculative.governor import FixedGovernor, Governor
from localmoe.speculative.grammar_stepper import GrammarStepper
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.prompt_lookup import PromptLookupDrafter
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import DeviceStepper, PassStepper, Stepper

CPU = torch.device("cpu")
LAYERS, EXPERTS, TOP_K, ROWS = 2, 6, 2, 16
PROMPT = [1, 2, 0]
NO_END: frozenset[int] = frozenset()
GREEDY = SamplingConfig()


class HastyPolicy(OnDemandPolicy):
    """Wants everything before every step."""

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        super().observe(event)
        if not isinstance(event, StepStarted):
            return ()
        keys = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
        return [PrefetchRequest(key, float(event.step + i)) for i, key in enumerate(keys)]


class CpuHelps(MoeSpeqPolicy):
    """moe-speq beside a CPU that computes what passes miss."""

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        self._rates = Rates(cpu_helps=True)

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        found = () if isinstance(event, RatesMeasured) else super().observe(event)
        assert not (found and isinstance(event, DraftFinished))
        return found


def routed(token: int, position: int) -> NDArray[np.int32]:
    """(L, K) experts of a token at a position, in draft and target alike."""
    chance = np.random.default_rng((token, position))
    return chance.random((LAYERS, EXPERTS)).argsort(axis=1)[:, :TOP_K].astype(np.int32)


class TablePasses:
    """Passes as the device runs them: by the numbers in the window, over tokens kept by position."""

    on_gpu = False
    capture_s = 0.0

    def __init__(self, table: Table, rig: DeviceRig, window: DeviceWindow) -> None:
        self.table, self.rig, self.window_numbers = table, rig, window
        self.held: dict[int, int] = {}  # position -> token: the cache
        self.ran_behind = 0  # passes, one of which no report was read yet
        self.last_start, self.went_behind = 0, False  # of windows; whether the text went back behind one
        self.by_draft: set[int] = set()  # positions whose entries are not the target's
        self.issued: list[str] = []
        self.phase = ""
        self.copies_before: list[int] = []  # each window that verifies
        self.break_at: int | None = None
        self.broken_late = False  # the pass itself ran, but nothing was read back
        self.choice = DeviceChoice(CPU)
        self.choice.prepare(torch.zeros(1, table.vocab))

    def force(self, phase: str, start: int, count: int) -> None:
        """Nothing is simulated; this is what comes next, but for drafts."""
        self.phase = phase

    def _issue(self, kind: str) -> None:
        self.issued.append(kind)
        if self.break_at == len(self.issued) and not self.broken_late:
            raise RuntimeError("the pass broke")

    def _issued(self) -> None:
        if self.break_at == len(self.issued):
            raise KeyboardInterrupt

    def _append(self, position: int, token: int) -> list[int]:
        self.held[position] = token
        return [self.held[at] for at in range(max(0, position - 1), position + 1)]

    def draft(self, length: int) -> PassOutput:
        self._issue("draft")
        window = self.window_numbers
        cursor, start = int(window.cursor), int(window.start)
        token = int(self.choice.readable(window.tokens[cursor]))
        at = torch.tensor([start + cursor])
        self.choice.note(at, torch.tensor([token]))
        logits = self.table.draft(self._append(start + cursor, token)).log()[None]
        self.by_draft.add(start + cursor)
        window.cursor += 1
        window.tokens[cursor + 1 : cursor + 2], margin = self._choose_surely(logits, at)
        weights = np.full(LAYERS * TOP_K, 0.5, dtype=np.float32).view(np.int32)
        experts = routed(token, start + cursor).ravel()
        numbers = np.concatenate([experts, weights, margin.numpy().view(np.int32)])
        return PassOutput(logits, torch.from_numpy(numbers))

    def _choose_surely(self, logits: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        if self.choice.kind != "argmax":
            return self.choice.choose_surely(logits, at)
        first, second = logits[0].topk(2).values  # Triton's interpreter takes milliseconds
        return logits.argmax(-1), (first - second).float()[None]

    def read_draft(self, report: NDArray[np.int32]) -> DraftReport:
        experts, weights = report[:-1].reshape(2, LAYERS, TOP_K)
        return DraftReport(experts, weights.view(np.float32), float(report[-1:].view(np.float32)[0]))

    def window(self, count: int, start: int) -> PassOutput:
        self._issue("window")
        if self.phase == "verify":
            self.copies_before.append(self.rig.transfers.issued)
        numbers = self.window_numbers
        assert (int(numbers.start), int(numbers.live)) == (start, count)
        self.last_start = start
        self.by_draft.difference_update(range(start, start + count))
        assert not self.by_draft.intersection(range(start)), "the target reads what the draft wrote"
        readable = self.choice.readable(numbers.tokens[:count])
        tokens = readable.tolist()
        rows = [self.table.target(self._append(start + i, token)).log() for i, token in enumerate(tokens)]
        experts = np.stack([routed(token, start + i) for i, token in enumerate(tokens)], axis=1)
        log, _ = self.rig.play(experts.tolist(), count)
        self._issued()
        self.choice.note(numbers.start, readable, numbers.live)
        choices = self.choice.choose(torch.stack(rows), start + torch.arange(count)).numpy()
        parts = [log.ravel(), experts.ravel(), choices, numbers.numbers(count).numpy()]
        return PassOutput(torch.stack(rows), torch.from_numpy(np.concatenate(parts).astype(np.int32)))

    def advance(self, output: PassOutput) -> None:
        self.ran_behind += 1
        count = len(output.logits)
        first = LAYERS * (EXPERTS + count * TOP_K)
        self.window_numbers.advance(output.report[first : first + 1])

    def go_on(self, output: PassOutput, following: int, accepted: int | None = None) -> None:
        count = len(output.logits)
        first = LAYERS * (EXPERTS + count * TOP_K)
        self.window_numbers.go_on(output.report[first : first + count], following, accepted)

    def read_window(self, report: NDArray[np.int32], count: int, rows: int) -> WindowReport:
        assert rows == count
        cells = LAYERS * EXPERTS
        log, experts, choices, window = np.split(report, np.cumsum([cells, LAYERS * count * TOP_K, count]))
        shaped, (start, live, _, _, *tokens) = experts.reshape(LAYERS, count, TOP_K), window.tolist()
        return WindowReport(log.reshape(LAYERS, EXPERTS), shaped, choices.tolist(), tokens, start, live)

    prefill_chunk = 1024

    def ask(self, tokens: Sequence[int], start: int) -> tuple[Tensor, WindowReport]:
        self._issue("ask")
        self.by_draft.difference_update(range(start, start + len(tokens)))
        seen = [self._append(start + i, token) for i, token in enumerate(tokens)]
        experts = np.stack([routed(token, start + i) for i, token in enumerate(tokens)], axis=1)
        log, _ = self.rig.play(experts.tolist(), len(tokens))
        self._issued()
        report = WindowReport(log, experts, [], [], start, len(tokens))
        return self.table.target(seen[-1]).log()[None], report

    def stream(self, tokens: Sequence[int], start: int) -> tuple[Tensor, NDArray[np.int32]]:
        self._issue("stream")
        stream = PrefillStream(self.rig.memory)
        try:
            for layer in range(LAYERS):
                for group in stream.bring(layer, stream.plan(layer)):
                    self._issued()
                    assert group.experts
        finally:
            stream.close()
        self.by_draft.difference_update(range(start, start + len(tokens)))
        seen = [self._append(start + i, token) for i, token in enumerate(tokens)]
        experts = np.stack([routed(token, start + i) for i, token in enumerate(tokens)], axis=1)
        return self.table.target(seen[-1]).log()[None], experts


class Rig:
    """A runner over a table's passes, a real expert memory and a real policy."""

    def __init__(self, table: Table, num_slots: int, make: type[Policy] = MoeSpeqPolicy) -> None:
        self.experts = DeviceRig(num_slots, layers=LAYERS, experts=EXPERTS)
        memory = self.experts.memory
        scheduler = Scheduler(make(CacheShape(LAYERS, EXPERTS, TOP_K, num_slots)))
        memory._scores = scheduler.keep_scores
        scheduler.attach(memory)
        self.events: list[Event] = []
        notify = scheduler.notify

        def watched(event: Event) -> None:
            self.events.append(event)
            notify(event)

        scheduler.notify = watched  # type: ignore[method-assign]
        window = DeviceWindow(WINDOW, CPU)  # a prompt's windows are wider than a step's
        self.state = DevicePassState(
            memory, scheduler, LookaheadBuffer(LAYERS), RowPadding(1, ROWS), window, draft=[]
        )
        self.passes = TablePasses(table, self.experts, window)
        self.cache = DeviceKVCache(1, 512, window)
        self.runner = DeviceRunner(self.passes, self.cache, self.state)  # type: ignore[arg-type]
        take_over = self.runner.take_over

        def checked(report: WindowReport, phase: Phase, *, wanted: bool = True) -> None:
            take_over(report, phase, wanted=wanted)
            if not memory._open_passes:  # else slots are those of a pass that was issued behind this one
                self.experts.check()

        self.runner.take_over = checked  # type: ignore[method-assign]

    def loop(
        self, length: int | Governor, *, on_device: bool = True, end: frozenset[int] = NO_END,
        whole: bool = False, sampling: SamplingConfig = GREEDY, lookup: PromptLookupDrafter | None = None,
        grammar: Any = None, beside: bool = False, near: bool = False,
    ) -> SpeculativeLoop:  # fmt: skip
        """beside: what is looked up takes the place of drafts, as the governor says. near: the text goes back
        no further than to where the last window began, as recurrent state can."""
        sampler = TokenSampler(sampling, grammar)
        governor = FixedGovernor(length) if isinstance(length, int) else length
        instead = FoundInstead(lookup, governor, ROWS - 1) if lookup is not None and beside else None

        def steps() -> DeviceStepper:
            goes_on = grammar.free if near else None
            made = DeviceSteps(self.runner, sampling, sampler.seed, whole_window=whole, goes_on=goes_on)
            return DeviceStepper(made, end, None if beside else lookup, instead)

        truncate = self.cache.truncate

        def watched(length: int) -> None:
            self.passes.went_behind |= length < self.passes.last_start
            assert not (near and self.passes.went_behind), f"{length}, behind {self.passes.last_start}"
            truncate(length)

        self.cache.truncate = watched  # type: ignore[method-assign]
        stepper: Stepper = steps()
        if grammar is not None:
            stepper = GrammarStepper(steps, self.runner, sampler, grammar)
        if not on_device:
            drafter = SelfDrafter(self.runner, end, whole_window=whole)
            stepper = PassStepper(self.runner, drafter, sampler, None, instead)
        return SpeculativeLoop(self.runner, stepper, governor, sampler, end, None)

    def tokens(self, *, verified: bool = True) -> list[int]:
        assert not verified or not self.passes.by_draft.intersection(range(self.cache.length))
        return [self.passes.held[at] for at in range(self.cache.length)]


SAMPLED = SamplingConfig(temperature=1.2, top_p=0.95, seed=21)
PENALISED = SamplingConfig(temperature=0.9, top_k=3, repetition_penalty=1.4, seed=22)


def sampled(table: Table, text: list[int], count: int, config: SamplingConfig) -> list[int]:
    """`count` tokens after `text` one by one, by the rule itself."""
    assert config.seed is not None
    said: list[int] = []
    for _ in range(count):
        written = [*text, *said]
        seen = torch.full((table.vocab,), NEVER, dtype=torch.int32)
        for at, token in reversed(list(enumerate(written))):
            seen[token] = at
        at = torch.tensor([len(written) - 1])
        logits = table.target(written).log()[None]
        said.append(int(reference_choices(logits, seen, at, config, config.seed)))
    return said


class Moody(FixedGovernor):
    """Wants another length now and then."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(0)
        self.lengths = lengths

    def choose(self) -> int:
        return self.lengths.pop(0) if self.lengths else 0

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return min(self.choose(), most), None
