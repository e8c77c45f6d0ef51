"""How long an answer's drafts are, and where a model's own draft is: in VRAM, or laid aside so that experts
have its memory, whichever answers faster (speculative.draft_worth says which, by what it measures). It is
laid aside only where the draft length is left to the engine, and lies in its folder all the time: laying it
aside copies nothing, taking it back reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from localmoe.core.config import MAX_DRAFT_LENGTH, DraftLength, GenerationRequest
from localmoe.core.errors import BudgetError, DraftError, LocalMoeError
from localmoe.core.stats import GenerationCounters
from localmoe.engine.budget import BudgetKeeper
from localmoe.engine.draft_layers import draft_bytes, matrix_layers, packed_layers
from localmoe.engine.draft_memory import Rates, recall, remember
from localmoe.engine.lane_counts import missing_expert_s
from localmoe.engine.loading import EngineParts, out_of_memory
from localmoe.engine.log_lines import log_draft_moved, log_no_draft
from localmoe.engine.new_slots import release_slots
from localmoe.engine.sources import CheckpointSource
from localmoe.engine.stepping import choose_governor, looks_up
from localmoe.model.compaction import compact
from localmoe.model.runner import ModelRunner
from localmoe.speculative.draft_worth import DraftWorth, WatchedGovernor
from localmoe.speculative.either_governor import EitherGovernor
from localmoe.speculative.governor import AutoGovernor, Governor
from localmoe.speculative.lookup_governor import LookupGovernor

_CHANGE = 0.1  # of the logarithm of a rate, from which on it is kept anew


class DraftPlace:
    """Of one engine. Everything is called while no step runs."""

    def __init__(self, parts: Callable[[], EngineParts], budget: BudgetKeeper) -> None:
        """parts: what is loaded."""
        self._parts, self._budget = parts, budget
        self._longest = min(MAX_DRAFT_LENGTH, parts().passes.rows.max_rows - 1)
        self._learn_anew()
        self.forget()

    def forget(self) -> None:
        """What was measured is of another draft, or of another budget. A draft that is aside is taken back
        before the next answer, to be measured."""
        self._worth = DraftWorth(0.0)
        self._slots = 0  # beside the draft, that `_worth` is about
        self._situation = ""  # by which it is remembered; "": it is not
        self._kept: Rates | None = None  # what is remembered now
        self._stays = False  # moving it failed

    def settle(self, request: GenerationRequest, *, lent: bool) -> None:
        """Before an answer: put the draft where it is needed.

        Args:
            lent: memory is lent to the build of a better draft, so nothing is decided.

        Raises:
            BudgetError, DraftError: the request asks for the draft, and it cannot be taken back; or there is
                no memory for any slots.
        """
        self._budget.make_missing_slots()
        length = self._length(request)
        if request.draft_only or length not in ("auto", 0):
            return self.take_back()
        if length == 0 or lent or not self._may_choose:
            return
        self.remember()
        if not self._budget.plan.draft_aside:
            self._know_slots()
            if self._worth.wants_aside:
                self._lay_aside()
        elif self._worth.wants_back or not self._worth.aside:
            self._try_back()

    def governor(self, request: GenerationRequest, counters: GenerationCounters) -> Governor:
        """Who picks the draft lengths of an answer, with these counters; timed where it is left to the
        engine.

        Raises:
            DraftError: a draft is needed, and none is loaded or can be.
        """
        parts, budget = self._parts(), self._budget
        counters.draft_aside = budget.plan.draft_aside
        auto = self._lookups if looks_up(parts, budget.config, request) else self._auto
        governor = choose_governor(parts, request, budget.config, budget.plan, auto)
        if request.draft_only or self._length(request) != "auto" or not self._may_choose:
            return governor
        if budget.reserved_bytes:
            return governor  # with slots lent to a build, nothing would be learnt of the budget
        return WatchedGovernor(governor, self._worth, counters, lambda: missing_expert_s(parts))

    def take_back(self) -> None:
        """Have the draft in VRAM, if the model has one.

        Raises:
            BudgetError: there is no room for it. DraftError: it is not in its folder any more.
        """
        if not self._budget.plan.draft_aside:
            return
        self._budget.check_draft_fits()
        release_slots(self._parts())  # reading needs a part of their memory
        try:
            failure = self._load()
            if failure is not None:
                raise failure
        except BaseException:
            self._budget.lay_draft_aside(True)
            raise
        self._worth.moved(aside=False)
        self._budget.lay_draft_aside(False)
        log_draft_moved(self.rates, aside=False)

    def remember(self) -> None:
        """Keep both rates for the next start, once they are known and whenever one has changed by a tenth."""
        drafted, plain = self._worth.drafted_per_s, self._worth.plain_per_s
        if not self._situation or drafted is None or plain is None:
            return
        found, kept = Rates(drafted, plain), self._kept
        if kept is None or any(
            abs(math.log(new / old)) > _CHANGE
            for new, old in ((drafted, kept.drafted_per_s), (plain, kept.plain_per_s))
        ):
            remember(self._situation, found)
            self._kept = found

    def restore(self) -> None:
        """As after a load, where that is possible."""
        if self._budget.plan.draft_aside:
            self._try_back()
        self._learn_anew()
        self.forget()

    @property
    def rates(self) -> str:
        """For people: how fast answers are with and without the draft; "" while that is not known."""
        worth = self._worth
        if worth.drafted_per_s is None or (worth.plain_per_s is None and worth.bound_per_s is None):
            return ""
        plain = (
            f"at least {worth.bound_per_s:.3g}" if worth.plain_per_s is None else f"{worth.plain_per_s:.3g}"
        )
        return f"{plain} tokens/s without it, {worth.drafted_per_s:.3g} with it"

    @property
    def _may_choose(self) -> bool:
        parts, config = self._parts(), self._budget.config
        own = parts.draft is not None and parts.other is None and parts.drafter == "self"
        return own and config.draft_length == "auto" and not self._stays

    def _learn_anew(self) -> None:
        self._auto = EitherGovernor(AutoGovernor(self._longest), self._longest)
        self._lookups = LookupGovernor(self._longest)

    def _length(self, request: GenerationRequest) -> DraftLength:
        return self._budget.config.draft_length if request.draft_length is None else request.draft_length

    def _know_slots(self) -> None:
        plan, footprint = self._budget.plan, self._parts().prepared.footprint
        if plan.num_slots == self._slots:
            return
        missing = footprint.total_experts - plan.num_slots
        more = min(missing, plan.draft_bytes // plan.slot_bytes)
        spared, self._slots = more / missing if missing > 0 else 0.0, plan.num_slots
        self._situation = self._describe_situation()
        self._kept = recall(self._situation) if self._situation and spared else None
        if self._kept is None:
            self._worth = DraftWorth(spared)
        else:
            self._worth = DraftWorth(spared, self._kept.drafted_per_s, self._kept.plain_per_s)

    def _describe_situation(self) -> str:
        """What decides how fast answers are, but for the text; "" where that is not worth a file: on a CPU,
        and with random weights."""
        parts, config = self._parts(), self._budget.config
        source, compute = parts.prepared.source, parts.prepared.compute
        if compute.device.type != "cuda" or not isinstance(source, CheckpointSource):
            return ""
        twentieths = round(20 * self._slots / parts.prepared.footprint.total_experts)
        facts = (
            source.name, source.checkpoint.fingerprint()[:16], torch.cuda.get_device_name(compute.device),
            compute.dtype, parts.draft, f"{5 * twentieths} % in slots", config.policy, config.lanes,
            "strict" if config.strict else "not strict", f"{config.cpu_threads or 'all'} threads",
        )  # fmt: skip
        return "; ".join(map(str, facts))

    def _lay_aside(self) -> None:
        parts = self._parts()
        release_slots(parts)  # and with them graphs that read the draft
        parts.passes.draft, parts.draft_bytes = None, 0
        self._worth.moved(aside=True)
        try:
            self._budget.lay_draft_aside(True)
        except BudgetError as error:  # others have taken the memory meanwhile; slots have what is left
            log_no_draft(str(error))
        log_draft_moved(self.rates, aside=True)

    def _try_back(self) -> None:
        """Nobody asked for the draft, so answers go on without it where it cannot be had."""
        try:
            self.take_back()
        except (BudgetError, DraftError) as error:
            self._stays = True
            log_no_draft(str(error))

    def _load(self) -> LocalMoeError | None:
        """Why that failed. On return nothing refers to what was read until then, as an error under way
        would."""
        parts, folder = self._parts(), self._budget.config.draft_dir
        prepared, held = parts.prepared, parts.draft
        try:
            form = prepared.source.draft_form(folder)
            if form.codebook and held is not None and not held.codebook:
                raise DraftError("An NF4 draft was made meanwhile, which is larger: load the model again.")
            info, layers = prepared.source.load_draft(
                prepared.skeleton, parts.store, prepared.compute.device, folder,
                packed=prepared.compute.whole_passes, fused=parts.fused_draft, may_build=False,
                progress=None, cancel=None,
            )  # fmt: skip
            packed = None if isinstance(parts.runner, ModelRunner) else packed_layers(layers)
            compact(tensor for layer in packed or () for tensor in layer.tensors())
        except torch.OutOfMemoryError:
            return out_of_memory(self._budget.plan.budget_bytes, "taking the draft back")
        except DraftError as error:
            return DraftError(str(error))
        if isinstance(parts.runner, ModelRunner):
            parts.runner.passes.draft = matrix_layers(layers)
        else:
            parts.runner.passes.draft = packed
        parts.draft, parts.draft_bytes = info, draft_bytes(layers)
        return None
