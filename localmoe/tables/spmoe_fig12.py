"""SP-MoE, figure 12: what each part of its prefetcher is worth. Measures nothing."""

from __future__ import annotations

from localmoe.core.switches import DEFAULT_SWITCHES, Switches
from localmoe.tables.cells import Cell, Subject
from localmoe.tables.section import Bars, Section, Table, ms, percent, ratio, times, value
from localmoe.tables.store import Run

STEPS = (
    ("s: offloading with drafting", "on-demand", DEFAULT_SWITCHES),
    ("+ vp: vanilla prefetch, which blocks", "sp-moe", Switches(copies_beside=False)),
    ("+ wp: a worker copies beside the draft", "sp-moe", DEFAULT_SWITCHES),
    ("+ b: a layer's copies in one", "sp-moe", Switches(layer_batches=True)),
)
PAPER_VANILLA = 1.68  # SP-MoE 4.4.1, Mixtral: s / vp, the one figure that the text gives


def _cell(subject: Subject, policy: str, switches: Switches) -> Cell:
    return Cell(subject.mixed, policy, subject.draft_length, subject.slots("high"), switches)


def _cells(subject: Subject) -> list[Cell]:
    return [_cell(subject, policy, switches) for _, policy, switches in STEPS]


def _section(run: Run) -> Section | None:
    if run.subject.kind == "predicted":
        return None
    figures = [run.get(_cell(run.subject, policy, switches)) for _, policy, switches in STEPS]
    found = [value(entry, "tpot_s") for entry in figures]
    if found[0] is None:
        return None
    papers = ("1.00 x", f"{PAPER_VANILLA:.2f} x (Mixtral)", "more", "a little more")
    rows = [
        [title, ms(tpot), times(ratio(found[0], tpot)), percent(value(entry, "hit_rate")), paper]
        for (title, _, _), tpot, entry, paper in zip(STEPS, found, figures, papers, strict=True)
    ]
    section = Section(
        ("system", "time per token", "speed", "hit rate", "paper: speed"),
        rows,
        [
            Bars(
                "Time per output token, ms",
                "ms",
                ("here",),
                tuple(
                    (title.partition(":")[0], (None if tpot is None else 1e3 * tpot,))
                    for (title, _, _), tpot in zip(STEPS, found, strict=True)
                ),
            )
        ],
    )
    vanilla = ratio(found[0], found[1])
    if vanilla is not None and vanilla < PAPER_VANILLA:
        section.reasons.append(
            "Blocking prefetches move the same bytes at another time; they are a gain where the paper's "
            "baseline copies one expert after the other for every layer that waits. Here a layer that "
            "misses computes what is there while the rest arrives, so there is less to gain."
        )
    if found[3] is None:
        section.reasons.append(
            "Where whole passes run on a GPU all prefetches that wait are issued at once in any case: "
            "there is no worker without batches to compare with."
        )
    return section


SP_FIG12 = Table(
    "fig12",
    "What the parts of SP-MoE's prefetcher are worth",
    "SP-MoE, figure 12",
    "The engine's own switches: prefetches that block, prefetches by the worker, and a layer's prefetches "
    "as one operation. Slots as in MoE-SpeQ's high budget.",
    _cells,
    _section,
)
