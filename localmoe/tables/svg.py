"""Charts as SVG: grouped bars and lines, the same bytes for the same figures. Knows no table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from localmoe.tables.section import Bars, Chart, Lines

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
_LEAST = 1e-300
_LETTER = 6.2  # average width of a letter at 11 px
_LABEL_ROOM = 240  # most for the names of groups
_BAR, _GAP = 12, 10
_PLOT = 480  # width of the plot
_LINES_HEIGHT = 240
_STYLE = "font-family:system-ui,sans-serif;font-size:11px;fill:#333"


def draw(chart: Chart) -> str:
    """The chart as an SVG document."""
    return _draw_bars(chart) if isinstance(chart, Bars) else _draw_lines(chart)


def nice_ticks(highest: float) -> list[float]:
    """From 0 to at least `highest` in 4 to 10 round steps; [0, 1] of nothing, and of next to nothing."""
    if not highest > _LEAST:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(highest / 4))
    step *= next((factor for factor in (1, 2, 2.5, 5, 10) if highest / (factor * step) <= 8), 10)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _draw_bars(chart: Bars) -> str:
    longest = max((len(name) for name, _ in chart.groups), default=0)
    left = min(_LABEL_ROOM, int(longest * _LETTER)) + 16
    legend, legend_height = _legend(chart.series, left + _PLOT + 60)
    ticks = nice_ticks(max((v for _, row in chart.groups for v in row if v is not None), default=0.0))
    parts, y = [], 30 + legend_height
    top = y
    for name, row in chart.groups:
        height = _BAR * len(row)
        parts.append(_text(left - 6, y + height / 2 + 4, name, anchor="end"))
        for i, number in enumerate(row):
            at = y + i * _BAR
            if number is None:
                parts.append(_text(left + 3, at + 10, "-", size=10))
                continue
            width = _PLOT * number / ticks[-1]
            colour = COLOURS[i % len(COLOURS)]
            size = f'width="{width:.1f}" height="{_BAR - 2}" fill="{colour}"'
            parts.append(f'<rect class="bar" x="{left}" y="{at}" {size}/>')
            parts.append(_text(left + width + 4, at + 9, _short(number), size=10))
        y += height + _GAP
    axis = []
    for t in ticks:
        x = left + _PLOT * t / ticks[-1]
        axis.append(
            f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{y - _GAP + 4}" stroke="#ddd"/>'
            + _text(x, y + 8, _short(t), "middle")
        )
    return _document(left + _PLOT + 60, y + 18, chart.title, [*legend, *axis, *parts])


def _draw_lines(chart: Lines) -> str:
    left, top = 56, 48
    legend, legend_height = _legend([name for name, _ in chart.lines], left + _PLOT + 40)
    top += legend_height
    places = [point for _, points in chart.lines for point in points]
    far = max((x for x, _ in places), default=1.0) or 1.0
    ticks = nice_ticks(max((y for _, y in places), default=0.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return left + _PLOT * x / far, top + _LINES_HEIGHT * (1 - y / ticks[-1])

    parts = []
    for t in ticks:
        _, y = at(0, t)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + _PLOT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(left - 6, y + 4, _short(t), "end"))
    for x in sorted({x for x, _ in places}):
        parts.append(_text(at(x, 0)[0], top + _LINES_HEIGHT + 16, _short(x), "middle"))
    parts.append(_text(left + _PLOT / 2, top + _LINES_HEIGHT + 34, chart.x_label, "middle"))
    parts.append(_text(left - 6, top - 10, chart.y_label, "end"))
    for i, (_, points) in enumerate(chart.lines):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in (at(*point) for point in points):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    return _document(left + _PLOT + 40, top + _LINES_HEIGHT + 44, chart.title, [*legend, *parts])


def _legend(names: Sequence[str], width: int) -> tuple[list[str], int]:
    """Its elements, and how high they are; none for one name."""
    if len(names) < 2:
        return [], 0
    parts: list[str] = []
    x, y = 12.0, 32
    for i, name in enumerate(names):
        wide = 18 + len(name) * _LETTER + 14
        if x + wide > width and x > 12:
            x, y = 12.0, y + 16
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(_text(x + 14, y + 9, name))
        x += wide
    return parts, y + 14 - 30 + 8


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    resized = "" if size == 11 else f' style="font-size:{size}px"'
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{place}{resized}>{escape(text)}</text>'


def _short(number: float) -> str:
    """Four digits that matter."""
    if number == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(number))))
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _document(width: int, height: float, title: str, parts: Sequence[str]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" style="{_STYLE}" role="img">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="12" y="18" style="font-size:13px;font-weight:600">{escape(title)}</text>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
