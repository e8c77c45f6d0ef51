"""`localmoe hw`, `plan`, `models`, `rm` and `draft`: show what is known, delete, build."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from localmoe.cli.arguments import engine_config
from localmoe.cli.draft_options import draft_settings
from localmoe.cli.output import ProgressBars, print_json, print_pairs, print_table
from localmoe.core.units import format_bytes, format_count, format_rate
from localmoe.engine import build_draft
from localmoe.engine.planning import prepare_model
from localmoe.hardware.limits import ASSUMED_ACCEPTANCE, Limits, measured_rates, predict_limits
from localmoe.hardware.probe import probe_hardware
from localmoe.hub.catalogue import list_models, models_folder, remove_model
from localmoe.hub.unfinished import UnfinishedDownload, list_unfinished


def run_hw(args: argparse.Namespace) -> None:
    """What was detected and measured."""
    hardware = probe_hardware()
    if args.json:
        print_json(asdict(hardware))
        return
    rate = hardware.memory_copy_bytes_per_s
    pairs: list[tuple[str, object]] = [
        ("CPU", f"{hardware.cpu_name}, {hardware.physical_cores} cores"),
        ("CPU features", ", ".join(hardware.cpu_flags) or "-"),
        (
            "RAM",
            f"{format_bytes(hardware.ram_available_bytes)} free of {format_bytes(hardware.ram_total_bytes)}",
        ),
        ("Memory copy", f"{format_rate(rate)} measured" if rate else "-"),
        ("Disk free", format_bytes(hardware.disk_free_bytes)),
        ("System", f"{hardware.platform}, Python {hardware.python_version}, torch {hardware.torch_version}"),
    ]
    for gpu in hardware.gpus:
        link = f"PCIe {gpu.pcie_generation} x{gpu.pcie_width}" if gpu.pcie_generation else "PCIe"
        rates = f", {format_rate(gpu.h2d_bytes_per_s)} measured" if gpu.h2d_bytes_per_s else ""
        memory = f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
        pairs.append((f"GPU {gpu.index}", f"{gpu.name}, {memory}, {link}{rates}"))
    if not hardware.gpus:
        pairs.append(("GPU", hardware.gpu_note or "none"))
    print_pairs("Hardware", pairs)


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
    if rates is not None:
        limits = predict_limits(
            prepared.footprint,
            prepared.plan,
            rates,
            compute_bytes=prepared.compute.dtype.itemsize,
            acceptance=ASSUMED_ACCEPTANCE,
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
            (
                "Parameters",
                f"{format_count(footprint.total_params)}, {format_count(footprint.active_params)} a token",
            ),
            (
                "Experts",
                f"{footprint.num_layers} layers x {footprint.num_experts}, top {footprint.experts_per_token}",
            ),
            ("Host RAM for experts", format_bytes(plan.host_bytes)),
            ("Device", str(prepared.compute.device)),
            ("Budget", format_bytes(plan.budget_bytes)),
            ("  shared weights", format_bytes(plan.shared_bytes)),
            (
                "  low-bit draft",
                format_bytes(plan.draft_bytes) if plan.drafting else f"off: {plan.drafting_reason}",
            ),
            (f"  KV cache, {plan.context} tokens", format_bytes(plan.kv_bytes)),
            ("  workspace", format_bytes(plan.workspace_bytes)),
            ("  expert slots", f"{plan.num_slots} x {format_bytes(plan.slot_bytes)}"),
            ("Experts in slots", f"{100 * plan.resident_share:.0f} %"),
            *_predictions(limits),
        ],
    )


def _predictions(limits: Limits | None) -> list[tuple[str, object]]:
    if limits is None:
        return []
    rows: list[tuple[str, object]] = [
        ("Predicted limit, on demand", f"{limits.on_demand.tokens_per_s:.1f} tok/s"),
    ]
    if limits.speculative is not None:
        best = limits.speculative
        text = f"{best.tokens_per_s:.1f} tok/s at draft length {best.draft_length}"
        rows.append((f"Predicted limit, drafting ({ASSUMED_ACCEPTANCE:.0%} accepted)", text))
    return rows


def run_models(args: argparse.Namespace) -> None:
    """Models on this machine."""
    models, unfinished = list_models(), list_unfinished(models_folder())
    if args.json:
        print_json(
            [
                *map(_as_json, unfinished),
                *(
                    {
                        "name": model.name,
                        "folder": str(model.folder),
                        "bytes": model.num_bytes,
                        "architecture": model.architecture,
                        "source": model.source,
                        "drafts": [path.name for path in model.drafts],
                    }
                    for model in models
                ),
            ]
        )
        return
    rows = [
        (
            model.name,
            model.architecture,
            format_bytes(model.num_bytes),
            model.source,
            len(model.drafts) or "-",
        )
        for model in models
    ]
    print_table("Models", ("name", "architecture", "size", "from", "drafts"), rows)
    if unfinished:
        parts = [(one.repo_id, format_bytes(one.held_bytes), _whole(one)) for one in unfinished]
        title = "Unfinished downloads ('localmoe pull' goes on with them, 'localmoe rm' deletes them)"
        print_table(title, ("name", "on the disk", "of"), parts)


def _as_json(download: UnfinishedDownload) -> dict[str, object]:
    return {
        "name": download.repo_id,
        "folder": str(download.folder),
        "bytes": download.held_bytes,
        "total_bytes": download.total_bytes,
        "architecture": None,
        "source": "unfinished",
        "drafts": [],
    }


def _whole(download: UnfinishedDownload) -> str:
    return "-" if download.total_bytes is None else format_bytes(download.total_bytes)


def run_rm(args: argparse.Namespace) -> None:
    """Delete a model.

    Raises:
        LocalMoeError: there is none of that name, or it is not localmoe's to delete.
    """
    print(f"Freed {format_bytes(remove_model(args.model))}.")


def run_draft(args: argparse.Namespace) -> None:
    """Build a draft.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    with ProgressBars() as progress:
        folder = build_draft(
            args.model,
            args.out,
            draft_settings(args),
            progress=progress,
        )
    print(folder)
