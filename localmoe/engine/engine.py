"""The engine: load a model, stream answers, say what it holds, close. Page, commands and API sit on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType

import torch

from localmoe.chat.prompt import Encoder
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import EngineBusyError, EngineClosedError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.stats import GenerationCounters
from localmoe.core.stream import StreamEvent
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import ModelFootprint, ProgressCallback
from localmoe.engine.answer import write_events
from localmoe.engine.answer_sampling import AnswerSampling
from localmoe.engine.budget import BudgetKeeper
from localmoe.engine.captures import Captures
from localmoe.engine.device_parts import cache_shape
from localmoe.engine.draft_place import DraftPlace
from localmoe.engine.draft_upgrade import why_not_better
from localmoe.engine.improver import DraftImprover
from localmoe.engine.info import EngineInfo, describe
from localmoe.engine.lane_counts import allow_cpu, count_transfers
from localmoe.engine.live import LiveView
from localmoe.engine.loading import EngineParts, out_of_memory
from localmoe.engine.log_lines import log_loaded
from localmoe.engine.meter import Meter
from localmoe.engine.new_slots import new_memory
from localmoe.engine.packing import load_parts
from localmoe.engine.planning import PreparedModel, prepare_model, prepare_shape
from localmoe.engine.sessions import EngineSession
from localmoe.engine.stepping import make_stepper
from localmoe.engine.switching import apply_switches
from localmoe.engine.turns import Turns
from localmoe.experts.counters import TransferCounters
from localmoe.hardware.cuda import peak_allocated_bytes
from localmoe.model.routing_trace import RoutingRecorder
from localmoe.model.shapes import ModelShape, find_shape
from localmoe.prefetch.registry import make_policy
from localmoe.speculative.loop import SpeculativeLoop


class Engine(AbstractContextManager["Engine"]):
    """A loaded model. One answer at a time; `close()` frees everything. Use `Engine.load`."""

    def __init__(self, parts: EngineParts, config: EngineConfig, encoder: Encoder) -> None:
        self._parts: EngineParts | None = parts
        self._closing: EngineParts | None = None  # closed while an answer was being written
        self._encoder = encoder
        # of a text by itself, and a request's prompt; any thread may ask
        self.count_tokens, self.encode = encoder.count, encoder.encode
        self._busy, self._turns = threading.Lock(), Turns()
        self._policy, self._answers = config.policy, 0  # answers since load or reset
        self._budget = BudgetKeeper(config, lambda: self._loaded, self._held_bytes, self._new_slots)
        self.takes_budget = self._budget.takes  # whether `resize` would, see there
        self._draft_place = DraftPlace(lambda: self._loaded, self._budget)
        self.captures = Captures(parts.runner, self._busy, self._turns, parts.store.fill, parts.fill_slots)
        self._improver = DraftImprover(self._turns, self.captures.in_use, self._budget.reserve)
        self._session = EngineSession(parts, config, encoder)
        self._end_tokens = parts.prepared.source.end_tokens(encoder)
        self._sampling = AnswerSampling(encoder, self._end_tokens)
        self.prepare_grammars = self._sampling.prepare  # of schemas and tools; any thread may
        self.live = LiveView(lambda: self._loaded)  # what others may see of it at any time
        log_loaded(self.info(), self.plan, self.footprint)

    @classmethod
    def load(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> Engine:
        """Load a model folder, a Hub repo id that is on this machine, or "demo".

        Raises:
            LocalMoeError: with one sentence for the user; what does not fit is refused before weights are
                read.
        """
        config = config or EngineConfig()
        prepare = partial(prepare_model, model)
        return cls(*load_parts(prepare, config, progress=progress, cancel=cancel))

    @classmethod
    def load_shape(
        cls,
        shape: str | ModelShape,
        config: EngineConfig | None = None,
        synthetic: SyntheticSettings | None = None,
        *,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> Engine:
        """Make a model of a known shape (model.shapes) with random weights: to measure with, not to talk to.
        Its prompts are token ids.

        Raises:
            LocalMoeError: as `load`; or the shape is unknown, or the trace to replay is of another.
        """
        config = config or EngineConfig()
        shape = find_shape(shape) if isinstance(shape, str) else shape
        prepare = partial(prepare_shape, shape, synthetic=synthetic or SyntheticSettings())
        return cls(*load_parts(prepare, config, progress=progress, cancel=cancel))

    @property
    def _loaded(self) -> EngineParts:
        if self._parts is None:
            raise EngineClosedError("The engine is closed: load a model first.")
        return self._parts

    @property
    def config(self) -> EngineConfig:
        """As loaded, with the budget that was asked for last."""
        return self._budget.config

    @property
    def plan(self) -> MemoryPlan:
        """Who has which bytes now."""
        return self._budget.plan

    @property
    def prepared(self) -> PreparedModel:
        """What was known before loading."""
        return self._loaded.prepared

    @property
    def footprint(self) -> ModelFootprint:
        """Sizes of the model."""
        return self.prepared.footprint

    def stream(
        self, request: GenerationRequest, stop: threading.Event | None = None
    ) -> Iterator[StreamEvent]:
        """Write one answer, an event a step. Closing the generator at any point leaves the engine consistent.

        Raises:
            EngineBusyError: another answer is being written.
            ContextLengthError, ConfigError, DraftError: the request cannot be served.
            BudgetError: the GPU's memory ran out; `resize` to the budget that it names.
        """
        started = time.perf_counter()
        try:
            with self._idle("Another answer is being written: stop it first, or wait."), self._turns.answer():
                yield from self._answer(request, stop, started)
        except torch.OutOfMemoryError:
            raise out_of_memory(self.plan.budget_bytes, "answering") from None
        finally:
            self._free_closed()

    def _answer(
        self, request: GenerationRequest, stop: threading.Event | None, started: float
    ) -> Iterator[StreamEvent]:
        parts = self._loaded
        prompt = self._encoder.encode(request, self.plan.context)
        sampler = self._sampling.sampler(request, prompt)
        self._draft_place.settle(request, lent=self._improver.running)
        self._use_policy(request.policy or self.config.policy)
        apply_switches(parts, request.switches, self.config)
        counters = GenerationCounters(vram_budget_bytes=self._budget.budget_bytes)
        counters.prompt_tokens, counters.approximate = len(prompt), request.draft_only
        governor = self._draft_place.governor(request, counters)
        parts.passes.counters = counters
        parts.passes.lookahead.clear()
        meter = Meter(counters, self.transfer_counters, self.peak_device_bytes, started)
        parts.passes.memory.begin_answer()  # the meter counts already what may be wasted from here on
        self.live.begin_answer()
        if parts.passes.synthetic is not None:
            parts.passes.synthetic.begin(self._answers)
        self._answers += 1
        on_cpu = allow_cpu(parts, not request.strict)
        counters.reused_tokens = self._session.begin(request, prompt, stop, exact=not on_cpu)
        stepper = make_stepper(parts, request, self.config, governor, sampler, self._end_tokens, stop, prompt)
        loop = SpeculativeLoop(parts.runner, stepper, governor, sampler, self._end_tokens, stop)
        limit = min(self.plan.context - len(prompt), request.max_new_tokens or self.plan.context)
        text, tokenizer = self._session.text, self._encoder.tokenizer
        with text.sound():
            yield from write_events(loop.run(prompt, limit), prompt, text, tokenizer, meter, request)

    def _use_policy(self, name: str) -> None:
        if name != self._policy:
            parts = self._loaded
            parts.passes.scheduler.use(make_policy(name, cache_shape(parts.prepared, self.plan.num_slots)))
            self._policy = name

    def record_routing(self, recorder: RoutingRecorder | None) -> None:
        """Tell `recorder` which experts the target chooses, from the next answer on; None ends it. With
        draft length 0, what it is told of is what is answered; rejected tokens would be told of too."""
        self._loaded.passes.recorder = recorder

    def transfer_counters(self) -> TransferCounters:
        """Copies since the slots were made."""
        return count_transfers(self._loaded)

    def device_memory(self) -> dict[str, int]:
        """Bytes of device memory by owner, as allocated now (on CPU: of the memory that stands in for it)."""
        return self._loaded.device_memory()

    def _held_bytes(self) -> int:
        return sum(self.device_memory().values())

    def peak_device_bytes(self) -> int:
        """The allocator's peak on a GPU since load or resize; on CPU what `device_memory` sums up to."""
        device = self.prepared.compute.device
        return peak_allocated_bytes(device) if device.type == "cuda" else self._held_bytes()

    def info(self) -> EngineInfo:
        """A description for people."""
        rates, encoder = self._draft_place.rates, self._encoder
        return describe(self._loaded, self.config, self.plan, self._policy, rates, encoder)

    def resize(self, vram_budget_bytes: int | None) -> MemoryPlan:
        """Divide another budget, without reading the weights again: slots are made anew (and start empty).

        Raises:
            BudgetError: the draft and the cache that are loaded do not fit into it.
            EngineBusyError: an answer is being written.
        """
        with self._idle("An answer is being written: stop it before changing the VRAM budget."):
            plan = self._budget.resize(vram_budget_bytes)
            self._draft_place.forget()
            return plan

    def why_no_better_draft(self) -> str:
        """Why `improve_draft` has nothing to do; "" if it has."""
        return why_not_better(self._loaded, self.config)

    def improve_draft(
        self, *, progress: ProgressCallback | None = None, cancel: threading.Event | None = None
    ) -> str:
        """Build the GPTQ draft of a model that drafts with rounded weights, in the pauses between answers,
        and go on with it; what it is now. Call it from a thread of its own. `cancel` ends it after the piece
        of work under way and never in the middle of an answer, `close` at once.

        Raises:
            DraftError: there is nothing to improve, or RAM or disk do not suffice.
            LocalMoeError: it was cancelled, or the engine closed; finished layers are kept.
        """
        better = self._improver.run(self._loaded, self.config, progress, cancel)
        self._draft_place.forget()
        return better

    def reset(self, *, ram: bool = False) -> None:
        """Forget the conversation, what was learnt about draft lengths, which experts were in slots and, if
        `ram`, which ones RAM holds. Raises EngineBusyError while an answer is being written."""
        with self._idle("An answer is being written: stop it first."):
            self._session.text.forget()
            self._answers = 0
            self._draft_place.restore()
            self._budget.empty_slots()  # first: records on their way into some are held in RAM
            self._loaded.forget(ram=ram)

    @contextmanager
    def _idle(self, refusal: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise EngineBusyError(refusal)
        try:
            self.captures.wait()
            yield
        finally:
            self._busy.release()

    def _new_slots(self, num_slots: int) -> None:
        """Empty slots of another number, and a policy that has seen nothing."""
        parts = self._loaded
        new_memory(parts, num_slots)
        self.live.attach()
        parts.passes.scheduler.use(make_policy(self._policy, cache_shape(parts.prepared, num_slots)))

    def close(self) -> None:
        """Stop the transfer worker and free the memory. A second call does nothing."""
        self.captures.close()  # first: a build that ends would disturb a capture
        self._improver.close()
        if self._parts is not None:
            self._draft_place.remember()
            self._closing, self._parts = self._parts, None
            self._closing.passes.memory.close()  # ends an answer that waits for a copy
            self._free_closed()

    def _free_closed(self) -> None:
        """Give a closed engine's memory back, once no answer uses it: now, or when the running answer
        ends."""
        if self._closing is not None and self._busy.acquire(blocking=False):
            self._session.close()
            self._closing.close()
            self._closing = None
            self._busy.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
