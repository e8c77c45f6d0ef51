"""`localmoe plan`: what a model needs and what may be expected of it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from localmoe.cli.load_options import engine_config
from localmoe.cli.model_rows import size_rows
from localmoe.cli.output import print_json, print_pairs
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_bytes
from localmoe.engine.planning import prepare_model
from localmoe.hardware.limits import Limits, assumed_acceptance, measured_rates, predict_limits
from localmoe.hardware.probe import probe_hardware


def run_plan(args: argparse.Namespace) -> None:
    """What a model needs, how memory is divided, and the speed that physics allows (predicted).

    Raises:
        LocalMoeError: the model is not there, not supported, or does not fit.
    """
    config = engine_config(args)
    prepared = prepare_model(args.model, config)
    on_cuda = prepared.compute.device.type == "cuda"
    rates = measured_rates(
        probe_hardware(),
        device="cuda" if on_cuda else "cpu",
        emulated_link_bytes_per_s=config.emulated_link_bytes_per_s,
    )
    limits = None
    if rates is not None and not prepared.plan.disk_bytes:  # the disk's rate is not measured
        limits = predict_limits(
            prepared.footprint,
            prepared.plan,
            rates,
            compute_bytes=prepared.compute.dtype.itemsize,
            acceptance=assumed_acceptance(prepared.footprint),
        )
    footprint, plan = prepared.footprint, prepared.plan
    if args.json:
        print_json(
            {
                "footprint": asdict(footprint),
                "plan": plan.as_dict(),
                "predicted": limits.as_dict() if limits else None,
            }
        )
        return
    print_pairs(
        f"{footprint.name} ({footprint.architecture})",
        [
            *size_rows(footprint),
            *_host_ram(plan, footprint),
            ("Device", str(prepared.compute.device)),
            ("Budget", format_bytes(plan.budget_bytes)),
            ("  shared weights", format_bytes(plan.shared_bytes)),
            (
                f"  {_drafter(footprint)}",
                format_bytes(plan.draft_bytes) if plan.drafting else f"off: {plan.drafting_reason}",
            ),
            (f"  KV cache, {plan.context} tokens", format_bytes(plan.kv_bytes)),
            ("  workspace", format_bytes(plan.workspace_bytes)),
            *_slots(plan),
            *_disk(plan, footprint),
            *_predictions(limits),
        ],
    )


def _drafter(footprint: ModelFootprint) -> str:
    """What the draft's memory is for."""
    called = footprint.draft_model_called if footprint.draft_model_bytes else "low-bit draft"
    return called.removeprefix("the ")


def _host_ram(plan: MemoryPlan, footprint: ModelFootprint) -> list[tuple[str, str]]:
    beside = {
        "Host RAM, input embedding": plan.host_embedding_bytes,
        "Host RAM, keys and values of a prompt": plan.host_aside_bytes,
    }
    experts = plan.host_bytes - sum(beside.values())
    return [
        ("Host RAM for experts", format_bytes(experts) + _form(footprint)),
        *((name, format_bytes(size)) for name, size in beside.items() if size),
    ]


def _form(footprint: ModelFootprint) -> str:
    """In which they are kept, if it is not the checkpoint's own."""
    return ", packed into 12 bits a weight without loss" if footprint.keeps_bf12 else ""


def _slots(plan: MemoryPlan) -> list[tuple[str, object]]:
    if plan.in_place:
        disk = ", read from the disk those that are not there" if plan.disk_bytes else ""
        return [("Experts", f"computed where they lie in host RAM{disk}")]
    return [
        ("  expert slots", f"{plan.num_slots} x {format_bytes(plan.slot_bytes)}"),
        ("Experts in slots", f"{100 * plan.resident_share:.0f} %"),
    ]


def _disk(plan: MemoryPlan, footprint: ModelFootprint) -> list[tuple[str, object]]:
    if not plan.disk_bytes:
        return []
    total = footprint.total_experts
    held = f"{plan.ram_experts:,} of {total:,} ({100 * plan.ram_experts / total:.0f} %)"
    return [
        ("Experts in host RAM at a time", held),
        ("Their file on the disk", format_bytes(plan.disk_bytes)),
    ]


def _predictions(limits: Limits | None) -> list[tuple[str, object]]:
    if limits is None:
        return []
    rows: list[tuple[str, object]] = [
        ("Predicted limit, on demand", f"{limits.on_demand.tokens_per_s:.1f} tok/s"),
    ]
    if limits.speculative is not None:
        best = limits.speculative
        text = f"{best.tokens_per_s:.1f} tok/s at draft length {best.draft_length}"
        rows.append((f"Predicted limit, drafting ({limits.acceptance:.0%} accepted)", text))
    return rows
