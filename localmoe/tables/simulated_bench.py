"""Gives cells their figures by simulation: a model's shape on a card that need not be here. All of it is
predicted, and labelled so. Chooses no cells.
"""

from __future__ import annotations

from dataclasses import replace

from localmoe.core.switches import DEFAULT_SWITCHES
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.units import format_rate
from localmoe.engine.bench_row import Summary
from localmoe.engine.random_source import RandomSource
from localmoe.hardware.cards import Card
from localmoe.hardware.limits import Rates
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import find_shape
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_machine import predict_machine
from localmoe.prefetch.simulator_sources import windows
from localmoe.prefetch.simulator_types import Window
from localmoe.tables.cells import Cell, Subject
from localmoe.tables.engine_bench import RANDOM_TOKENS, Amount

_COMPUTE_BYTES = 2  # a weight's on the device


class SimulatedBench:
    """One shape on one card, in whole passes."""

    def __init__(self, shape: str, card: Card, amount: Amount, synthetic: SyntheticSettings) -> None:
        """Raises ConfigError: the shape is unknown."""
        self._card = card
        self._amount = amount
        self._synthetic = synthetic
        source = RandomSource(find_shape(shape), synthetic)
        skeleton = source.skeleton(source.stored_dtype)
        found = measure_footprint(shape, source.stored_dtype, skeleton, None, "cuda")
        footprint = self._footprint = found.in_codes().in_whole_passes()  # as a GPU runs it
        self.memory: dict[str, int] = {}
        self.subject = Subject(
            name=shape,
            kind="predicted",
            machine="simulated",
            device=card.name,
            dtype="bfloat16",
            link=f"PCIe, taken as {format_rate(card.rates.link_bytes_per_s)}",
            draft="INT4 in groups of 128",
            passes=f"whole steps, simulated on {card}",
            synthetic=str(synthetic),
            whole_passes=True,
            num_layers=footprint.num_layers,
            num_experts=footprint.num_experts,
            experts_per_token=footprint.experts_per_token,
            slot_bytes=footprint.slot_bytes(_COMPUTE_BYTES),
            draft_bytes=footprint.total_experts * footprint.draft_expert_bytes,
            datasets=(RANDOM_TOKENS,),
            prompts=amount.prompts,
            max_new_tokens=amount.max_new_tokens,
            draft_length=amount.draft_length,
        )

    def can_run(self, cell: Cell) -> bool:
        """Adaptive lengths need times that are measured, and the simulator has but one of the switches."""
        return cell.draft_length != "auto" and replace(cell.switches, whole_window=False) == DEFAULT_SWITCHES

    def measure(self, cell: Cell) -> Summary:
        """Replay the same answers on the cell's policy."""
        assert isinstance(cell.draft_length, int), "can_run comes first"
        footprint = self._footprint
        in_ram = _COMPUTE_BYTES * footprint.embedding_params
        shared = footprint.shared_bytes - in_ram - footprint.packed_away_bytes
        draft = self.subject.draft_bytes if cell.draft_length else 0
        needed = shared + draft + cell.num_slots * self.subject.slot_bytes
        if needed > self._card.budget_bytes:
            room = f"{self._card.budget_bytes / 1e9:.1f} GB that {self._card.name} can give"
            return {"refused": f"{needed / 1e9:.1f} GB do not fit the {room}."}
        rates = Rates(self._card.rates.device_bytes_per_s, self._card.rates.link_bytes_per_s)
        machine = predict_machine(footprint, cell.num_slots, rates)
        story = list(
            windows(
                SyntheticModel(
                    self._synthetic, footprint.num_layers, footprint.num_experts, footprint.experts_per_token
                ),
                draft_length=cell.draft_length,
                answers=self._amount.prompts,
                prompt_tokens=self._amount.prompt_tokens,
                new_tokens=self._amount.max_new_tokens,
                whole_window=cell.switches.whole_window,
                seed=self._synthetic.seed,
            )
        )
        uncounted = 0
        if cell.resident:  # the same once before, as measured
            uncounted = sum(isinstance(part, Window) for part in story)
            story *= 2
        tally = simulate(cell.runs, machine, story, warm_up=uncounted)
        counters, stats = tally.counters, tally.counters.freeze()
        tokens = max(1, counters.new_tokens - 1)
        return {
            "policy": cell.policy,
            "draft_length": cell.draft_length,
            "prompts": self._amount.prompts,
            "steps": counters.steps,
            "tokens_per_s": stats.tokens_per_s,
            "tpot_s": stats.tpot_s,
            "draft_s_per_step": counters.draft_s / max(1, counters.steps),
            "verify_s_per_step": counters.verify_s / max(1, counters.steps),
            "acceptance_rate": stats.acceptance_rate,
            "hit_rate": stats.hit_rate,
            "token_hit_rate": stats.token_hit_rate,
            "late_rate": stats.late / max(1, stats.expert_demands),
            "coverage_rate": stats.coverage_rate,
            "h2d_bytes_per_token": tally.copies * machine.expert_bytes / tokens,
            "h2d_bytes_per_s": tally.copies * machine.expert_bytes / max(1e-9, counters.decode_s),
            "stall_s": counters.stall_s,
        }

    def close(self) -> None:
        """Nothing is held."""
