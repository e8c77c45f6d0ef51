"""MoE-SpeQ, table 3: hit rates of caches and prefetch methods at three cache sizes. Measures nothing."""

from __future__ import annotations

from localmoe.tables.cells import LEVELS, Cell, Level, Subject
from localmoe.tables.row import Figures
from localmoe.tables.section import Bars, Section, Table, Target, percent, points, value
from localmoe.tables.store import Run

METHODS = ("on-demand", "on-demand, scaled", "single-sooner", "single-later", "moe-speq")
_TITLES = ("LRU", "LRU, same memory", "single prefetch, sooner", "single prefetch, later", "speculative")
# MoE-SpeQ, table 3: (cache size, hit rate in %) in the order of METHODS; DeepSeek-V2-Lite, 64 experts, top 6
PAPER: dict[Level, tuple[tuple[int, float], ...]] = {
    "low": ((6, 29.2), (22, 61.13), (6, 96.04), (6, 96.33), (6, 99.85)),
    "medium": ((16, 50.94), (32, 76.56), (16, 95.44), (16, 95.46), (16, 98.62)),
    "high": ((32, 76.56), (48, 95.77), (32, 91.98), (32, 95.9), (32, 96.25)),
}


def _cell(subject: Subject, level: Level, method: str) -> Cell:
    scaled = method.endswith(", scaled")
    slots = subject.slots_without_draft(level) if scaled else subject.slots(level)
    return Cell(subject.mixed, method.removesuffix(", scaled"), subject.draft_length, slots)


def _cells(subject: Subject) -> list[Cell]:
    return [_cell(subject, level, method) for level in LEVELS for method in METHODS]


def _section(run: Run) -> Section | None:
    subject, rows, section = run.subject, [], Section((), [])
    groups = []
    for level in LEVELS:
        ours: list[float | None] = []
        theirs: list[float | None] = []
        for method, title, (size, paper) in zip(METHODS, _TITLES, PAPER[level], strict=True):
            cell = _cell(subject, level, method)
            found = run.get(cell)
            hit, late = value(found, "hit_rate"), value(found, "late_rate")
            arriving = None if hit is None or late is None else hit + late
            coverage = value(found, "coverage_rate")
            a_layer = f"{cell.num_slots / subject.num_layers:.4g} of {subject.num_experts}"
            rows.append(
                [f"{level}: {title}", a_layer, percent(hit, 2), percent(arriving, 2), percent(coverage, 2),
                 f"{size} of 64", points(paper)]
            )  # fmt: skip
            ours.append(None if hit is None else 100 * hit)
            theirs.append(paper)
            if method == "moe-speq" and found is not None:
                for kind, share in (("present when asked for", hit), ("covered", coverage)):
                    text = (
                        f"speculative, {level} budget: {percent(share, 2)} {kind}, the paper {points(paper)}"
                    )
                    section.targets.append(Target(text, share is not None and 100 * share >= paper))
                section.reasons += [f"{level}: {text}" for text in why_not_covered(found, paper, subject)]
        if any(v is not None for v in ours):
            groups += [(f"{level}, here", tuple(ours)), (f"{level}, paper", tuple(theirs))]
    if not groups:
        return None
    section.columns = (
        "budget: method", "slots a layer", "present when asked for", "present or arriving", "covered",
        "paper: slots", "paper: hit rate",
    )  # fmt: skip
    section.rows = rows
    section.charts = [Bars("Experts present when asked for, %", "%", _TITLES, tuple(groups))]
    return section


def why_not_covered(found: Figures, paper: float, subject: Subject) -> list[str]:
    """What keeps the share of experts that are present below the paper's, largest part first."""
    hit, late = value(found, "hit_rate") or 0.0, value(found, "late_rate") or 0.0
    coverage = value(found, "coverage_rate") or 0.0
    if 100 * hit >= paper:
        return []
    window = subject.draft_length + 1
    parts = [
        (
            1 - coverage,
            f"were neither here nor named by the draft: its routing is known for {subject.draft_length} of "
            f"the {window} tokens that a step verifies, as the last drafted token is not run through the "
            "draft, and it does not choose the target's experts every time",
        ),
        (late, "were on their way and had not arrived"),
        (
            max(0.0, coverage - hit - late),
            "had been named and not been asked for by then, or had lost their slot again: a window of "
            f"{window} tokens asks for more experts than the link copies meanwhile, or than there are slots",
        ),
    ]
    listed = [f"{percent(share)} {text}" for share, text in sorted(parts, reverse=True) if share >= 0.005]
    return ["of the experts asked for, " + "; ".join(listed) + "."] if listed else []


_ABOUT = """\
The paper counts, for DeepSeek-V2-Lite, the share of a step's required experts that the cache holds. Its
text leaves open when it looks, so three shares are given, of every (step, layer, distinct expert):
present when its layer asks for it (the strict one); present or on its way
then; and covered: that, or named by the draft's routing of the same window. All methods verify the same
windows. Cache sizes are as far between the experts of one token and all of them as the paper's; "same
memory" adds the slots that fit where the draft would lie, as the paper's scaled LRU does. What the paper
calls single prefetch it does not define; here it is one round a step, for the first drafted token as soon
as it is routed (sooner), or for all of them when drafting is over (later), with LRU."""

TABLE3 = Table(
    "3",
    "Hit rates by prefetch method and cache size",
    "MoE-SpeQ, table 3",
    _ABOUT,
    _cells,
    _section,
)
