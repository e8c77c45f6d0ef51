"""Subjects and results made by hand: figures that a test chooses, so that what a page says of them is "
"known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from localmoe.engine.bench_row import Summary
from localmoe.tables.cells import Cell, Subject
from localmoe.tables.registry import TABLES
from localmoe.tables.store import Run

SUBJECT = Subject(
    name="demo", kind="measured", machine="2 cores", device="cpu", dtype="float32", link="emulated 100 MB/s",
    draft="INT4", passes="layer by layer", synthetic="", whole_passes=False, num_layers=6, num_experts=16,
    experts_per_token=4, slot_bytes=1000, draft_bytes=12_500, datasets=("gsm8k", "c4"), prompts=2,
    max_new_tokens=8, draft_length=4,
)  # fmt: skip
PAPER_SHAPE = replace(
    SUBJECT, name="deepseek-v2-lite", num_layers=26, num_experts=64, experts_per_token=6,
    slot_bytes=16, draft_bytes=4 * 26 * 64, synthetic="routing sticky:0.5, match 0.9, acceptance 0.9",
    datasets=("random tokens",),
)  # fmt: skip


def run_with(figures: Callable[[Cell], Summary | None], subject: Subject = SUBJECT) -> Run:
    """A run in which every cell of every table has the figures that it is given (None: it did not run)."""
    run = Run(subject, "load average 0.1 on 2 cores when it began")
    for table in TABLES.values():
        for cell in table.cells(subject):
            found = figures(cell)
            if found is not None:
                run.cells[cell.key] = found
    return run


def plain(cell: Cell) -> Summary:
    """moe-speq is twice as fast as anything else, and routes as the paper's."""
    mine = cell.policy == "moe-speq"
    return {
        "tpot_s": 0.01 if mine else 0.02, "tokens_per_s": 100.0 if mine else 50.0,
        "hit_rate": 0.999 if mine else 0.5, "late_rate": 0.0005, "coverage_rate": 0.9999,
        "token_hit_rate": 0.6,
        "expert_match_rate": 0.92, "expert_order_match_rate": 0.5, "acceptance_rate": 0.9,
        "draft_s_per_step": 0.01, "verify_s_per_step": 0.03, "h2d_bytes_per_token": 1e6,
        "tokens_sha256": "same",
    }  # fmt: skip
