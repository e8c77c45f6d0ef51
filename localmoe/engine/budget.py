"""Keeps the division of a loaded engine's VRAM budget, and divides it anew. Plans nothing itself (planning
does) and makes no slots."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from localmoe.core.config import EngineConfig
from localmoe.core.errors import BudgetError, ConfigError
from localmoe.core.plan_types import MemoryPlan
from localmoe.engine.loading import EngineParts, out_of_memory
from localmoe.engine.log_lines import log_plan
from localmoe.engine.replanning import plan_anew, replan
from localmoe.hardware.cuda import forget_peak
from localmoe.model.runner import ModelRunner


class BudgetKeeper:
    """The budget of one engine.

    Attributes:
        config: the engine's, with the budget that was asked for last.
        plan: who has what now.
        reserved_bytes: of the budget, lent to a draft build; the plan divides the rest.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: Callable[[], EngineParts],
        held_bytes: Callable[[], int],
        new_slots: Callable[[int], None],
    ) -> None:
        """parts: what is loaded. held_bytes: device memory that it holds. new_slots: makes so many, empty."""
        self.config = config
        self.plan = parts().prepared.plan
        self.reserved_bytes = 0
        self._parts = parts
        self._held_bytes = held_bytes
        self._new_slots = new_slots
        self._dividing = threading.Lock()

    @property
    def budget_bytes(self) -> int:
        """Of everything."""
        return self.plan.budget_bytes + self.reserved_bytes

    def resize(self, budget: int | None) -> MemoryPlan:
        """Divide another budget; None: what is free.

        Raises:
            ConfigError: experts are computed where they lie, and a budget was given.
            BudgetError: what is loaded does not fit; all is as before. Or the GPU has less than was free
                when it was planned; then slots are empty, and as many as before or as still fit.
        """
        with self._dividing:
            self._parts()  # of a closed engine none
            if self.plan.in_place:
                if budget is not None:
                    raise ConfigError(
                        "The experts are computed where they lie in RAM, which takes no slots: "
                        "load the model again to give it a memory budget."
                    )
                return self.plan  # no slots to divide
            config = replace(self.config, vram_budget_bytes=budget)
            plan = self._divide_all(config)
            if not self._has_room_for(plan.num_slots):
                self._fall_back()
                raise out_of_memory(plan.budget_bytes, "changing the budget")
            self.config = config
            forget_peak(self._parts().prepared.compute.device)
            self._follow(plan)
            log_plan(plan, self._parts().prepared.footprint)
            return plan

    def takes(self, budget: int | None) -> bool:
        """Whether `resize` would divide it. False: what is loaded does not fit, but a load would take it,
        with a shorter context or without a draft, where neither was asked for. Any thread may ask.

        Raises:
            BudgetError: nor would a load.
        """
        with self._dividing:
            self._parts()
            config = replace(self.config, vram_budget_bytes=budget)
            try:
                if not self.plan.in_place:
                    self._divide_all(config)
            except BudgetError as refused:
                prepared = self._parts().prepared
                try:
                    plan_anew(prepared, config, self._held())
                except BudgetError:
                    raise refused from None
                return False
            return True

    def check_draft_fits(self) -> None:
        """Raises BudgetError: not into the budget of now, that was given while the draft was aside."""
        with self._dividing:
            self._divide_same(replace(self.plan, draft_aside=False))

    def lay_draft_aside(self, aside: bool) -> None:
        """Divide the same budget with the draft's part given to slots, or taken from them again; they start
        empty. The draft itself has left its memory already, or is there.

        Raises:
            BudgetError: the GPU has less than was free when it was planned; then there are as many slots as
                before, or as were planned or still fit if that is fewer.
        """
        with self._dividing:
            before = self.plan.num_slots
            plan = self._divide_same(replace(self.plan, draft_aside=aside))
            self._follow(plan)
            if not self._has_room_for(plan.num_slots):
                self._keep_slots(min(before, plan.num_slots))  # never more than the draft leaves room for
                self._fall_back()
                raise out_of_memory(plan.budget_bytes, "dividing the budget anew")
            log_plan(plan, self._parts().prepared.footprint)

    def _divide_all(self, config: EngineConfig) -> MemoryPlan:
        """Its budget, but for what is lent of it."""
        plan = self._divide(config, self.plan)
        if config.vram_budget_bytes is None and self.plan.draft_aside:  # it has to do for the draft as well
            with suppress(BudgetError):
                whole = self._divide(config, replace(self.plan, draft_aside=False))
                plan = self._divide(replace(config, vram_budget_bytes=whole.budget_bytes), self.plan)
        if self.reserved_bytes:
            rest = max(1, plan.budget_bytes - self.reserved_bytes)
            plan = self._divide(replace(config, vram_budget_bytes=rest), self.plan)
        return plan

    def _divide_same(self, old: MemoryPlan) -> MemoryPlan:
        """Its budget, with the draft where it has it."""
        return self._divide(replace(self.config, vram_budget_bytes=old.budget_bytes), old)

    def _divide(self, config: EngineConfig, old: MemoryPlan) -> MemoryPlan:
        """The plan of a configuration's budget for what is loaded, with the draft where `old` has it."""
        in_vram = old.drafting and not old.draft_aside
        plan = replan(self._parts().prepared, replace(old, drafting=in_vram), config, self._held())
        return replace(plan, drafting=old.drafting, draft_aside=old.draft_aside)

    def _held(self) -> int:
        """Bytes of the memory that is divided, as far as this model has them."""
        parts = self._parts()
        records = parts.store.num_bytes if parts.prepared.compute.device.type == "cpu" else 0
        return self._held_bytes() + records

    def _follow(self, plan: MemoryPlan) -> None:
        """From here on it holds; prompts' passes are as long as it has room for."""
        self.plan = plan
        runner = self._parts().runner
        if not isinstance(runner, ModelRunner):
            runner.passes.prompt_rows = plan.prefill_chunk

    def _fall_back(self) -> None:
        """Empty slots in the memory of those that made room; where others have taken of that, too, half as
        many as often as it takes."""
        before, footprint = self.plan.num_slots, self._parts().prepared.footprint
        count, least = before, max(2, footprint.experts_per_token)  # as hardware.needs has it
        while not self._has_room_for(count) and count > least:
            count = max(least, count // 2)
        if count < before:
            self._keep_slots(count)

    def _keep_slots(self, count: int) -> None:
        share = count / self._parts().prepared.footprint.total_experts
        self.plan = replace(self.plan, num_slots=count, resident_share=share)

    def _has_room_for(self, num_slots: int) -> bool:
        """Make the slots, if the memory suffices. On return nothing refers to what was made of them before it
        ran out, as the error does."""
        try:
            self._new_slots(num_slots)
        except torch.OutOfMemoryError:
            return False
        return True

    def reserve(self, num_bytes: int) -> None:
        """Lend so much to a draft build (0: it is over); only between answers.

        Raises:
            BudgetError: what is loaded does not fit into the rest.
        """
        before, self.reserved_bytes = self.reserved_bytes, num_bytes
        try:
            self.resize(self.config.vram_budget_bytes)
        except BudgetError:
            self.reserved_bytes = before
            raise

    def make_missing_slots(self) -> None:
        """Where a division left no slots at all, since others had taken even the memory of the fewest, or was
        interrupted: try again.

        Raises:
            BudgetError: there is still no memory for them.
        """
        with self._dividing:
            memory = self._parts().passes.memory
            missing = memory.slots.num_slots == 0 or memory.closed
            if missing and not self._has_room_for(self.plan.num_slots):
                raise out_of_memory(self.plan.budget_bytes, "making room for experts")

    def empty_slots(self) -> None:
        """Make the slots anew."""
        with self._dividing:
            self._new_slots(self.plan.num_slots)
