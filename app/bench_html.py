"""The Benchmark tab's moving parts as HTML: progress, table, exports. All is escaped; asks nobody."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from app import words
from app.bench.charts import TO_SHARE, charts_svg, row_name
from app.bench.job import BenchmarkView
from app.bench.results import Result, as_csv, as_json, file_name, machine_of
from app.status_html import message_html, progress_bar
from app.texts import Texts
from localmoe.core.units import format_bytes, format_rate, format_seconds

_MEASURED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("tokens_per_s", "tokens/s", words.rate),
    ("mean_draft_length", "tokens drafted", words.rate),
    ("acceptance_rate", "accepted", words.percent),
    ("expert_match_rate", "same experts", words.percent),
    ("hit_rate", "Hit rate", words.percent),
    ("late_rate", "late", words.percent),
    ("draft_s_per_step", "draft a step", words.seconds),
    ("verify_s_per_step", "verify a step", words.seconds),
    ("h2d_bytes_per_token", "copied a token", format_bytes),
    ("stall_s", "waited", words.seconds),
)
_PREDICTED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("resident_share", "in VRAM", words.percent),
    ("tokens_per_s", "tokens/s", words.rate),
    ("hit_rate", "Hit rate", words.percent),
    ("late_rate", "late", words.percent),
    ("reuse_rate", "reused", words.percent),
    ("best_reuse_rate", "best possible", words.percent),
    ("h2d_bytes_per_token", "copied a token", format_bytes),
    ("stall_s_per_token", "waited a token", words.seconds),
)
COLUMN_NAMES = tuple(name for _, name, _ in (*_MEASURED, *_PREDICTED))


def progress_html(view: BenchmarkView | None, t: Texts) -> str:
    """How far the job is, or how it ended."""
    if view is None:
        return ""
    if view.phase == "failed":
        return message_html(t(view.error), False)
    if view.phase == "stopped":
        return message_html(t("Stopped: nothing of it is kept."), True)
    if view.phase == "done":
        return message_html(t("Done; the result is kept on this computer."), True)
    left = ""
    if view.seconds_left is not None:
        left = ", " + t("about {time} left", time=format_seconds(view.seconds_left))
    stage = f"{t(view.stage, **view.values)} ({100 * view.share:.0f} %{left})"
    return f'<p class="lm-muted">{escape(stage)}</p>{progress_bar(view.share, t("Benchmark"))}'


def result_name(result: Result, t: Texts) -> str:
    """A line of the list of past results."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(result["created"]))
    kind = t("other cards, predicted") if result.get("predicted") else t("this computer, measured")
    return f"{when} · {result['model']} · {kind}"


def result_html(result: Result, t: Texts) -> str:
    """The whole result: what it is, chart, table, exports."""
    facts = [result["model"], machine_of(result), *_engine_facts(result)]
    lines = [f'<p class="lm-muted">{escape(" · ".join(fact for fact in facts if fact))}</p>']
    if result.get("predicted"):
        lines.append(_predicted_note(result, t))
    elif result.get("identical_tokens") is not None:
        same = bool(result["identical_tokens"])
        text = t("All settings gave the same tokens.") if same else t("The settings gave different tokens.")
        lines.append(message_html(text, same))
    for card, reason in dict(result.get("refused") or {}).items():
        lines.append(message_html(f"{card}: {reason}", False))
    if not result["rows"]:
        return "".join(lines)
    return f"{''.join(lines)}{_scroll(charts_svg(result, t=t), t)}{_table(result, t)}{_exports(result, t)}"


def _scroll(content: str, t: Texts, name: str = "Chart") -> str:
    """What may be wider than a phone; the keyboard scrolls it too."""
    label = escape(t(name))
    return f'<div class="lm-wide" tabindex="0" role="region" aria-label="{label}">{content}</div>'


def _engine_facts(result: Result) -> list[str]:
    engine = result["engine"]
    return [str(engine.get(name, "")) for name in ("dtype", "draft", "link", "lanes")]


def _predicted_note(result: Result, t: Texts) -> str:
    acceptance, match = result.get("acceptance"), result.get("match")
    text = t(
        "Predicted, not measured: the routing of {prompts} answers of this model, recorded here, on cards as "
        "their makers describe them.", prompts=result.get("prompts"),
    )  # fmt: skip
    cpu = result.get("cpu_bytes_per_s")
    if cpu:
        text += " " + t(
            "Beside PCIe this computer's CPU computes what is not in their memory, at {rate}.",
            rate=format_rate(cpu),
        )  # fmt: skip
    else:
        text += " " + t("What is not in their memory comes over PCIe alone, without the CPU's help.")
    if acceptance is not None:
        text += " " + t(
            "Measured here: {accepted} of the drafted tokens accepted, {match} same experts.",
            accepted=words.percent(acceptance), match=words.percent(match),
        )  # fmt: skip
    rate = result.get("disk_bytes_per_s")
    if rate:
        text += " " + t(
            "Their computers' RAM holds as many experts as here, {count}, and the others come from a disk "
            "that gives {rate}, as this one did.",
            count=f"{result['ram_experts']:,}", rate=format_rate(rate),
        )  # fmt: skip
    elif result.get("from_disk"):
        text += " " + t("Their computers' RAM holds all experts: from the disk, as here, it would be slower.")
    if result.get("mtp"):
        text += " " + t(
            "The model's MTP layer drafts, which is not predicted: rows with drafts are left out."
        )
    return f'<p class="lm-note">{escape(text)}</p>'


def _table(result: Result, t: Texts) -> str:
    columns = _PREDICTED if result.get("predicted") else _MEASURED
    caption = t("Predicted") if result.get("predicted") else t("Measured on this computer")
    head = "".join(f'<th scope="col">{escape(t(name))}</th>' for _, name, _ in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row_name(row))}</th>{_cells(row, columns)}</tr>'
        for row in result["rows"]
    )
    first = escape(t("policy, draft length"))
    table = (
        f'<table class="lm-table"><caption>{escape(caption)}</caption><thead><tr><th scope="col">{first}</th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table>"
    )
    return _scroll(table, t, "Table")


def _cells(row: Mapping[str, Any], columns: tuple[tuple[str, str, Callable[[Any], str]], ...]) -> str:
    def shown(key: str, form: Callable[[Any], str]) -> str:
        value = row.get(key)
        return words.NONE if not isinstance(value, int | float) else form(value)

    return "".join(f"<td>{escape(shown(key, form))}</td>" for key, _, form in columns)


def _exports(result: Result, t: Texts) -> str:
    """Links whose files are inside them: nothing is written or fetched for them. static/picture.js draws the
    PNG."""
    files = (
        ("json", "application/json", as_json(result)), ("csv", "text/csv", as_csv(result)),
        ("svg", "image/svg+xml", charts_svg(result, TO_SHARE, t)),
    )  # fmt: skip
    links = "".join(
        f'<a class="lm-act" download="{escape(file_name(result, ending))}" '
        f'href="data:{kind};base64,{base64.b64encode(text.encode()).decode()}">'
        f"{escape(t('Save as {format}', format=ending.upper()))}</a>"
        for ending, kind, text in files
    )
    failed = escape(t("This browser cannot make the picture: save it as SVG."))
    picture = (
        f'<button type="button" class="lm-act" data-png="{escape(file_name(result, "png"))}" '
        f'data-failed="{failed}">{escape(t("Save as {format}", format="PNG"))}</button>'
    )
    return f'<div class="lm-acts">{links}{picture}</div>'
