"""MoE-SpeQ, table 2: memory of draft and target by what they share. Computed from a model's shape alone, no
weight is read; what a loaded engine really holds stands beside it where one was loaded.
"""

from __future__ import annotations

from localmoe.core.synthetic import SyntheticSettings
from localmoe.engine.bench_row import Summary
from localmoe.engine.planning import MAX_WINDOW
from localmoe.engine.random_source import RandomSource
from localmoe.hardware.needs import device_needs
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import find_shape
from localmoe.tables.section import Bars, Section, Target, gigabytes, percent, value
from localmoe.tables.store import Run

SHAPE = "qwen1.5-moe-a2.7b"
CONTEXT = 12 * 1024
# MoE-SpeQ, table 2, in GB: draft, target, shared
PAPER = (
    ("independent", 6.13, 7.27, 0.0),
    ("+ shared experts", 4.58, 5.72, 1.55),
    ("+ other parameters", 2.66, 3.80, 3.47),
    ("+ KV cache", 0.41, 1.55, 5.72),
)
_SHARING = ("shared_experts", "other", "kv", "workspace")
_TITLES = ("independent", "+ shared experts", "+ other parameters", "+ KV cache", "+ workspace")
COLUMNS = (
    "draft and target",
    "draft GB",
    "target GB",
    "shared GB",
    "total GB",
    "saved",
    "paper: total GB",
    "saved",
)


def measure_sharing(shape: str = SHAPE, context: int = CONTEXT) -> Summary:
    """Bytes of each part of a model of a known shape on a GPU, for one sequence of `context` tokens.

    Raises:
        ConfigError: the shape is unknown.
    """
    source = RandomSource(find_shape(shape), SyntheticSettings())
    skeleton = source.skeleton(source.stored_dtype)
    footprint = measure_footprint(shape, source.stored_dtype, skeleton, None, "cuda")
    weight = source.stored_dtype.itemsize
    shared_experts = weight * sum(
        parameter.numel()
        for name, parameter in skeleton.model.named_parameters()
        if ".shared_expert." in name or ".shared_experts." in name
    )
    needs = device_needs(
        footprint,
        context=context,
        compute_bytes=weight,
        checkpoint_bytes_per_weight=weight,
        max_window=MAX_WINDOW,
        whole_passes=True,
    )
    token_experts = footprint.num_layers * footprint.experts_per_token
    return {
        "shape": shape,
        "context": context,
        "shared_experts": shared_experts,
        "other": footprint.shared_bytes - shared_experts,
        "embedding": weight * footprint.embedding_params,  # of "other"; in host RAM
        "kv": footprint.kv_bytes_per_token * context,
        "workspace": needs.workspace_bytes,
        "target_experts": token_experts * footprint.expert_bytes,
        "draft_experts": token_experts * footprint.draft_expert_bytes,
        "draft_all_experts": footprint.total_experts * footprint.draft_expert_bytes,
    }


def sharing_section(figures: Summary, runs: list[Run]) -> Section:
    """The table with the paper's count of experts, with the draft as it really lies in memory, and what
    loaded engines held."""
    rows, charted = [], []
    for kind, draft_experts in (("", "draft_experts"), ("whole draft: ", "draft_all_experts")):
        papers = [draft + target + shared for _, draft, target, shared in PAPER] if not kind else []
        for step, title in enumerate(_TITLES):
            draft, target, shared = _divided(figures, draft_experts, step)
            total, alone = draft + target + shared, sum(_divided(figures, draft_experts, 0, step == 4))
            saved = 1 - total / alone
            known = step < len(papers)
            rows.append(
                [kind + title, gigabytes(draft), gigabytes(target), gigabytes(shared), gigabytes(total),
                 percent(saved), f"{papers[step]:.2f}" if known else "-",
                 percent(1 - papers[step] / papers[0]) if known else "-"]
            )  # fmt: skip
            if not kind:
                charted.append((title, (total / 2**30, papers[step] if known else None)))
    for run in runs:
        if run.memory:
            held = run.memory
            both = held["shared"] + held["kv"]
            rows.append(
                [f"held by {run.subject.name} ({held['context']} tokens), {run.subject.device}",
                 gigabytes(held["draft"]), gigabytes(held["slots"]), gigabytes(both),
                 gigabytes(held["draft"] + held["slots"] + both),
                 percent(both / (held["draft"] + held["slots"] + 2 * both)), "-", "-"]
            )  # fmt: skip
    saved = _saved(figures, "draft_experts", 3)
    paper = 1 - 7.68 / 13.40
    with_workspace = percent(_saved(figures, "draft_experts", 4))
    section = Section(
        COLUMNS,
        rows,
        [Bars("Memory of draft and target, GB", "GB", ("here", "paper"), tuple(charted))],
        [
            Target(
                "sharing saves at least 43 %",
                f"{percent(saved)}, with the workspace {with_workspace}; the paper's own figures give "
                f"{percent(paper)}, which it rounds",
                saved >= 0.43,
            )
        ],
    )
    section.reasons.append(
        "With the whole draft in device memory, as localmoe keeps it and as drafting needs it, the saving "
        f"is {percent(_saved(figures, 'draft_all_experts', 3))}: the paper's table counts the experts of "
        "one token for each model (4 of 60 a layer), so that what can be shared is the larger part of it."
    )
    embedding = value(figures, "embedding")
    if embedding:
        section.reasons.append(
            f"Of the other parameters the input embedding, {gigabytes(embedding)} GB, is counted as in the "
            "paper; localmoe keeps it in host RAM and reads a row a token."
        )
    return section


def _divided(
    figures: Summary, draft_experts: str, shared_parts: int, with_workspace: bool = False
) -> tuple[float, float, float]:
    """Bytes of draft, target and both together when the first `shared_parts` parts are shared. The workspace
    counts only where it is shared, or wanted."""
    parts = [value(figures, name) or 0.0 for name in _SHARING]
    counted = parts if with_workspace or shared_parts == len(parts) else parts[:3]
    own = sum(counted[shared_parts:])
    draft, target = value(figures, draft_experts) or 0.0, value(figures, "target_experts") or 0.0
    return draft + own, target + own, sum(counted[:shared_parts])


def _saved(figures: Summary, draft_experts: str, shared_parts: int) -> float:
    alone = sum(_divided(figures, draft_experts, 0, with_workspace=shared_parts == 4))
    return 1 - sum(_divided(figures, draft_experts, shared_parts)) / alone
