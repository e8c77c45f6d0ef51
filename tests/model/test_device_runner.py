"""What the host does around passes on the device, with passes that a table plays: steps, slots, rollbacks."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton")

from experts.device_rig import DeviceRig
from speculative.table_model import Table

from localmoe.core.config import SamplingConfig
from localmoe.core.errors import CheckpointError
from localmoe.core.events import (
    DraftFinished,
    Event,
    PassRouted,
    PrefetchRequest,
    Rates,
    RatesMeasured,
    StepFinished,
    StepStarted,
    TokenRouted,
)
from localmoe.core.gates import Gate
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.timeline import Timeline
from localmoe.core.types import ExpertKey, Phase
from localmoe.experts.copy_times import CopyTimes
from localmoe.experts.prefill_stream import PrefillStream
from localmoe.kernels.choices import NEVER, reference_choices
from localmoe.kernels.rows import RowPadding
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_choice import DeviceChoice
from localmoe.model.device_draft_steps import DeviceDraftSteps
from localmoe.model.device_experts import DevicePassState
from localmoe.model.device_runner import STREAM_FROM, DeviceRunner
from localmoe.model.device_steps import RUN_BEHIND_AFTER, DeviceSteps
from localmoe.model.device_window import DeviceWindow
from localmoe.model.step_graphs import PassOutput
from localmoe.model.window_report import DraftReport, WindowReport
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import CacheShape, Policy
from localmoe.prefetch.scheduler import Scheduler
from localmoe.speculative.drafters import SelfDrafter
from localmoe.speculative.governor import FixedGovernor, Governor
from localmoe.speculative.loop import SpeculativeLoop
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
        self.by_draft: set[int] = set()  # positions whose entries are not the target's
        self.issued: list[str] = []
        self.copies_before: list[int] = []  # each window that verifies
        self.break_at: int | None = None
        self.broken_late = False  # the pass itself ran, but nothing was read back
        self.choice = DeviceChoice(CPU)
        self.choice.prepare(torch.zeros(1, table.vocab))

    def force(self, phase: str, start: int, count: int) -> None:
        """Nothing is simulated; a window is about to be opened."""
        if phase == "verify":
            self.copies_before.append(self.rig.transfers.issued)

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
        numbers = self.window_numbers
        assert (int(numbers.start), int(numbers.live)) == (start, count)
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

    def stream(self, tokens: Sequence[int], start: int) -> tuple[Tensor, NDArray[np.int32]]:
        self._issue("stream")
        stream = PrefillStream(self.rig.memory)
        try:
            for layer in range(LAYERS):
                for group in stream.layer(layer):
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
        window = DeviceWindow(ROWS, CPU)
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
        whole: bool = False, sampling: SamplingConfig = GREEDY,
    ) -> SpeculativeLoop:  # fmt: skip
        sampler = TokenSampler(sampling)
        steps = DeviceSteps(self.runner, sampling, sampler.seed, whole_window=whole)
        stepper: Stepper = DeviceStepper(steps, end)
        if not on_device:
            drafter = SelfDrafter(self.runner, end, whole_window=whole)
            stepper = PassStepper(self.runner, drafter, sampler, None)
        governor = FixedGovernor(length) if isinstance(length, int) else length
        return SpeculativeLoop(self.runner, stepper, governor, sampler, end, None)

    def tokens(self, *, verified: bool = True) -> list[int]:
        assert not verified or not self.passes.by_draft.intersection(range(self.cache.length))
        return [self.passes.held[at] for at in range(self.cache.length)]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 999), st.integers(0, 6), st.integers(1, 13), st.floats(0, 1), st.booleans(),
    st.sampled_from([MoeSpeqPolicy, CpuHelps, OnDemandPolicy]), st.sets(st.integers(0, 3), max_size=1),
    st.booleans(),
)  # fmt: skip
def test_answers_are_the_targets_own_and_slots_are_right_after_every_step(
    seed: int, length: int, slots: int, agreement: float, on_device: bool, make: type[Policy], end: set[int],
    whole: bool,
) -> None:  # fmt: skip
    table = Table(agreement=agreement, seed=seed)
    rig = Rig(table, slots, make)
    said: list[int] = []
    for step in rig.loop(length, on_device=on_device, end=frozenset(end), whole=whole).run(PROMPT, 14):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    rig.experts.check()
    assert said == table.greedy(PROMPT, 14, frozenset(end))
    counters = rig.state.counters
    if counters.steps:
        assert counters.hits + counters.misses + counters.late > 0
        assert counters.token_hits <= counters.token_demands
        drafts = rig.passes.issued.count("draft")
        assert counters.drafted <= drafts
        assert counters.routed_pairs == LAYERS * (drafts - counters.left_out)
        assert counters.left_out <= (on_device and bool(end)), "one draft behind an end token at most"


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


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 999), st.integers(1, 13), st.lists(st.sampled_from([0, 0, 0, 0, 1, 3]), max_size=9),
    st.sampled_from([SAMPLED, PENALISED]), st.sampled_from([OnDemandPolicy, HastyPolicy]),
)  # fmt: skip
def test_a_sampled_answer_is_the_same_whatever_is_drafted_and_whenever_passes_run(
    seed: int, slots: int, lengths: list[int], config: SamplingConfig, make: type[Policy]
) -> None:
    table = Table(agreement=0.8, seed=seed)
    rig = Rig(table, slots, make)
    first, *rest = rig.loop(Moody(list(lengths)), sampling=config).run(PROMPT, 11)
    text = [*PROMPT, *first.tokens]  # the prompt's last pass is nobody's but the host's
    assert [token for step in rest for token in step.tokens] == sampled(table, text, 10, config)
    assert rig.passes.choice.kind == "argmax"  # nothing of an answer stays


@pytest.mark.parametrize("config", [SAMPLED, PENALISED])
def test_the_draft_alone_writes_what_the_rule_says_and_stops_at_what_is_no_number(
    config: SamplingConfig,
) -> None:
    table = Table(agreement=0.3, seed=4)
    rig = Rig(table, 4)
    assert config.seed is not None
    rig.runner.run(PROMPT, "prefill", last_only=True)
    steps = DeviceDraftSteps(rig.runner, config, config.seed)
    text = [*PROMPT, 2]
    for _ in range(3):
        steps.begin(text, 3)
        text += steps.finish().tokens
    table.rows["target"] = table.rows["draft"]
    assert text == [*PROMPT, 2, *sampled(table, [*PROMPT, 2], 12, config)]
    for row in table.rows["draft"].values():
        row.fill_(torch.nan)
    steps.begin(text, 3)
    with pytest.raises(CheckpointError, match="files may be damaged"):
        steps.finish()
    assert rig.tokens(verified=False) == text[:-1]
    steps.close()


@pytest.mark.parametrize("length", [0, 3])
def test_probabilities_that_are_no_numbers_end_a_sampled_answer_with_one_sentence(length: int) -> None:
    table = Table(agreement=0.3, seed=3)
    rig = Rig(table, 4)
    steps = rig.loop(length, sampling=SAMPLED).run(PROMPT, 40)
    said = [token for _ in range(6) for token in next(steps).tokens]
    for row in [*table.rows["target"].values(), *table.rows["draft"].values()]:
        row.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="files may be damaged"):
        for step in steps:
            said += step.tokens
    assert rig.tokens() == [*PROMPT, *said][:-1]
    rig.experts.check()


class Moody(FixedGovernor):
    """Wants another length now and then."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(0)
        self.lengths = lengths

    def choose(self) -> int:
        return self.lengths.pop(0) if self.lengths else 0

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return min(self.choose(), most), None


