"""MoE-SpeQ, figure 13: time per output token by system, prompts and memory. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence

from localmoe.core.config import DraftLength
from localmoe.tables.cells import RESIDENT, Cell, Level, Subject
from localmoe.tables.datasets import title_of
from localmoe.tables.section import Bars, Section, Table, Target, mean, ms, ratio, times, value
from localmoe.tables.store import Run

MEMORIES: tuple[Level, ...] = ("low", "high")
# (name, policy, whether it drafts, whether its slots are those that fit where the draft would lie)
SYSTEMS: tuple[tuple[str, str, bool | str, bool], ...] = (
    ("on-demand, same cache", "on-demand", False, False),
    ("on-demand, same memory", "on-demand", False, True),
    ("on-demand with drafting", "on-demand", True, False),
    ("moe-infinity with drafting", "moe-infinity", True, False),
    ("adapmoe with drafting", "adapmoe", True, False),
    ("sp-moe", "sp-moe", True, False),
    ("moe-speq", "moe-speq", True, False),
    ("moe-speq, draft length auto", "moe-speq", "auto", False),
)
BOUNDS = (("resident", False), ("resident with drafting", True))
RIVALS = ("on-demand with drafting", "moe-infinity with drafting", "adapmoe with drafting")
# MoE-SpeQ 4.2, high memory, A100-40G: ms a token, as far as the text gives them
PAPER = (
    ("Phi-3.5-MoE", 163.1, 351.8, 536.7, 960.5),
    ("Qwen1.5-MoE", 74.1, None, 2.5 * 74.1, 3.5 * 74.1),
)
BEST_RATIO = 2.34  # abstract: over the best offloading system


def cell_of(subject: Subject, system: str, dataset: str, level: Level) -> Cell:
    """A system's cell."""
    _, policy, drafts, wide = next(entry for entry in SYSTEMS if entry[0] == system)
    length: DraftLength = "auto" if drafts == "auto" else subject.draft_length if drafts else 0
    slots = subject.slots_without_draft(level) if wide else subject.slots(level)
    return Cell(dataset, policy, length, slots)


def resident_cell(subject: Subject, dataset: str, *, drafts: bool) -> Cell:
    """Nothing is ever missing: the bound of offloading."""
    return Cell(dataset, RESIDENT, subject.draft_length if drafts else 0, subject.total_experts)


def _cells(subject: Subject) -> list[Cell]:
    offloaded = [
        cell_of(subject, system, dataset, level)
        for level in MEMORIES
        for dataset in subject.datasets
        for system, *_ in SYSTEMS
    ]
    resident = [
        resident_cell(subject, dataset, drafts=drafts) for dataset in subject.datasets for _, drafts in BOUNDS
    ]
    return [*offloaded, *resident]


def _tpots(run: Run, cells: Sequence[Cell]) -> list[float | None]:
    """By dataset, and the average of those that ran."""
    found = [value(run.get(cell), "tpot_s") for cell in cells]
    return [*found, mean(found)]


def _resident_rows(run: Run) -> list[list[str]]:
    """What ran of them; no system is compared with these."""
    rows = []
    for system, drafts in BOUNDS:
        cells = [resident_cell(run.subject, name, drafts=drafts) for name in run.subject.datasets]
        row = _tpots(run, cells)
        if row[-1] is not None:
            rows.append([f"all experts: {system}", *(ms(tpot) for tpot in row), "-"])
    return rows


def _section(run: Run) -> Section | None:
    subject = run.subject
    names = [*(title_of(name) for name in subject.datasets), "average"]
    section = Section(("memory: system", *names, "moe-speq is"), [])
    for level in MEMORIES:
        found = {
            system: _tpots(run, [cell_of(subject, system, name, level) for name in subject.datasets])
            for system, *_ in SYSTEMS
        }
        if all(row[-1] is None for row in found.values()):
            continue
        best = _best(found)
        for system, row in found.items():
            faster = ratio(row[-1], best[-1])
            section.rows.append([f"{level}: {system}", *(ms(tpot) for tpot in row), times(faster)])
        section.charts.append(_chart(found, names, level))
        section.targets += _targets(found, best, names, level)
        section.reasons += _reasons(run, found, best, level)
        if (_gain(found, best) or BEST_RATIO) < BEST_RATIO:
            section.reasons += _most_to_gain(run, level)
    if section.rows:
        section.rows += _resident_rows(run)
    return section if section.rows else None


def _best(found: dict[str, list[float | None]]) -> list[float | None]:
    """moe-speq with whichever draft length was faster, by dataset: the length is its own choice."""
    fixed, auto = found["moe-speq"], found["moe-speq, draft length auto"]
    return [min((t for t in pair if t is not None), default=None) for pair in zip(fixed, auto, strict=True)]


def _chart(found: dict[str, list[float | None]], names: list[str], level: Level) -> Bars:
    systems = tuple(found)
    groups = [
        (name, tuple(None if row[i] is None else 1e3 * (row[i] or 0.0) for row in found.values()))
        for i, name in enumerate(names)
    ]
    return Bars(f"Time per output token, ms: {level} memory", "ms", systems, tuple(groups))


