"""Bar charts of a result as SVG, for the page and to share: own text and shapes only, nothing is fetched.
Computes no figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from app.bench.results import Result, date_of, machine_of
from app.texts import ENGLISH, Texts

WIDTH = 760
_NAMES, _VALUES = 250, 80  # columns left and right of the bars, px
_ROW, _HEAD = 22, 30
_FONT = "system-ui, 'Segoe UI', 'Noto Sans', 'Noto Sans CJK SC', sans-serif"


@dataclass(frozen=True, slots=True)
class Palette:
    """CSS colours."""

    text: str
    muted: str
    bar: str
    other: str
    ground: str


IN_PAGE = Palette("var(--lm-text)", "var(--lm-muted)", "var(--lm-hit)", "var(--lm-cpu)", "none")
TO_SHARE = Palette("#18212f", "#5a6779", "#0fa372", "#3f6fd1", "#ffffff")


def charts_svg(result: Result, palette: Palette = IN_PAGE, t: Texts = ENGLISH) -> str:
    """Tokens a second and hit rate of every row; one to share says what and where it was."""
    rows, shared = result["rows"], palette is TO_SHARE
    predicted = bool(result.get("predicted"))
    kind = t("predicted") if predicted else t("measured")
    head = _titles(result, kind, palette, t) if shared else []
    top = 14 + 20 * len(head)
    speeds = _bars(rows, "tokens_per_s", f"{t('tokens/s')} ({kind})", _speed, palette.bar, palette, top)
    top += _HEAD + _ROW * len(rows) + 12
    hits = _bars(rows, "hit_rate", f"{t('Hit rate')} ({kind})", _percent, palette.other, palette, top)
    height = top + _HEAD + _ROW * len(rows) + 8
    label = t("Tokens a second and hit rate of {count} settings", count=len(rows))
    ground = "" if palette.ground == "none" else f'<rect width="100%" height="100%" fill="{palette.ground}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(label)}" font-family="{_FONT}">'
        f"{ground}{''.join(head)}{speeds}{hits}</svg>"
    )


def row_name(row: Mapping[str, object]) -> str:
    """ "moe-speq, 4", for a card "rtx-4090 · moe-speq, 4"."""
    name = f"{row['policy']}, {row['draft_length']}"
    return f"{row['card']} · {name}" if "card" in row else name


def _titles(result: Result, kind: str, palette: Palette, t: Texts) -> list[str]:
    engine = result["engine"]
    lines = [
        f"localmoe {result['localmoe']} · {result['model']} · {kind} · {date_of(result)}",
        machine_of(result),
        " · ".join(str(engine.get(name, "")) for name in ("device", "dtype", "draft") if engine.get(name)),
    ]
    weights = (600, 400, 400)
    colours = (palette.text, palette.muted, palette.muted)
    return [
        _text(12, 24 + 20 * i, line[:110], colour, weight=weight, size=14 if i == 0 else 12)
        for i, (line, colour, weight) in enumerate(zip(lines, colours, weights, strict=True))
    ]


def _bars(
    rows: Sequence[Mapping[str, object]],
    key: str,
    title: str,
    shown: Callable[[float], str],
    colour: str,
    palette: Palette,
    top: int,
) -> str:
    values = [value if isinstance(value := row.get(key), int | float) else None for row in rows]
    most = max([value for value in values if value is not None], default=0.0) or 1.0
    if key == "hit_rate":
        most = 1.0
    room = WIDTH - _NAMES - _VALUES
    parts = [_text(12, top + 18, title, palette.text, weight=600, size=13)]
    for number, (row, value) in enumerate(zip(rows, values, strict=True)):
        y = top + _HEAD + _ROW * number
        parts.append(_text(_NAMES - 8, y + 14, row_name(row), palette.text, anchor="end"))
        width = 0.0 if value is None else max(1.0, room * value / most)
        parts.append(
            f'<rect x="{_NAMES}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 7}" rx="3" fill="{colour}"/>'
        )
        label = "—" if value is None else shown(value)
        parts.append(_text(_NAMES + width + 6, y + 14, label, palette.muted))
    return "".join(parts)


def _text(
    x: float, y: float, text: str, colour: str, *, anchor: str = "start", weight: int = 400, size: int = 12
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _speed(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
