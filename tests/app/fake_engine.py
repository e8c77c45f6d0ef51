"""A stand-in for the engine at the same seam: canned answers, real statistics arithmetic, settable pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localmoe.core.config import DrafterName, EngineConfig, GenerationRequest, SamplingConfig, Thinking
from localmoe.core.errors import (
    BudgetError,
    ConfigError,
    DraftError,
    EngineBusyError,
    EngineClosedError,
    LocalMoeError,
    ModelNotFoundError,
    TransferError,
)
from localmoe.core.live_state import LiveState, PromptState, ReuseBound
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.stats import GenerationCounters
from localmoe.core.stream import StreamEvent
from localmoe.core.timeline import StepSpans, Timeline
from localmoe.core.types import ModelFootprint, Progress, ProgressCallback
from localmoe.core.units import format_bytes
from localmoe.experts.counters import TransferCounters

MIB = 1 << 20
LAYERS, EXPERTS = 8, 148
PIECES = 74  # of a better draft's build: 16 experts each
SMALLEST = 12 * MIB
SEEING = "seeing-moe"  # reads pictures
WITHOUT_MTP = ("other-moe",)  # of which the files have no such layer
RECOMMENDED = {"other-moe": SamplingConfig(1.0, 0.95, 64)}  # by its makers; the others' say nothing
ATTACK = (
    'Look: <script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
    '<img src="http://203.0.113.7/pixel.png"> ![pixel](http://203.0.113.7/markdown.png) '
    '<a href="javascript:window.hacked = 3">link</a> **done**'
)
MARKDOWN = (
    "Here is a list:\n\n- one **bold** thing\n- two `code` things\n\n```python\nprint('hello')\n```\n\n"
    "| expert | hits |\n|---|---|\n| 3 | 12 |\n| 7 | 9 |\n\nThat is all."
)

THOUGHT = " ".join(f"thought {n} <b>&amp;</b>\n\n$$x$$" for n in range(60))


class LoadCancelledError(LocalMoeError):
    """The load was cancelled."""


class DraftCancelledError(LocalMoeError):
    """The build of the better draft was cancelled."""


@dataclass(frozen=True, slots=True)
class FakeInfo:
    name: str
    architecture: str
    device: str
    dtype: str
    policy: str
    draft: str
    link: str
    context: int
    has_chat_template: bool
    exactness: str
    passes: str
    lanes: str
    cpu_bytes_per_s: float | None = None
    may_be_in_place: bool = False
    looks_up: bool = False
    own_sampling: SamplingConfig | None = None
    thinking: tuple[Thinking, ...] = ("off", "on")
    drafter: DrafterName = "self"
    reads_images: bool = False


def answer_to(text: str) -> str:
    """The canned answer to a message."""
    lowered = text.lower()
    if "attack" in lowered:
        return ATTACK
    if "think" in lowered:
        return f"<think>\nLet me see: {THOUGHT} </think>\n\nIt is **four**."
    if "markdown" in lowered:
        return MARKDOWN
    if "long" in lowered:
        return " ".join(f"Sentence {n} of a long story about a fox." for n in range(400))
    return f"Hello! You wrote: {text}. I am a fake engine and I answer with a few words."


class FakeLive:
    """Every expert of even number is in a slot; the first of each layer is asked for most. Each token copies
    three experts."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._timeline: Timeline | None = None
        self.looks = 0
        self.reading: PromptState | None = None

    def capture_s(self) -> float:
        return 0.0

    def state(self) -> LiveState:
        if self._engine.closed:
            raise EngineClosedError("The engine is closed: load a model first.")
        self.looks += 1
        resident, heat = np.zeros((LAYERS, EXPERTS), bool), np.zeros((LAYERS, EXPERTS), np.float32)
        resident[:, ::2], heat[:, 0], heat[:, 1] = True, 1.0, 0.5
        return LiveState(resident, heat, self._engine.copied, time.perf_counter(), 2e9)

    def prompt(self) -> PromptState | None:
        return self.reading

    def reuse_bound(self) -> ReuseBound | None:
        return ReuseBound(demands=100, reusable=75, fetched=40)

    def record_timeline(self, steps: int | None = 64) -> None:
        self._timeline = None if steps is None else Timeline(steps)

    def timeline(self) -> tuple[StepSpans, ...]:
        return () if self._timeline is None else self._timeline.steps()

    def step(self, number: int, started: float) -> None:
        """A step of which the first half drafts, and one copy runs."""
        if self._timeline is not None:
            middle = (started + time.perf_counter()) / 2
            self._timeline.add("draft", "token 1", started, middle)
            self._timeline.add("copies", "expert 1/2", started, middle, 40_000)
            self._timeline.add("verify", "verify 2 tokens, keep 1", middle)
            self._timeline.begin_step(f"step {number}")