def _targets(
    found: dict[str, list[float | None]], best: list[float | None], names: list[str], level: Level
) -> list[Target]:
    targets = []
    for rival in RIVALS:
        pairs = [(n, a, b) for n, a, b in zip(names, best, found[rival], strict=True) if a and b]
        if pairs:
            lost = [name for name, ours, theirs in pairs if ours >= theirs]
            figure = times(ratio(found[rival][-1], best[-1]))
            figure += f", not on {', '.join(lost)}" if lost else ""
            targets.append(Target(f"{level} memory: faster than {rival}, everywhere", figure, not lost))
    gain = _gain(found, best)
    if gain is not None:
        goal = f"{level} memory: {BEST_RATIO} x over on-demand with drafting at the same memory"
        targets.append(Target(f"{goal}, the paper's best", times(gain), gain >= BEST_RATIO))
    return targets


def _gain(found: dict[str, list[float | None]], best: list[float | None]) -> float | None:
    """Of the paper's claim: over drafting on demand, on average."""
    return ratio(found[RIVALS[0]][-1], best[-1])


def _reasons(
    run: Run, found: dict[str, list[float | None]], best: list[float | None], level: Level
) -> list[str]:
    """Where another system is the fastest: by what differs from it."""
    reasons = []
    for i, dataset in enumerate(run.subject.datasets):
        here = {system: tpot for system, row in found.items() if (tpot := row[i]) is not None}
        mine = best[i]
        if mine is None or mine <= min(here.values()):
            continue
        fastest = min(here, key=lambda system: here[system])
        why = _what_differs(run, level, dataset, fastest)
        gain = times(mine / here[fastest])
        reasons.append(f"{level} memory, {title_of(dataset)}: {fastest} is {gain} as fast: {why}.")
    return reasons


def _most_to_gain(run: Run, level: Level) -> list[str]:
    """How much faster drafting on demand would be if its copies cost nothing but the link's time: what any
    order of the same copies is bounded by. A share s of its time is spent waiting for copies that run beside
    nothing; at best they all run beside the rest, and 1 / max(s, 1 - s) is gained. Nothing is said of whole
    passes measured on a GPU: the CPU computes a part of it, and copies are faster than kernels that read."""
    if run.subject.whole_passes and run.subject.kind == "measured":
        return []
    shares = []
    for dataset in run.subject.datasets:
        figures = run.get(cell_of(run.subject, RIVALS[0], dataset, level))
        steps, stall_s = value(figures, "steps"), value(figures, "stall_s")
        parts = value(figures, "draft_s_per_step"), value(figures, "verify_s_per_step")
        if steps and stall_s is not None and parts[0] is not None and parts[1] is not None:
            shares.append(stall_s / (steps * (parts[0] + parts[1])))
    share = mean(shares)
    if share is None:
        return []
    most = 1 / max(share, 1 - share)
    return [
        f"{level} memory: {RIVALS[0]} waits for its copies in {100 * share:.0f} % of its time; were all of "
        f"them to run beside the rest of it, it would be {times(most)} as fast: more than that no order of "
        f"the same copies can bring, and {BEST_RATIO} x needs fewer copies or a slower rival."
    ]


def _what_differs(run: Run, level: Level, dataset: str, rival: str) -> str:
    ours = run.get(cell_of(run.subject, "moe-speq", dataset, level))
    theirs = run.get(cell_of(run.subject, rival, dataset, level))
    parts = []
    more = ratio(value(ours, "h2d_bytes_per_token"), value(theirs, "h2d_bytes_per_token"))
    if more is not None and more > 1.02:
        parts.append(f"moe-speq copies {100 * (more - 1):.0f} % more bytes a token")
    draft_s, verify_s = value(ours, "draft_s_per_step") or 0.0, value(ours, "verify_s_per_step") or 0.0
    if draft_s > 0.25 * verify_s and "drafting" not in rival:
        parts.append(f"drafting takes {100 * draft_s / (draft_s + verify_s):.0f} % of a step")
    if "same memory" in rival:
        parts.append("without a draft more experts have slots")
    return "; ".join(parts) or "its bytes and passes are no fewer, so that this is what times vary by here"


_PAPER_TEXT = "; ".join(
    f"{name}: {ours:.1f} ms, Mixtral-Offloading at the same memory {'-' if sm is None else f'{sm:.1f}'}, at "
    f"the same cache {sc:.1f}, Transformers {hf:.1f}"
    for name, ours, sm, sc, hf in PAPER
)
FIG13 = Table(
    "fig13",
    "Time per output token by system",
    "MoE-SpeQ, figure 13",
    "Every system on this engine: its policy alone differs. On-demand is Mixtral-Offloading's cache; at "
    "the same memory it has the slots that fit where the draft would lie. SP-MoE's rivals draft as it "
    "does. Low and high are "
    'table 3\'s budgets. "moe-speq is" compares with the faster of its two rows; targets do too, as the '
    "governor is part of MoE-SpeQ. Resident has all experts in memory from the beginning, the others begin "
    "with none: the bound of systems without drafting, and with. GPQA's authors ask that its questions not "
    "be published: MT-Bench stands in for it. Transformers' own offloading: benchmarks/end_to_end.py. "
    f"The paper's figures that its text gives (high memory, A100-40G): {_PAPER_TEXT}; DeepSeek-V2-Lite: 4.8 "
    "times the speed of Transformers. Other machines and models than here, so ratios are what can be "
    "compared.",
    _cells,
    _section,
)
