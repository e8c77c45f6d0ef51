"""Runs cells on a loaded engine. Chooses no cells and prints nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import numpy as np

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import BudgetError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import ProgressCallback
from localmoe.engine import Engine
from localmoe.engine.bench_row import Summary
from localmoe.engine.benchmark import measure_setting
from localmoe.model.shapes import ModelShape
from localmoe.tables.cells import Cell, Subject
from localmoe.tables.datasets import requests
from localmoe.tables.machine import machine_line

RANDOM_TOKENS = "random tokens"  # the only dataset of a shape


class Bench(Protocol):
    """Whatever gives a cell its figures."""

    @property
    def subject(self) -> Subject:
        """What is measured."""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by owner, of what is loaded."""

    def can_run(self, cell: Cell) -> bool:
        """Whether such a cell makes sense here."""

    def measure(self, cell: Cell) -> Summary:
        """Its figures; {"refused": why} where it does not fit."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is run: prompts of each dataset, tokens an answer, tokens of a random prompt, the fixed draft
    length."""

    datasets: tuple[str, ...]
    prompts: int
    max_new_tokens: int
    prompt_tokens: int
    draft_length: int


class EngineBench:
    """One engine, loaded once; slots are made anew for each cell."""

    def __init__(self, engine: Engine, amount: Amount, synthetic: SyntheticSettings | None) -> None:
        self._engine = engine
        self._amount = amount
        self._synthetic = synthetic
        self._on_gpu = engine.prepared.compute.device.type == "cuda"
        self.subject = self._describe()

    @classmethod
    def load(
        cls,
        model: str | ModelShape,
        config: EngineConfig,
        amount: Amount,
        synthetic: SyntheticSettings,
        progress: ProgressCallback | None,
    ) -> EngineBench:
        """A model by name, or a shape with random weights and what `synthetic` makes of it.

        Raises:
            LocalMoeError: as Engine.load and Engine.load_shape; the draft has to fit.
        """
        # the CPU lane is left out: the papers' systems have none, and every cell gives the same tokens
        config = replace(config, lanes="vram+link", strict=True, draft_length=amount.draft_length)
        if isinstance(model, str):
            return cls(Engine.load(model, config, progress=progress), amount, None)
        return cls(Engine.load_shape(model, config, synthetic, progress=progress), amount, synthetic)

    def __enter__(self) -> EngineBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    @property
    def memory(self) -> dict[str, int]:
        """As allocated."""
        plan = self._engine.plan
        held = self._engine.device_memory()
        return {**held, "context": plan.context, "workspace": plan.workspace_bytes}

    def can_run(self, cell: Cell) -> bool:
        """On a GPU all prefetches that wait are issued at once anyway."""
        return not (self._on_gpu and cell.switches.layer_batches)

    def measure(self, cell: Cell) -> Summary:
        """Answer the cell's prompts from empty slots, or once more than counts from those that hold all."""
        try:
            self._make_slots(cell.num_slots)
        except BudgetError as error:
            return {"refused": str(error)}
        switches = replace(cell.switches, look_up=False)  # as the papers' systems
        wanted = [replace(request, strict=True, switches=switches) for request in self._requests(cell)]
        row = measure_setting(self._engine, wanted, cell.runs, cell.draft_length, again=cell.resident)
        return {**row.summary(), "policy": cell.policy, "tokens_sha256": _digest(row.tokens)}

    def _make_slots(self, num_slots: int) -> None:
        plan = self._engine.plan
        if plan.num_slots != num_slots:
            self._engine.resize(plan.total_bytes + plan.slot_bytes * (num_slots - plan.num_slots))

    def _requests(self, cell: Cell) -> list[GenerationRequest]:
        amount = self._amount
        if self._synthetic is None:
            return requests(cell.dataset, amount.datasets, amount.prompts, amount.max_new_tokens)
        shape = (amount.prompts, amount.prompt_tokens)
        vocabulary = self._engine.footprint.vocab_size
        ids = np.random.default_rng(self._synthetic.seed).integers(0, vocabulary, shape).tolist()
        return [
            GenerationRequest(prompt_token_ids=tuple(row), max_new_tokens=amount.max_new_tokens)
            for row in ids
        ]

    def _describe(self) -> Subject:
        info, plan, footprint = self._engine.info(), self._engine.plan, self._engine.footprint
        amount = self._amount
        return Subject(
            name=footprint.name.removesuffix(" (synthetic weights)"),
            kind="measured",
            machine=machine_line(with_gpu=self._on_gpu),
            device=info.device,
            dtype=info.dtype,
            link=info.link,
            draft=info.draft,
            passes=info.passes,
            synthetic="" if self._synthetic is None else str(self._synthetic),
            whole_passes=self._engine.prepared.compute.whole_passes,
            num_layers=footprint.num_layers,
            num_experts=footprint.num_experts,
            experts_per_token=footprint.experts_per_token,
            slot_bytes=plan.slot_bytes,
            draft_bytes=plan.draft_bytes,
            datasets=amount.datasets if self._synthetic is None else (RANDOM_TOKENS,),
            prompts=amount.prompts,
            max_new_tokens=amount.max_new_tokens,
            draft_length=amount.draft_length,
        )


def _digest(tokens: Sequence[tuple[int, ...]]) -> str:
    """The same for the same answers."""
    return hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]
