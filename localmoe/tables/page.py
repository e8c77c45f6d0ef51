"""The page docs/results.md and its charts, from a results file: the same bytes for the same results.
Computes no figure itself (the tables do)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from localmoe.core.errors import ConfigError
from localmoe.tables.cells import Subject
from localmoe.tables.registry import TABLES
from localmoe.tables.running import differing
from localmoe.tables.section import Section, Table
from localmoe.tables.sharing import sharing_section
from localmoe.tables.store import Results, Run, write_text
from localmoe.tables.svg import draw

_HEAD = """\
# The papers' tables, measured here

Made by `localmoe bench tables --render docs/results.md docs/results.json`; the figures are those of `localmoe
bench tables` on the machines named below. What is emulated, synthetic or predicted is called so. The papers:
MoE-SpeQ (speculative quantised decoding with expert prefetching) and SP-MoE (speculative decoding with expert
prefetching). Their figures stand beside ours, also where ours are worse, with the reason the numbers give.
"""


def render(results: Results, page: Path) -> list[Path]:
    """Write the page, and its charts into the folder charts beside it; what was written.

    Raises:
        ConfigError: there are no results, or a file cannot be written.
    """
    if not results.runs and not results.sharing:
        raise ConfigError("There are no results to render: run 'localmoe bench tables --json FILE' first.")
    text, charts = compose(results)
    folder = page.parent / "charts"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be made: {error.strerror}.") from None
    for name, chart in charts.items():
        write_text(folder / name, chart)
    write_text(page, text)
    return [page, *(folder / name for name in charts)]


def compose(results: Results) -> tuple[str, dict[str, str]]:
    """The page's text, and the charts by file name."""
    charts: dict[str, str] = {}
    sections = list(_sections(results))
    lines = [
        _HEAD,
        "## Machines",
        *_machines(results),
        "## What was to be reached",
        *_targets(results, sections),
    ]
    for table in TABLES.values():
        found = [(run, section) for of, run, section in sections if of is table]
        if not found:
            continue
        lines += [f"## {table.title}", f"*{table.source}.* {table.about}"]
        note = results.notes.get(table.name)
        lines += [note] if note else []
        for run, section in found:
            lines += _shown(table, run, section, charts)
    return "\n\n".join(line.strip("\n") for line in lines) + "\n", charts


def _sections(results: Results) -> Iterator[tuple[Table, Run | None, Section]]:
    for table in TABLES.values():
        if table.name == "2":
            if results.sharing:
                yield table, None, sharing_section(results.sharing, results.runs)
            continue
        for run in results.runs:
            section = table.section(run)
            if section is not None:
                yield table, run, section


def _machines(results: Results) -> list[str]:
    lines = []
    for number, run in enumerate(results.runs, 1):
        s = run.subject
        routing = f"; synthetic: {s.synthetic}" if s.synthetic else ""
        busy = f"; {run.load}" if s.kind == "measured" else ""
        count = f"{s.prompts} prompt{'' if s.prompts == 1 else 's'}"
        asked = f"{count} of each of {', '.join(s.datasets)}"
        if s.synthetic:
            asked = f"{count} of random tokens"
        lines.append(
            f"{number}. **{s.label}**: {s.machine}; {s.dtype}, link: {s.link}, draft: {s.draft}, "
            f"{s.passes}{routing}; {asked}, "
            f"{s.max_new_tokens} tokens an answer, {s.draft_length} drafted tokens a step where not said "
            f"otherwise; {_identical(run)}{busy}"
        )
    entries = [figures for run in results.runs for figures in run.cells.values()]
    refused = sorted({str(figures["refused"]) for figures in entries if "refused" in figures})
    return ["\n".join(lines), *([f"Not run: {' '.join(refused)}"] if refused else [])]


def _identical(run: Run) -> str:
    """Whether all settings gave the same tokens."""
    synthetic = run.subject.synthetic
    if synthetic and not synthetic.endswith("acceptance of random weights"):
        return "acceptance is simulated, so tokens are not compared"
    different = differing(run)
    if different:
        return f"SETTINGS GAVE DIFFERENT TOKENS on {', '.join(different)}"
    return "all settings gave the same tokens"


def _targets(results: Results, sections: list[tuple[Table, Run | None, Section]]) -> list[str]:
    """A row a goal, a column a run; what no run decides in lines of its own."""
    alone, goals = [], dict[tuple[str, str], dict[int, str]]()
    for table, run, section in sections:
        for target in section.targets:
            if run is None:
                alone.append(
                    f"{table.source}: {target.text} ({'reached' if target.met else '**not reached**'})."
                )
                continue
            number = 1 + next(i for i, r in enumerate(results.runs) if r is run)
            figure = _cell(target.figure)
            goals.setdefault((table.source, target.goal), {})[number] = (
                figure if target.met else f"**{figure}**"
            )
    if not goals:
        return alone
    numbers = sorted({number for found in goals.values() for number in found})
    lines = [
        "| table | to reach | " + " | ".join(f"run {number}" for number in numbers) + " |",
        "|---|---|" + "---:|" * len(numbers),
        *(
            f"| {source} | {_cell(goal)} | " + " | ".join(found.get(number, "-") for number in numbers) + " |"
            for (source, goal), found in goals.items()
        ),
    ]
    return [*alone, "By run, as numbered above; what does not reach it is bold.", "\n".join(lines)]


def _shown(table: Table, run: Run | None, section: Section, charts: dict[str, str]) -> list[str]:
    slug = "shape" if run is None else _slug(run.subject)
    lines = [] if run is None else [f"### {run.subject.label}"]
    columns = [_cell(column) for column in section.columns]
    head = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    body = ["| " + " | ".join(_cell(entry) for entry in row) + " |" for row in section.rows]
    lines.append("\n".join([*head, *body]))
    for number, chart in enumerate(section.charts, 1):
        more = f"-{number}" if len(section.charts) > 1 else ""
        name = f"{table.name}-{slug}{more}.svg"
        while name in charts:  # the same subject with other settings
            name = name.removesuffix(".svg") + "x.svg"
        charts[name] = draw(chart)
        lines.append(f"![{chart.title}](charts/{name})")
    if section.reasons:
        lines.append("\n".join(f"- {reason}" for reason in section.reasons))
    return lines


def _slug(subject: Subject) -> str:
    """A file name for a subject."""
    return re.sub(r"[^a-z0-9]+", "-", f"{subject.name} {subject.device.partition(':')[0]}".lower()).strip("-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
