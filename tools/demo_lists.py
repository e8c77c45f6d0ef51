"""Reads the demo model's sentence and word lists from text files; what they mean is not its concern."""

from __future__ import annotations

from pathlib import Path

Section = tuple[list[str], list[str]]


def read_lines(name: str) -> list[str]:
    """The lines of a text file in this folder, comments left out."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


def read_sections(name: str) -> dict[str, Section]:
    """section -> (alternatives of its `?` lines, its `!` lines), in the file's order."""
    sections: dict[str, Section] = {}
    current: Section = ([], [])
    for line in read_lines(name):
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), ([], []))
        elif line.startswith("? "):
            current[0].extend(line[2:].split(" | "))
        elif line.startswith("! "):
            current[1].append(line[2:].replace("\\n", "\n"))
    return sections


def read_words(name: str) -> dict[str, list[str]]:
    """section -> its alternatives, for files without answers."""
    return {section: asked for section, (asked, _) in read_sections(name).items()}


def read_pairs(section: Section) -> dict[str, str]:
    """The `thing = answer` alternatives of a section."""
    return dict(item.split(" = ", 1) for item in section[0])


def read_plots(name: str) -> dict[str, list[list[list[str]]]]:
    """section -> plots -> sentence groups -> alternatives; one that starts with / begins a paragraph."""
    sections: dict[str, list[list[list[str]]]] = {}
    plots: list[list[list[str]]] = []
    for line in read_lines(name):
        if line.startswith("["):
            plots = sections.setdefault(line.strip("[]"), [])
            plots.append([])
        elif not line:
            if plots and plots[-1]:
                plots.append([])
        else:
            alternatives = [a.replace("/ ", "\n", 1) if a.startswith("/ ") else a for a in line.split(" | ")]
            plots[-1].append(alternatives)
    return {section: [plot for plot in plots if plot] for section, plots in sections.items()}
