"""One step of an answer drawn as lanes over time, and in words. Draws what was recorded and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app import words
from app.texts import ENGLISH, Texts
from localmoe.core.timeline import LANES, Lane, Span, StepSpans
from localmoe.core.units import format_bytes

LANE_NAMES: dict[Lane, str] = {
    "draft": "draft", "verify": "16-bit model", "cpu": "experts on the CPU", "stall": "waiting",
    "copies": "copies", "host": "host",
}  # fmt: skip
_WIDTH, _ROW, _LABEL = 264, 16, 104
_LEAST_WIDTH = 0.5  # of what is drawn; shorter spans are widened to it
_MAX_SPANS = 600  # drawn; the shortest are left out beyond


def last_step(steps: Sequence[StepSpans]) -> StepSpans | None:
    """The last one that is a step and no prompt; else the last prompt."""
    return next((step for step in reversed(steps) if step.name != "prompt"), steps[-1] if steps else None)


def step_words(step: StepSpans, t: Texts = ENGLISH) -> str:
    """What the picture shows: how long each lane was at work, and what was copied."""
    parts = [
        f"{t(LANE_NAMES[lane])} {words.seconds(seconds)}"
        for lane in LANES
        if (seconds := busy_s([span for span in step.spans if span.lane == lane]))
    ]
    text = f"{_name(step, t)}, {words.seconds(step.end_s - step.start_s)}: {', '.join(parts)}"
    copies = [span.num_bytes for span in step.spans if span.lane == "copies"]
    if copies:
        text += "; " + t("{count} copies, {size}", count=len(copies), size=format_bytes(sum(copies)))
    return text


def step_svg(step: StepSpans, t: Texts = ENGLISH) -> str:
    """The picture; what each span is shows on hover."""
    lanes = [lane for lane in LANES if any(span.lane == lane for span in step.spans)]
    length = max(step.end_s - step.start_s, 1e-9)
    scale = (_WIDTH - _LABEL) / length
    height = _ROW * len(lanes) + 4
    parts = [
        f'<text x="0" y="{_ROW * row + 12}">{escape(t(LANE_NAMES[lane]))}</text>'
        f'<line x1="{_LABEL}" x2="{_WIDTH}" y1="{_ROW * (row + 1)}" y2="{_ROW * (row + 1)}"/>'
        for row, lane in enumerate(lanes)
    ]
    longest = sorted(step.spans, key=lambda span: span.start_s - span.end_s)[:_MAX_SPANS]
    for span in sorted(longest, key=lambda span: (span.start_s, -span.end_s)):
        start = max(span.start_s, step.start_s)  # a copy may have begun before
        x = _LABEL + (start - step.start_s) * scale
        width = max(_LEAST_WIDTH, (span.end_s - start) * scale)
        y = _ROW * lanes.index(span.lane) + 3
        parts.append(
            f'<rect class="tl-{span.lane}" x="{min(x, _WIDTH - width):.2f}" y="{y}" width="{width:.2f}" '
            f'height="{_ROW - 6}"><title>{escape(_describe(span))}</title></rect>'
        )
    return (
        f'<svg class="lm-timeline" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(step_words(step, t))}">{"".join(parts)}</svg>'
    )


def busy_s(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans):
        total += max(0.0, end_s - max(start_s, reached))
        reached = max(reached, end_s)
    return total


def _name(step: StepSpans, t: Texts) -> str:
    number = step.name.removeprefix("step ")
    return t("the prompt") if step.name == "prompt" else t("step {number}", number=number)


def _describe(span: Span) -> str:
    size = f", {format_bytes(span.num_bytes)}" if span.num_bytes else ""
    return f"{span.name}: {1e3 * (span.end_s - span.start_s):.3g} ms{size}"
