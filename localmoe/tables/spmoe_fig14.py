"""SP-MoE, figure 14: time per output token over the cutoff layer. Measures nothing."""

from __future__ import annotations

from localmoe.tables.cells import Cell, Subject
from localmoe.tables.section import Lines, Section, Table, ms, percent, value
from localmoe.tables.store import Run

_MOST_POINTS = 8


def cutoffs(num_layers: int) -> list[int]:
    """From none to all layers, at most eight, evenly."""
    count = min(_MOST_POINTS, num_layers + 1)
    return sorted({round(i * num_layers / (count - 1)) for i in range(count)})


def _cell(subject: Subject, cutoff: int | None) -> Cell:
    policy = "sp-moe" if cutoff is None else f"sp-moe@{cutoff}"
    return Cell(subject.mixed, policy, subject.draft_length, subject.slots("high"))


def _cells(subject: Subject) -> list[Cell]:
    return [_cell(subject, cutoff) for cutoff in (*cutoffs(subject.num_layers), None)]


def _section(run: Run) -> Section | None:
    subject = run.subject
    points, rows = [], []
    for cutoff in (*cutoffs(subject.num_layers), None):
        figures = run.get(_cell(subject, cutoff))
        tpot, copied = value(figures, "tpot_s"), value(figures, "h2d_bytes_per_token")
        if tpot is None:
            continue
        name = "as solved by the policy" if cutoff is None else f"{cutoff} of {subject.num_layers}"
        megabytes = "-" if copied is None else f"{copied / 1e6:.2f}"
        rows.append([name, ms(tpot), percent(value(figures, "hit_rate")), megabytes])
        if cutoff is not None:
            points.append((float(cutoff), 1e3 * tpot))
    if len(points) < 2:
        return None
    section = Section(
        ("layers prefetched for", "time per token", "hit rate", "MB copied a token"),
        rows,
        [
            Lines(
                "Time per output token over the cutoff layer",
                "cutoff layer",
                "ms",
                (("here", tuple(points)),),
            )
        ],
    )
    best = min(points, key=lambda point: point[1])
    last = points[-1]
    if best == last:
        shape = "It falls to the last layer, as the paper's for DeepSeek (small experts)."
    elif best == points[0]:
        shape = (
            "It is best without prefetching: what drafting foretells is copied no earlier than it is "
            "needed, or displaces what is needed sooner."
        )
    else:
        shape = (
            f"It is lowest at {best[0]:.0f} of {subject.num_layers} layers and "
            f"{100 * (last[1] / best[1] - 1):.0f} % higher with all, the paper's U shape for large experts "
            "(Mixtral, Phi: near 20 layers)."
        )
    section.reasons.append(shape)
    return section


SP_FIG14 = Table(
    "fig14",
    "Time per output token over the cutoff layer",
    "SP-MoE, figure 14",
    "sp-moe with its cutoff held at so many layers, and as it solves it itself from measured rates. The "
    "paper gives curves and no figures: a U with its lowest point near layer 20 for Mixtral and Phi-MoE, "
    "falling throughout for DeepSeek. Slots as in MoE-SpeQ's high budget.",
    _cells,
    _section,
)