class FakeCaptures:
    """Remembers for which sampling it was begun."""

    def __init__(self) -> None:
        self.begun: list[SamplingConfig | None] = []

    def begin(self, sampling: SamplingConfig | None = None) -> None:
        self.begun.append(sampling)


class FakeEngine:
    """Emits a word or three a step."""

    def __init__(
        self, model: str, config: EngineConfig, step_s: float = 0.02, improve_s: float | None = None
    ) -> None:
        self.model, self.config, self.step_s, self.improve_s = model, config, step_s, improve_s
        self.improve_error: Exception | None = None  # raised in the middle of a build
        self.hurries: Callable[[], bool] = lambda: False  # a build's other pieces take no time then
        self.improvements = 0  # builds that were begun
        self.improved = self.answering = self.resizing = False
        self.resize_s = 0.0
        self.least_loaded = 0  # bytes, below which a budget takes a load, with a shorter context
        self._improving = threading.Lock()  # held while the better draft is built
        self._closing = threading.Event()
        self.requests: list[GenerationRequest] = []
        self.closed = False
        self.copied = 0  # bytes
        self.disk_reads = 0
        self.cpu_bytes_per_s: float | None = None
        self.resets = 0
        self._recorder: Any = None
        self.footprint = ModelFootprint(
            name=model, architecture="qwen2_moe", num_layers=LAYERS, num_experts=EXPERTS, experts_per_token=4,
            expert_params=20_000, expert_bytes=40_000, shared_params=2_000_000, shared_bytes=4 * MIB,
            kv_bytes_per_token=512, draft_expert_bytes=2_000, max_context=4096, hidden_size=256,
            vocab_size=4096,
            can_rollback=True, draft_model_bytes=2 * MIB if config.drafter == "mtp" else 0,
        )  # fmt: skip
        self.plan = self._plan(config.vram_budget_bytes)
        self.live = FakeLive(self)
        self.captures = FakeCaptures()

    def _plan(self, budget: int | None) -> MemoryPlan:
        budget = 32 * MIB if budget is None else budget
        if budget < SMALLEST:
            raise BudgetError(
                f"The budget of {format_bytes(budget)} is too small: the model needs at least "
                f"{format_bytes(SMALLEST)} with this context. Give a larger budget or a shorter context."
            )
        drafting = self.config.draft_length != 0
        fixed = 8 * MIB + (2 * MIB if drafting else 0)
        slots = min(LAYERS * EXPERTS, (budget - fixed) // 40_000)
        return MemoryPlan(
            budget_bytes=budget, context=4096, shared_bytes=4 * MIB, draft_bytes=2 * MIB if drafting else 0,
            kv_bytes=2 * MIB, workspace_bytes=2 * MIB, slot_bytes=40_000, num_slots=slots,
            resident_share=slots / (LAYERS * EXPERTS), drafting=drafting,
            drafting_reason="" if drafting else "turned off", host_bytes=LAYERS * EXPERTS * 40_000,
            **self._on_disk(),
        )  # fmt: skip

    def _on_disk(self) -> dict[str, Any]:
        """Of the plan: RAM holds a quarter of the experts."""
        if self.config.experts_on == "ram":
            return {}
        return {"disk_bytes": LAYERS * EXPERTS * 40_000, "ram_experts": LAYERS * EXPERTS // 4}

    def info(self) -> FakeInfo:
        if self.closed:
            raise EngineClosedError("The engine is closed: load a model first.")
        rate = self.config.emulated_link_bytes_per_s
        return FakeInfo(
            name="fake-moe", architecture="qwen2_moe", device="cpu", dtype="float32",
            policy=self.config.policy,
            draft=self._draft(),
            link=f"emulated {rate / 1e9:.1f} GB/s" if rate else "memory copy", context=4096,
            has_chat_template=True, exactness="every token is the 16-bit model's own choice",
            passes="layer by layer through the host (there is no GPU)", lanes=self._lanes(),
            cpu_bytes_per_s=self.cpu_bytes_per_s, own_sampling=RECOMMENDED.get(self.model),
            drafter="self" if self.config.drafter == "auto" else self.config.drafter,
            reads_images=self.model == SEEING,
        )  # fmt: skip

    def _lanes(self) -> str:
        disk = "CPU, from RAM, and from the disk what is not there (2 threads)"
        return "RAM" if self.config.experts_on == "ram" else disk

    def _draft(self) -> str:
        if not self.plan.drafting:
            return "off: turned off"
        if self.config.drafter == "mtp":
            return "its MTP layer, in INT4"
        return f"INT4 {'GPTQ' if self.improved else 'RTN'}, group 128"

    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]:
        self.requests.append(request)
        if self.closed:
            raise EngineClosedError("The engine is closed: load a model first.")
        if self.answering or self.resizing:
            raise EngineBusyError("Another answer is being written: stop it first, or wait.")
        if request.draft_length not in (0, "auto", None) and not self.plan.drafting:
            raise DraftError("No draft is loaded (turned off): load the model again with drafting on.")
        if self.model != SEEING and any(message.images for message in request.messages):
            raise ConfigError("fake-moe reads no pictures: load a model that does.")
        self.answering = True
        try:
            yield from self._answer(request, stop)
        finally:
            self.answering = False

    def _answer(self, request: GenerationRequest, stop: threading.Event | None) -> Iterator[StreamEvent]:
        begun = request.messages[-1].content if request.continue_answer else ""
        question = request.messages[-2 if begun else -1].content
        pictures = len(request.messages[-2 if begun else -1].images)
        whole = f"I see {pictures} of them. {answer_to(question)}" if pictures else answer_to(question)
        words = whole[len(begun) :].split(" ") if whole.startswith(begun) else ["(another", "answer)"]
        told = len(" ".join(message.content for message in request.messages).split())
        counters = GenerationCounters(
            prompt_tokens=told + 6, vram_budget_bytes=self.plan.budget_bytes, approximate=request.draft_only
        )
        started = time.perf_counter()
        time.sleep(3 * self.step_s if "slow step" not in question else 1.0)
        counters.ttft_s = time.perf_counter() - started
        place, tokens = 0, 0
        self._record(counters.prompt_tokens)
        limit = request.max_new_tokens or 10**9
        while True:
            if stop is not None and stop.is_set():
                yield StreamEvent("", (), 0, "cancelled", counters.freeze())
                return
            taken = words[place : place + 3][: limit - tokens]
            place, tokens = place + len(taken), tokens + len(taken)
            self._count(counters, len(taken), started)
            self.live.step(counters.steps, time.perf_counter() - self.step_s)
            self._record(len(taken) - (1 if place == len(taken) else 0))
            text = ("" if place == len(taken) else " ") + " ".join(taken)
            reason = "stop" if place >= len(words) else "length" if tokens >= limit else None
            pieces = tuple(f"{'' if i == 0 and place == len(taken) else ' '}{w}" for i, w in enumerate(taken))
            yield StreamEvent(
                text, tuple(range(len(taken))), max(0, len(taken) - 1), reason, counters.freeze(), (), pieces
            )
            if reason is not None:
                return
            if "fail" in question and place > 5:
                raise TransferError("A copy to the device failed: try again.")
            time.sleep(self.step_s)

    def _count(self, counters: GenerationCounters, tokens: int, started: float) -> None:
        counters.new_tokens += tokens
        counters.steps += 1
        counters.drafted += 4
        counters.accepted += max(0, tokens - 1)
        counters.hits += 29
        counters.late += 2
        counters.misses += 3
        counters.routed_pairs += 8 * tokens
        counters.matched_pairs += 7 * tokens
        counters.decode_h2d_bytes += 3 * 40_000
        counters.decode_disk_bytes += 40_000 if self.plan.disk_bytes else 0
        self.disk_reads += self.plan.disk_bytes > 0
        self.copied += 3 * 40_000
        counters.decode_s = time.perf_counter() - started - counters.ttft_s
        counters.stall_s += 0.001

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def transfer_counters(self) -> TransferCounters:
        read = self.disk_reads
        return TransferCounters(h2d_bytes=self.copied, disk_bytes=40_000 * read, disk_busy_s=2e-5 * read)

    def reset(self, *, ram: bool = False) -> None:
        self.resets += 1

    def record_routing(self, recorder: Any) -> None:
        self._recorder = recorder

    def _record(self, num_tokens: int) -> None:
        """The target's routing of a pass: one after another."""
        import torch

        for layer in range(LAYERS if self._recorder is not None and num_tokens else 0):
            first = torch.arange(self._recorder.num_tokens, self._recorder.num_tokens + num_tokens)
            self._recorder.record(layer, (4 * first[:, None] + torch.arange(4)) % EXPERTS)

    def device_memory(self) -> dict[str, int]:
        plan = self.plan
        return {
            "shared": plan.shared_bytes, "draft": plan.draft_bytes, "kv": plan.kv_bytes,
            "slots": plan.num_slots * plan.slot_bytes, "workspace": plan.workspace_bytes,
        }  # fmt: skip

    def residency(self) -> list[list[int]]:
        return [[1] * EXPERTS for _ in range(LAYERS)]

    def takes_budget(self, budget: int | None) -> bool:
        return self._plan(budget).budget_bytes >= self.least_loaded

    def resize(self, vram_budget_bytes: int | None) -> MemoryPlan:
        if self.answering:
            raise EngineBusyError("An answer is being written: stop it before changing the VRAM budget.")
        self.resizing = True
        try:
            time.sleep(self.resize_s)
            if not self.takes_budget(vram_budget_bytes):
                raise BudgetError("The context that is loaded does not fit.")
            self.plan = self._plan(vram_budget_bytes)
            self.config = replace(self.config, vram_budget_bytes=vram_budget_bytes)
            return self.plan
        finally:
            self.resizing = False

    def why_no_better_draft(self) -> str:
        if not self.plan.drafting:
            return "nothing is drafted"
        if self.config.drafter == "mtp":
            return "its MTP layer drafts"
        return "" if self.improve_s is not None and not self.improved else f"the draft is {self.info().draft}"

    def improve_draft(
        self, *, progress: ProgressCallback | None = None, cancel: threading.Event | None = None
    ) -> str:
        """In pieces, none of them while an answer is written; borrows half of the slots meanwhile."""
        assert self.improve_s is not None
        with self._improving:
            self.improvements += 1
            whole = self.plan
            self.plan = replace(whole, num_slots=whole.num_slots // 2)
            try:
                for piece in range(1, PIECES + 1):
                    self._wait_for_turn(cancel)
                    time.sleep(0 if self.hurries() else self.improve_s / PIECES)
                    if progress is not None:
                        progress(
                            Progress(
                                "Building the 4-bit GPTQ draft",
                                piece * LAYERS * EXPERTS // PIECES, LAYERS * EXPERTS, "experts",
                                (PIECES - piece) * self.improve_s / PIECES,
                                "output error 62 % of rounding to nearest",
                            )
                        )  # fmt: skip
                    if piece == PIECES // 2 and self.improve_error is not None:
                        raise self.improve_error
                self._wait_for_turn(cancel)
            finally:
                self.plan = replace(self.plan, num_slots=self._plan(self.config.vram_budget_bytes).num_slots)
            self.improved = True
        return self.info().draft

    def _wait_for_turn(self, cancel: threading.Event | None) -> None:
        """As in the engine: closing ends a build at once, cancelling only when no answer is written."""
        while self.answering and not self._closing.is_set():
            time.sleep(0.002)
        if self._closing.is_set() or (cancel is not None and cancel.is_set()):
            raise DraftCancelledError("The draft build was cancelled.")

    def close(self) -> None:
        self._closing.set()
        with self._improving:
            self.closed = True


class FakeLoader:
    """`Engine.load` of the fake: reports progress, can be slow, refuses some models and budgets.
    improve_s: seconds that its better draft takes; None: there is none to build."""

    def __init__(self, load_s: float = 0.0, step_s: float = 0.02, improve_s: float | None = None) -> None:
        self.load_s, self.step_s, self.improve_s = load_s, step_s, improve_s
        self.improve_error: Exception | None = None
        self.hurries: Callable[[], bool] = lambda: False
        self.engines: list[FakeEngine] = []

    def __call__(
        self, model: str, config: EngineConfig, *, progress: ProgressCallback, cancel: threading.Event
    ) -> FakeEngine:
        if model == "missing":
            raise ModelNotFoundError(
                "There is no model 'missing' on this computer: give a folder or a repo id."
            )
        if config.drafter == "mtp" and model in WITHOUT_MTP:
            config = replace(config, drafter="self")
        engine = FakeEngine(model, config, self.step_s, self.improve_s)
        engine.improve_error, engine.hurries = self.improve_error, self.hurries
        for part in range(10):
            progress(Progress("loading weights", part * 3 * MIB, 30 * MIB, "bytes"))
            if cancel.wait(self.load_s / 10):
                raise LoadCancelledError("The load was cancelled.")
        self.engines.append(engine)
        return engine
