"""What a benchmark job does with the engine: the table of this machine, or predictions for other cards.
Chooses no settings and keeps no result."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from app.bench.job import BenchmarkJob
from app.bench.results import Result
from app.engine_status import EngineLike
from localmoe import __version__
from localmoe.core.config import DraftLength, GenerationRequest
from localmoe.core.errors import BudgetError, ConfigError
from localmoe.core.types import Message
from localmoe.core.units import format_bytes
from localmoe.engine import import_all
from localmoe.hardware.cards import find_card
from localmoe.hardware.probe import probe_hardware


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """What is measured: policies x draft lengths on the first `prompts` of the bundled prompts."""

    policies: tuple[str, ...]
    draft_lengths: tuple[DraftLength, ...]
    prompts: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class WhatIfPlan:
    """What is predicted. budget_bytes: of each card's memory; None: all that it has. context: in tokens;
    None: as long as each card's memory suggests."""

    cards: tuple[str, ...]
    policies: tuple[str, ...]
    draft_lengths: tuple[int, ...]
    prompts: int
    max_new_tokens: int
    budget_bytes: int | None = None
    context: int | None = None


def run_benchmark(engine: EngineLike, plan: BenchmarkPlan, job: BenchmarkJob) -> Result:
    """Measure.

    Raises:
        LocalMoeError: the engine cannot, or the job was stopped.
    """
    import_all()
    from localmoe.engine.benchmark import measure_setting, same_tokens

    if engine.plan.draft_aside:
        engine.reset()  # what is said of the engine is of what is measured
    about = _about(engine, "benchmark")
    requests = _requests(plan.prompts, plan.max_new_tokens)
    settings = [(policy, length) for length in plan.draft_lengths for policy in plan.policies]
    rows = []
    for done, (policy, length) in enumerate(settings):

        def show(
            answers: int, tokens: int, done: int = done, policy: str = policy, length: Any = length
        ) -> None:
            answered = answers + min(1.0, tokens / plan.max_new_tokens)
            share = (done + answered / len(requests)) / len(settings)
            job.report(
                "Measuring {policy}, draft length {length}: answer {answer} of {answers}", share,
                policy=policy, length=length, answer=answers + 1, answers=len(requests),
            )  # fmt: skip

        show(0, 0)
        rows.append(measure_setting(engine, requests, policy, length, stop=job.stop, on_event=show))
    return {
        **about,
        "prompts": len(requests),
        "max_new_tokens": plan.max_new_tokens,
        "identical_tokens": same_tokens(rows),
        "rows": [row.summary() for row in rows],
    }


def run_what_if(engine: EngineLike, plan: WhatIfPlan, job: BenchmarkJob) -> Result:
    """Observe the loaded model, then predict.

    Raises:
        LocalMoeError: the engine cannot, or the job was stopped.
    """
    import_all()
    from localmoe.engine.observation import drafts_itself, observe
    from localmoe.engine.what_if import card_plan, predict
    from localmoe.prefetch.simulator_machine import predict_disk

    drafting, by_layer = drafts_itself(engine), engine.plan.drafting and not drafts_itself(engine)
    if by_layer and 0 not in plan.draft_lengths:
        raise ConfigError("What an MTP layer drafts is not predicted: choose draft length 0.")
    requests = _requests(plan.prompts, plan.max_new_tokens)
    answers = len(requests) * (2 if drafting else 1)
    about = _about(engine, "what-if")
    footprint = engine.footprint.in_codes().in_whole_passes()  # as a GPU runs it
    cpu = engine.info().cpu_bytes_per_s

    def answered(done: int) -> None:
        stage = "Recording which experts the model uses: answer {done} of {answers}"
        job.report(stage, 0.6 * done / answers, done=min(answers, done + 1), answers=answers)

    answered(0)
    observed = observe(engine, requests, about["model"], stop=job.stop, on_answer=answered)
    disk_rate = _disk_rate(engine) if cpu else None  # what comes from the disk, comes to the CPU
    disk = predict_disk(footprint, engine.plan.ram_experts, disk_rate) if disk_rate else None
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    plain = footprint.in_16_bits()
    stored_bytes = max(1, plain.expert_bytes // plain.expert_params)
    for number, name in enumerate(plan.cards):
        card = find_card(name)
        share = 0.6 + 0.4 * number / len(plan.cards)
        job.report("Simulating {card}", share, card=name)
        try:
            divided = card_plan(
                footprint, card, plan.context, stored_bytes, drafting=drafting,
                budget_bytes=plan.budget_bytes,
            )  # fmt: skip
        except BudgetError as error:
            refused[name] = str(error)
            continue
        predictions = predict(
            observed, footprint, card, divided, plan.policies, plan.draft_lengths,
            cpu_bytes_per_s=cpu, disk=disk, stop=job.stop,
        )  # fmt: skip
        resident = divided.num_slots / max(1, footprint.total_experts)
        rows += [{"card": name, "resident_share": min(1.0, resident), **row} for row in predictions]
    return {
        **about,
        "predicted": True,
        "prompts": len(requests),
        "max_new_tokens": plan.max_new_tokens,
        "budget_bytes": plan.budget_bytes,
        "mtp": by_layer,
        "from_disk": engine.plan.disk_bytes > 0,
        "disk_bytes_per_s": disk_rate,
        "ram_experts": engine.plan.ram_experts,
        "acceptance": observed.acceptance,
        "match": observed.match,
        "cpu_bytes_per_s": cpu,
        "refused": refused,
        "rows": rows,
    }


def _disk_rate(engine: EngineLike) -> float | None:
    """Bytes a second with which experts were read since the load; None: none was."""
    read = engine.transfer_counters()
    return read.disk_bytes / read.disk_busy_s if engine.plan.disk_bytes and read.disk_busy_s else None


def _requests(prompts: int, max_new_tokens: int) -> list[GenerationRequest]:
    from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts

    return [
        GenerationRequest(messages=(Message("user", prompt.text),), max_new_tokens=max_new_tokens)
        for prompt in read_prompts(BUNDLED_PROMPTS, prompts)
    ]


def _about(engine: EngineLike, kind: str) -> Result:
    """Model, machine, engine and versions; of a path, its last part alone."""
    info, hardware = engine.info(), probe_hardware(measure=False)
    return {
        "kind": kind,
        "localmoe": __version__,
        "model": os.path.basename(info.name.rstrip("/\\")) if os.path.isabs(info.name) else info.name,
        "machine": {
            "gpus": [f"{gpu.name} ({format_bytes(gpu.total_bytes)})" for gpu in hardware.gpus],
            "cpu": f"{hardware.cpu_name} ({hardware.logical_cores} threads)",
            "ram": f"{format_bytes(hardware.ram_total_bytes)} RAM",
            "system": hardware.platform,
            "python": hardware.python_version,
            "torch": hardware.torch_version,
        },
        "engine": {
            name: getattr(info, name)
            for name in ("device", "dtype", "draft", "link", "lanes", "passes", "exactness")
        },
        "plan": asdict(engine.plan),
    }
