"""MoE-SpeQ, table 4: the speed without copies beside the computation, without the fused draft kernel, and
without both. Measures nothing."""

from __future__ import annotations

from localmoe.core.switches import Switches
from localmoe.tables.cells import Cell, Subject
from localmoe.tables.section import Bars, Section, Table, Target, percent, ratio, value
from localmoe.tables.store import Run

# MoE-SpeQ, table 4, DeepSeek-V2-Lite: tokens a second
VARIANTS = (
    ("full", Switches(), 13.02),
    ("without async prefetch", Switches(copies_beside=False), 12.37),
    ("without fused kernel", Switches(fused_draft=False), 8.88),
    ("without both", Switches(copies_beside=False, fused_draft=False), 8.29),
)


def _cell(subject: Subject, switches: Switches) -> Cell:
    return Cell(subject.mixed, "moe-speq", subject.draft_length, subject.slots("high"), switches)


def _cells(subject: Subject) -> list[Cell]:
    return [_cell(subject, switches) for _, switches, _ in VARIANTS]


def _section(run: Run) -> Section | None:
    if run.subject.kind == "predicted":
        return None
    found = [run.get(_cell(run.subject, switches)) for _, switches, _ in VARIANTS]
    speeds = [value(figures, "tokens_per_s") for figures in found]
    if speeds[0] is None:
        return None
    full, paper_full = speeds[0], VARIANTS[0][2]
    rows = [
        [title, "-" if speed is None else f"{speed:.2f}", percent(ratio(speed, full)), f"{paper:.2f}",
         percent(paper / paper_full)]
        for (title, _, paper), speed in zip(VARIANTS, speeds, strict=True)
    ]  # fmt: skip
    section = Section(
        ("moe-speq", "tok/s", "of full", "paper: tok/s", "paper: of full"),
        rows,
        [
            Bars(
                "Speed, % of the full system's",
                "%",
                ("here", "paper"),
                tuple(
                    (title, (None if speed is None else 100 * speed / full, 100 * paper / paper_full))
                    for (title, _, paper), speed in zip(VARIANTS, speeds, strict=True)
                ),
            )
        ],
    )
    if speeds[1] is not None:
        lost = 1 - speeds[1] / full
        section.targets.append(
            Target(
                "asynchronous prefetch is worth more than the paper's 5.0 % of the speed",
                percent(lost),
                lost > 0.05,
            )
        )
        if lost <= 0.05:
            section.reasons.append(_why_little(run, lost))
    if speeds[2] is not None and 1 - speeds[2] / full < 1 - VARIANTS[2][2] / paper_full:
        section.reasons.append(_why_fused_matters_little(run))
    return section


def _why_little(run: Run, lost: float) -> str:
    """By the numbers of the full system and of the one without."""
    full = run.get(_cell(run.subject, VARIANTS[0][1]))
    without = run.get(_cell(run.subject, VARIANTS[1][1]))
    draft_s, verify_s = value(full, "draft_s_per_step") or 0.0, value(full, "verify_s_per_step") or 0.0
    fewer = ratio(value(without, "h2d_bytes_per_token"), value(full, "h2d_bytes_per_token"))
    drafting = draft_s / max(1e-9, draft_s + verify_s)
    text = f"Copies can hide behind drafting, which is {percent(drafting)} of a step here"
    if fewer is not None and fewer < 0.98:
        return f"{text}; without it {percent(1 - fewer)} fewer bytes are copied, as less is asked for ahead."
    return f"{text}; the difference of {percent(lost)} is what is left of that beside waiting for the link."


def _why_fused_matters_little(run: Run) -> str:
    figures = run.get(_cell(run.subject, VARIANTS[0][1]))
    draft_s, verify_s = value(figures, "draft_s_per_step") or 0.0, value(figures, "verify_s_per_step") or 0.0
    return (
        "The fused kernel is worth less than in the paper: drafting is "
        f"{percent(draft_s / max(1e-9, draft_s + verify_s))} of a step here, and its experts a part of that."
    )


_ABOUT = """\
The switches are the engine's own (localmoe/core/switches.py). Without asynchronous prefetch whoever asks
for experts ahead of need waits until they are copied. Without the fused kernel each draft expert's codes
are turned into numbers and multiplied by torch's operators, one expert after the other; the paper's
variant keeps INT4 products and launches them one by one. Slots as in table 3's high budget."""

TABLE4 = Table(
    "4",
    "What asynchronous prefetch and the fused kernel are worth",
    "MoE-SpeQ, table 4",
    _ABOUT,
    _cells,
    _section,
)
