"""`localmoe hw`, `models` and `rm`: show what is here, delete. Needs no torch but to measure the hardware."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from localmoe.cli.output import print_json, print_pairs, print_table
from localmoe.core.units import format_bytes, format_rate
from localmoe.hardware.probe import probe_hardware
from localmoe.hub.catalogue import list_models, models_folder, remove_made, remove_model
from localmoe.hub.draft_places import bytes_under, homes_of_others
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


def run_models(args: argparse.Namespace) -> None:
    """Models on this machine."""
    models, unfinished = list_models(), list_unfinished(models_folder())
    others = [(of, home, bytes_under(home)) for of, home in homes_of_others(one.name for one in models)]
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
                        "made_bytes": model.made_bytes,
                    }
                    for model in models
                ),
                *(_left(*other) for other in others),
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
            format_bytes(model.made_bytes) if model.made_bytes else "-",
        )
        for model in models
    ]
    print_table("Models", ("name", "architecture", "size", "from", "drafts", "made of it"), rows)
    if unfinished:
        parts = [
            (one.repo_id, one.revision or "-", format_bytes(one.held_bytes), _whole(one))
            for one in unfinished
        ]
        title = (
            "Unfinished downloads ('localmoe pull' goes on with them, with --revision where one is named; "
            "'localmoe rm' deletes them)"
        )
        print_table(title, ("name", "revision", "on the disk", "of"), parts)
    if others:
        title = "Made of models that are not listed ('localmoe rm NAME --made' deletes it)"
        print_table(title, ("name", "size", "in"), [(of, format_bytes(n), home) for of, home, n in others])


def _as_json(download: UnfinishedDownload) -> dict[str, object]:
    return {
        "name": download.repo_id,
        "revision": download.revision,
        "folder": str(download.folder),
        "bytes": download.held_bytes,
        "total_bytes": download.total_bytes,
        "architecture": None,
        "source": "unfinished",
        "drafts": [],
    }


def _left(name: str, home: Path, num_bytes: int) -> dict[str, object]:
    return {
        "name": name,
        "folder": str(home),
        "bytes": 0,
        "architecture": None,
        "source": "made",
        "drafts": [],
        "made_bytes": num_bytes,
    }


def _whole(download: UnfinishedDownload) -> str:
    return "-" if download.total_bytes is None else format_bytes(download.total_bytes)


def run_rm(args: argparse.Namespace) -> None:
    """Delete a model, or what was made of it.

    Raises:
        LocalMoeError: there is none of that name, or it is not localmoe's to delete.
    """
    if args.made or args.experts_file:
        freed = remove_made(args.model, records_alone=args.experts_file)
    else:
        freed = remove_model(args.model)
    print(f"Freed {format_bytes(freed)}.")
