"""MoE-SpeQ, figure 6: how often the draft routes as the target does. Measures nothing."""

from __future__ import annotations

from localmoe.tables.cells import Cell, Subject
from localmoe.tables.datasets import title_of
from localmoe.tables.section import Bars, Section, Table, Target, mean, percent, value
from localmoe.tables.store import Run

# MoE-SpeQ, figure 6 and 2.5, Qwen1.5-MoE: hard, soft, mismatch
PAPER = (0.441, 0.468, 0.091)
_KINDS = ("hard match", "soft match", "mismatch")


def _cells(subject: Subject) -> list[Cell]:
    if subject.synthetic:
        return []  # it would show what was put in
    slots = subject.slots("high")
    return [Cell(name, "moe-speq", subject.draft_length, slots) for name in subject.datasets]


def _shares(run: Run, cell: Cell) -> tuple[float, float, float] | None:
    found = run.get(cell)
    same, ordered = value(found, "expert_match_rate"), value(found, "expert_order_match_rate")
    if same is None or ordered is None:
        return None
    return ordered, same - ordered, 1 - same


def _section(run: Run) -> Section | None:
    cells = _cells(run.subject)
    found = [(title_of(cell.dataset), shares) for cell in cells if (shares := _shares(run, cell))]
    if not found:
        return None
    average = tuple(mean([shares[i] for _, shares in found]) or 0.0 for i in range(3))
    lines = [*found, ("average", average), ("paper (Qwen1.5-MoE)", PAPER)]
    same, paper_same = average[0] + average[1], PAPER[0] + PAPER[1]
    section = Section(
        ("prompts", *_KINDS, "same experts"),
        [[name, *(percent(s) for s in shares), percent(shares[0] + shares[1])] for name, shares in lines],
        [
            Bars(
                "Share of (token, layer), %",
                "%",
                _KINDS,
                tuple((name, tuple(100 * s for s in shares)) for name, shares in lines),
            )
        ],
        [
            Target(
                f"the same experts as often as the paper's {percent(paper_same)}",
                percent(same),
                same >= paper_same,
            )
        ],
    )
    if same < paper_same:
        section.reasons.append(
            f"The embedded model has {run.subject.num_experts} experts a layer and matrices of few columns, "
            "so that INT4 takes a larger part of each router's margin than in a model of billions of "
            "weights."
        )
    if average[0] < PAPER[0]:
        section.reasons.append(
            "Hard matches are rarer where the weights of a token's experts lie close together, so that a "
            "small error changes their order; neither what is prefetched nor what is computed depends on "
            "the order."
        )
    return section


FIG6 = Table(
    "fig6",
    "Does the draft route as the target does?",
    "MoE-SpeQ, figure 6",
    "Per (drafted token, MoE layer): hard, the same experts in the same order of importance; soft, the "
    "same experts in another order; mismatch, at least one other expert. Only of the trained model: "
    "simulated routing would show what was put in.",
    _cells,
    _section,
)