class Whim(FixedGovernor):
    """Stops drafts, and cuts off what was drafted, at random. heard: margins of each step."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self.chance = random.Random(seed)
        self.heard: list[list[float]] = []

    def choose_gated(self, most: int) -> tuple[int, Gate | None]:
        return self.chance.randint(0, min(most, 6)), self.chance.choice([None, self, self])

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        assert unheard <= 1
        return self.chance.random() < 0.7

    def worth_verifying(self, margins: Sequence[float]) -> int:
        return self.chance.randint(0, len(margins))

    def observe(
        self, drafted: int, accepted: int, draft_s: float, verify_s: float, margins: Sequence[float] = (),
        host_s: float = 0.0,
    ) -> None:  # fmt: skip
        assert host_s >= 0
        assert accepted <= drafted <= len(margins) and min(draft_s, verify_s) >= 0
        self.heard.append(list(margins))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 999), st.integers(1, 13) | st.just(LAYERS * EXPERTS), st.floats(0, 1), st.integers(1, 20),
    st.sampled_from([MoeSpeqPolicy, CpuHelps, OnDemandPolicy, HastyPolicy]),
    st.sets(st.integers(0, 3), max_size=1), st.booleans(), st.sampled_from([GREEDY, GREEDY, "sampled"]),
)  # fmt: skip
# the first draft of a step runs when its predecessor turns out to have brought the last expert into a slot
@example(1, 12, 0.0, 8, MoeSpeqPolicy, set(), False, GREEDY)
def test_drafts_may_end_anywhere_and_any_part_of_them_may_be_verified(
    seed: int, slots: int, agreement: float, limit: int, make: type[Policy], end: set[int], record: bool,
    sampling: SamplingConfig | str,
) -> None:  # fmt: skip
    table, config = Table(agreement=agreement, seed=seed), SAMPLED if sampling == "sampled" else GREEDY
    rig, whim = Rig(table, slots, make), Whim(seed)
    if record:
        rig.state.timeline, rig.experts.memory.times = Timeline(), CopyTimes(rig.experts.memory.transfers)
    said: list[int] = []
    for step in rig.loop(whim, end=frozenset(end), sampling=config).run(PROMPT, limit):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    if config.greedy:
        assert said == table.greedy(PROMPT, limit, frozenset(end))
    else:
        rest = sampled(table, [*PROMPT, said[0]], len(said) - 1, config)
        assert said[1:] == rest
    rig.experts.check()
    counters, drafts = rig.state.counters, rig.passes.issued.count("draft")
    assert counters.drafted <= drafts
    for event, following in itertools.pairwise(rig.events):  # each step's last token is told to be it
        if isinstance(event, TokenRouted):
            assert event.last == (not isinstance(following, TokenRouted))
    told = sum(len(margins) for margins in whim.heard)  # none of what was drafted behind an end token
    assert told <= counters.drafted + counters.left_out <= drafts
    assert end or counters.drafted + counters.left_out == drafts
    finished = [event for event in rig.events if isinstance(event, DraftFinished | StepFinished)]
    assert counters.drafted <= sum(e.drafted for e in finished if isinstance(e, StepFinished))
    if record:
        spans = [span for each in rig.state.timeline.steps() for span in each.spans]
        assert sum(span.lane == "draft" for span in spans) == drafts


def test_the_next_draft_is_issued_before_the_last_one_is_heard_of_if_the_gate_expects_to_want_it() -> None:
    asked: list[tuple[int, int, int]] = []

    class Steady(FixedGovernor):
        def choose_gated(self, most: int) -> tuple[int, Gate | None]:
            return min(6, most), self

        def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
            asked.append((len(margins), unheard, rig.passes.issued.count("draft")))
            return len(margins) + unheard < 3

        def worth_verifying(self, margins: Sequence[float]) -> int:
            return len(margins) - 1

    rig = Rig(Table(agreement=1.0, seed=6), 5)
    steps = rig.loop(Steady(0)).run(PROMPT, 8)
    assert len(next(steps).tokens) == 1 and len(next(steps).tokens) == 3
    # three passes, of which two were issued while the one before them ran; then it does not go on
    assert asked[:4] == [(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 0, 3)]
    steps.close()


def test_a_steps_first_draft_is_issued_behind_the_verify_pass_and_dropped_if_none_is_wanted() -> None:
    def run(length: int | Governor, limit: int, end: set[int]) -> tuple[Rig, list[int], list[int]]:
        rig = Rig(Table(agreement=1.0, seed=6), 5)
        read, seen = rig.passes.read_window, []

        def reported(report: NDArray[np.int32], count: int, rows: int) -> WindowReport:
            seen.append(rig.passes.issued.count("draft"))
            return read(report, count, rows)

        rig.passes.read_window = reported  # type: ignore[method-assign]
        steps = list(rig.loop(length, end=frozenset(end)).run(PROMPT, limit))
        return rig, [len(step.tokens) for step in steps], seen[1:]

    rig, emitted, seen = run(Moody([2, 1, 0, 2, 2]), 11, set())
    assert emitted == [1, 3, 2, 1, 3, 1]
    # behind steps of 2, 1 and 2 tokens; the second is not wanted, and for a fourth there is no room
    assert seen == [3, 4, 4, 6, 6]
    counters = rig.state.counters
    assert (counters.drafted, counters.left_out) == (5, 1)
    rig, emitted, seen = run(2, 30, {rig.passes.table.greedy(PROMPT, 2)[1]})
    assert emitted == [1, 1] and seen == [3], "the first drafted token ends the answer"
    assert rig.state.counters.left_out == 1 and rig.tokens() == [*PROMPT, *rig.passes.table.greedy(PROMPT, 1)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 999), st.integers(1, 13), st.lists(st.sampled_from([0, 0, 0, 0, 1, 3]), max_size=24),
    st.sampled_from([MoeSpeqPolicy, OnDemandPolicy, HastyPolicy]), st.integers(1, 25), st.integers(1, 40),
    st.sets(st.integers(0, 3), max_size=1),
)  # fmt: skip
def test_plain_steps_run_behind_each_other_between_others_and_an_answer_may_end_anywhere(
    seed: int, slots: int, lengths: list[int], make: type[Policy], events: int, limit: int, end: set[int]
) -> None:
    table = Table(agreement=0.8, seed=seed)
    rig = Rig(table, slots, make)
    steps = rig.loop(Moody(list(lengths)), end=frozenset(end)).run(PROMPT, limit)
    said: list[int] = []
    for _, step in zip(range(events), steps, strict=False):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    steps.close()
    assert said == table.greedy(PROMPT, len(said))
    rig.experts.check()
    rest = [token for step in rig.loop(2).run([*PROMPT, *said], 9) for token in step.tokens]
    assert [*said, *rest] == table.greedy(PROMPT, len(said) + 9)
    rig.experts.check()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 999), st.integers(1, 12), st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 3]), max_size=30),
    st.sampled_from([MoeSpeqPolicy, OnDemandPolicy]), st.integers(1, 30), st.sets(st.integers(0, 60)),
)  # fmt: skip
def test_slots_are_filled_beside_plain_passes_and_never_under_one_that_reads_them(
    seed: int, slots: int, lengths: list[int], make: type[Policy], events: int, without: set[int]
) -> None:
    table = Table(agreement=0.8, seed=seed)
    rig, asked = Rig(table, slots, make), [0]

    class Refilling(DeviceRunner):
        @property
        def may_refill(self) -> bool:
            asked[0] += 1
            return asked[0] not in without  # as if the CPU lane came and went

    rig.runner.__class__ = Refilling
    steps = rig.loop(Moody(list(lengths))).run(PROMPT, 30)
    said: list[int] = []
    for _, step in zip(range(events), steps, strict=False):
        said += step.tokens
        assert rig.tokens() == [*PROMPT, *said][:-1]
    steps.close()
    rig.experts.check()
    rest = [token for step in rig.loop(2).run([*PROMPT, *said], 9) for token in step.tokens]
    assert [*said, *rest] == table.greedy(PROMPT, len(said) + 9)
    rig.experts.check()
    assert not rig.experts.memory._promised


def test_what_plain_passes_miss_comes_into_slots() -> None:
    rig = Rig(Table(seed=2), 5, OnDemandPolicy)
    rig.runner.__class__ = type("Refilling", (DeviceRunner,), {"may_refill": True})
    memory = rig.experts.memory
    before = memory.transfers.issued
    said = [token for step in rig.loop(0).run(PROMPT, 40) for token in step.tokens]
    assert said == rig.passes.table.greedy(PROMPT, 40)
    assert memory.transfers.issued > before + 10
    assert rig.state.counters.hits > 0.2 * (rig.state.counters.hits + rig.state.counters.misses)


@pytest.mark.parametrize(("make", "behind"), [(OnDemandPolicy, True), (HastyPolicy, False)])
def test_passes_run_behind_each_other_unless_a_copy_is_wanted(make: type[Policy], behind: bool) -> None:
    rig = Rig(Table(seed=2), 5, make)
    opened = []
    memory = rig.experts.memory
    open_behind = memory.open_behind
    memory.open_behind = lambda: (opened.append(memory._passes), open_behind())  # type: ignore[method-assign]
    said = [token for step in rig.loop(0).run(PROMPT, 20) for token in step.tokens]
    assert said == rig.passes.table.greedy(PROMPT, 20)
    # of 19 steps the first three wait for nothing else, and behind the last one comes none
    assert len(opened) == (19 - RUN_BEHIND_AFTER if behind else 0)
    assert rig.passes.issued.count("window") == 20  # none in vain


@pytest.mark.parametrize("length", [0, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_what_capturing_passes_takes_is_no_time_of_a_step(length: int, on_device: bool) -> None:
    rig = Rig(Table(agreement=1.0, seed=6), 5)
    passes, seconds = rig.passes, []
    draft, window = passes.draft, passes.window

    def capture(issue: Callable[..., PassOutput]) -> Callable[..., PassOutput]:
        def run(*args: int) -> PassOutput:
            time.sleep(0.03)
            passes.capture_s += 0.03
            return issue(*args)

        return run

    passes.draft, passes.window = capture(draft), capture(window)  # type: ignore[method-assign]

    class Watching(FixedGovernor):
        def observe(
            self, drafted: int, accepted: int, draft_s: float, verify_s: float, margins: Sequence[float] = (),
            host_s: float = 0.0,
        ) -> None:  # fmt: skip
            seconds.append((draft_s, verify_s, host_s))

    list(rig.loop(Watching(length), on_device=on_device).run(PROMPT, 12))
    assert len(seconds) >= 3
    for part in zip(*seconds, strict=True):
        assert min(part) >= 0 and sorted(part)[len(part) // 2] < 0.02  # the machine may be busy


def test_a_timeline_has_every_pass_and_every_copy_and_changes_no_answer() -> None:
    table, prompt_and_steps = Table(agreement=0.7, seed=6), []
    for record in (False, True):
        rig = Rig(table, num_slots=4)
        if record:
            rig.state.timeline, rig.experts.memory.times = Timeline(), CopyTimes(rig.experts.memory.transfers)
        prompt_and_steps.append([step.tokens for step in rig.loop(3).run(PROMPT, 14)])
    assert prompt_and_steps[0] == prompt_and_steps[1]
    counters, (prompt, *steps) = rig.state.counters, rig.state.timeline.steps()
    assert prompt.name == "prompt" and [span.lane for span in prompt.spans if span.lane != "host"] == [
        "verify"
    ]
    assert len(steps) == counters.steps
    main = [[span for span in step.spans if span.lane in ("draft", "verify")] for step in steps]
    assert sum(span.lane == "draft" for spans in main for span in spans) == rig.passes.issued.count("draft")
    assert [[span.lane for span in spans].count("verify") for spans in main] == [1] * len(steps)
    for step, spans in zip(steps, main, strict=True):
        ends = [time for span in spans for time in (span.start_s, span.end_s)]
        assert ends == sorted(ends) and step.start_s <= ends[0] and ends[-1] <= step.end_s
        lengths = [s.end_s - s.start_s for s in step.spans if s.lane in ("draft", "verify", "host")]
        assert sum(lengths) == pytest.approx(step.end_s - step.start_s, abs=1e-7)
    copies = [span for step in steps for span in step.spans if span.lane == "copies"]
    assert len(copies) == rig.experts.memory.counters().prefetched > 0


def test_a_step_tells_the_policy_its_story_in_order() -> None:
    rig = Rig(Table(agreement=1.0, seed=6), num_slots=3)
    steps = rig.loop(2).run(PROMPT, 7)
    next(steps)
    rig.events.clear()
    next(steps)
    kinds = [type(event) for event in rig.events]
    story = [StepStarted, TokenRouted, TokenRouted, DraftFinished, PassRouted, StepFinished]
    assert kinds == [*story, StepStarted]  # the next step is being drafted already
    done = rig.events[5]
    assert isinstance(done, StepFinished) and (done.drafted, done.accepted) == (2, 2)
    assert done.draft_token_s is not None and done.draft_token_s * 2 <= rig.state.counters.draft_s + 1e-9
    first = rig.events[1]
    assert isinstance(first, TokenRouted) and first.token == 0
    assert np.array_equal(first.experts, routed(rig.passes.held[3], 3))
    demanded = rig.events[4]
    assert isinstance(demanded, PassRouted)
    asked = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
    for position in (3, 4, 5):
        for layer, experts in enumerate(routed(rig.passes.held[position], position)):
            asked[layer, experts] = True
    assert np.array_equal(demanded.demanded, asked)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("make", "waits"),
    [(MoeSpeqPolicy, True), (CpuHelps, False), (OnDemandPolicy, False), (HastyPolicy, False)],
)
def test_the_window_waits_for_the_last_draft_only_where_something_is_asked_for_then(
    make: type[Policy], waits: bool, length: int
) -> None:
    rig = Rig(Table(agreement=1.0, seed=6), 5, make)
    heard: list[int] = []
    issue = rig.passes.window

    def window(count: int, start: int) -> PassOutput:
        steps = [i for i, event in enumerate(rig.events) if isinstance(event, StepStarted)]
        since = rig.events[steps[-1] :] if steps else []
        heard.append(sum(isinstance(event, TokenRouted) for event in since))
        return issue(count, start)

    rig.passes.window = window  # type: ignore[method-assign]
    said = [token for step in rig.loop(length).run(PROMPT, 1 + 4 * (length + 1)) for token in step.tokens]
    assert said == rig.passes.table.greedy(PROMPT, len(said))
    assert heard[1:] == [length if waits else length - 1] * 4
    kinds = [type(event) for event in rig.events if not isinstance(event, PassRouted)]
    story = [StepStarted, *[TokenRouted] * length, DraftFinished, StepFinished]
    assert kinds[-4 * len(story) :] == story * 4, "the same story, whenever the pass is issued"


def test_what_the_draft_asks_for_is_on_its_way_before_the_window_runs() -> None:
    rig = Rig(Table(agreement=1.0, seed=6), num_slots=LAYERS * EXPERTS)
    list(rig.loop(3).run(PROMPT, 5))
    assert rig.passes.copies_before[0] == rig.experts.memory.counters().prefetched > 0
    window = rig.state.counters
    # only what the window's last token alone asks for was not drafted
    assert window.misses <= LAYERS * TOP_K * window.steps


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(0, 4), st.sampled_from([3, 7, LAYERS * EXPERTS]), st.integers(1, 6))
def test_an_answer_that_is_dropped_while_the_next_step_runs_can_go_on(
    seed: int, length: int, slots: int, events: int
) -> None:
    table = Table(agreement=0.8, seed=seed)
    rig = Rig(table, slots)
    steps, said = rig.loop(length).run(PROMPT, 30), []
    for _, step in zip(range(events), steps, strict=False):
        said += step.tokens
    steps.close()
    assert rig.tokens() == [*PROMPT, *said][:-1]
    rig.experts.check()
    steps_counted = rig.state.counters.steps
    assert steps_counted == events - 1 or len(said) == 30
    rest = [token for step in rig.loop(length).run([*PROMPT, *said], 9) for token in step.tokens]
    assert [*said, *rest] == table.greedy(PROMPT, len(said) + 9)
    rig.experts.check()


@pytest.mark.parametrize("make", [MoeSpeqPolicy, CpuHelps, OnDemandPolicy])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("broken", range(1, 10))
def test_an_interrupted_pass_is_undone_and_no_wrong_weights_stay(
    broken: int, late: bool, make: type[Policy]
) -> None:
    table = Table(agreement=0.8, seed=12)
    rig = Rig(table, 5, make)
    rig.passes.break_at, rig.passes.broken_late = broken, late
    said: list[int] = []
    try:
        for step in rig.loop(2).run(PROMPT, 12):
            said += step.tokens
    except (RuntimeError, KeyboardInterrupt):
        assert rig.tokens() == ([*PROMPT, *said][:-1] if said else [])
    else:
        assert late, "only draft passes do not break late"
    rig.experts.check()
    rig.passes.break_at = None
    left = 12 - len(said)
    steps = rig.loop(2).run([*PROMPT, *said], left) if left else iter(())
    rest = [token for step in steps for token in step.tokens]
    assert [*said, *rest] == table.greedy(PROMPT, 12)
    rig.experts.check()


@pytest.mark.parametrize("slots", [2, 5, 12])
def test_a_long_prompt_is_streamed_and_an_interrupted_one_leaves_all_slots(slots: int) -> None:
    table = Table(seed=3)
    rig = Rig(table, slots)
    prompt = [i % 4 for i in range(STREAM_FROM + 5)]
    rig.passes.break_at, rig.passes.broken_late = 1, True
    with pytest.raises(KeyboardInterrupt):
        list(rig.loop(0).run(prompt, 4))
    rig.experts.check()
    assert rig.cache.length == 0
    rig.passes.break_at = None
    steps = rig.loop(2).run(prompt, 6)
    said = list(next(steps).tokens)
    assert (rig.experts.memory._last_use == 1).all()  # all by the prompt's pass
    said += [token for step in steps for token in step.tokens]
    assert said == table.greedy(prompt, 6)
    assert rig.passes.issued[:2] == ["stream", "stream"]
    rig.experts.check()


def test_a_short_prompt_runs_as_a_window_and_logits_are_float32_rows() -> None:
    rig = Rig(Table(seed=3), 4)
    with torch.inference_mode():
        logits = rig.runner.run(PROMPT, "prefill", last_only=False)
        assert logits.shape == (3, 4) and logits.dtype == torch.float32
        assert rig.runner.run([1], "prefill", last_only=True).shape == (1, 4)
    assert rig.passes.issued == ["window", "window"] and rig.cache.length == 4
    assert rig.state.counters.hits + rig.state.counters.misses == 0  # prompts are not counted
