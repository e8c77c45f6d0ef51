"""MoE-SpeQ, table 3: hit rates of caches and prefetch methods at three cache sizes. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from localmoe.core.switches import DEFAULT_SWITCHES, Switches
from localmoe.engine.bench_row import Summary
from localmoe.tables.cells import LEVELS, Cell, Level, Subject
from localmoe.tables.section import Bars, Section, Table, Target, ms, percent, points, value
from localmoe.tables.store import Run


@dataclass(frozen=True, slots=True)
class Method:
    """A row of each budget. wide: with the slots that fit where the draft would lie."""

    title: str
    policy: str
    wide: bool = False
    switches: Switches = DEFAULT_SWITCHES


METHODS = (
    Method("LRU", "on-demand"),
    Method("LRU, same memory", "on-demand", wide=True),
    Method("single prefetch, sooner", "single-sooner"),
    Method("single prefetch, later", "single-later"),
    Method("speculative", "moe-speq"),
    Method("speculative, whole window routed", "moe-speq", switches=Switches(whole_window=True)),
)
# MoE-SpeQ, table 3: (cache size, hit rate in %) in the order of METHODS but the last, which it does not have;
# DeepSeek-V2-Lite, 64 experts, top 6
PAPER: dict[Level, tuple[tuple[int, float], ...]] = {
    "low": ((6, 29.2), (22, 61.13), (6, 96.04), (6, 96.33), (6, 99.85)),
    "medium": ((16, 50.94), (32, 76.56), (16, 95.44), (16, 95.46), (16, 98.62)),
    "high": ((32, 76.56), (48, 95.77), (32, 91.98), (32, 95.9), (32, 96.25)),
}


def _cell(subject: Subject, level: Level, method: Method) -> Cell:
    slots = subject.slots_without_draft(level) if method.wide else subject.slots(level)
    return Cell(subject.mixed, method.policy, subject.draft_length, slots, method.switches)


def _cells(subject: Subject) -> list[Cell]:
    return [_cell(subject, level, method) for level in LEVELS for method in METHODS]


def _section(run: Run) -> Section | None:
    section = Section(
        (
            "budget: method", "slots a layer", "present when asked for", "present or arriving", "covered",
            "time per token", "paper: slots", "paper: hit rate",
        ),
        [],
    )  # fmt: skip
    groups = []
    for level in LEVELS:
        found = [run.get(_cell(run.subject, level, method)) for method in METHODS]
        hits = [value(figures, "hit_rate") for figures in found]
        papers = [*PAPER[level], None]
        for method, figures, paper in zip(METHODS, found, papers, strict=True):
            section.rows.append(_row(run.subject, level, method, figures, paper))
        if any(hit is not None for hit in hits):
            here = tuple(None if hit is None else 100 * hit for hit in hits)
            groups.append((f"{level}, here", here))
            groups.append((f"{level}, paper", tuple(None if p is None else p[1] for p in papers)))
        _judge(section, run.subject, level, found)
    titles = tuple(method.title for method in METHODS)
    section.charts = [Bars("Experts present when asked for, %", "%", titles, tuple(groups))]
    return section if groups else None


def _row(
    subject: Subject, level: Level, method: Method, figures: Summary | None, paper: tuple[int, float] | None
) -> list[str]:
    hit, late = value(figures, "hit_rate"), value(figures, "late_rate")
    arriving = None if hit is None or late is None else hit + late
    a_layer = _cell(subject, level, method).num_slots / subject.num_layers
    size, rate = (f"{paper[0]} of 64", points(paper[1])) if paper else ("-", "-")
    return [
        f"{level}: {method.title}", f"{a_layer:.4g} of {subject.num_experts}", percent(hit, 2),
        percent(arriving, 2), percent(value(figures, "coverage_rate"), 2), ms(value(figures, "tpot_s")),
        size, rate,
    ]  # fmt: skip


def _judge(section: Section, subject: Subject, level: Level, found: list[Summary | None]) -> None:
    """Hold the better of the two speculative rows to the paper's, and say what it lacks."""
    ran = [
        (value(figures, "coverage_rate") or 0.0, method.title, figures)
        for method, figures in zip(METHODS, found, strict=True)
        if method.policy == "moe-speq" and figures is not None
    ]
    if not ran:
        return
    coverage, title, figures = max(ran, key=lambda entry: entry[0])
    paper = PAPER[level][-1][1]
    for kind, share in (("present when asked for", value(figures, "hit_rate")), ("covered", coverage)):
        goal = f"{level} budget: {points(paper)} {kind}, as the paper's"
        section.targets.append(Target(goal, percent(share, 2), share is not None and 100 * share >= paper))
    whole = title == METHODS[-1].title
    section.reasons += [f"{level}: {text}" for text in why_not_covered(figures, paper, subject, whole=whole)]


def why_not_covered(figures: Summary, paper: float, subject: Subject, *, whole: bool) -> list[str]:
    """What keeps the share of experts that are present below the paper's, largest part first."""
    hit, late = value(figures, "hit_rate") or 0.0, value(figures, "late_rate") or 0.0
    coverage = value(figures, "coverage_rate") or 0.0
    if 100 * hit >= paper:
        return []
    window = subject.draft_length + 1
    unforeseen = "were neither here nor named by the draft, whose experts are not always the target's"
    if not whole:
        known = f"{subject.draft_length} of the {window} tokens"
        unforeseen += f", and whose routing is known for {known} that a step verifies"
    parts = [
        (1 - coverage, unforeseen),
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
present when its layer asks for it (the strict one); present or on its way then; and covered: that, or
named by the draft's routing of the same window. All methods verify the same windows. Cache sizes are as
far between the experts of one token and all of them as the paper's; "same memory" adds the slots that fit
where the draft would lie, as the paper's scaled LRU does. What the paper calls single prefetch it does
not define; here it is one round a step, for the first drafted token as soon as it is routed (sooner), or
for all of them when drafting is over (later), with an LRU a layer. The last row of a budget is ours: the
draft runs its last token too, so that the routing of every token of the window is known, at the price of
one more draft pass a step."""

TABLE3 = Table(
    "3",
    "Hit rates by prefetch method and cache size",
    "MoE-SpeQ, table 3",
    _ABOUT,
    _cells,
    _section,
)
