"""`localmoe pull`: download a model from the Hub, or go on with a download; or say first whether it fits."""

from __future__ import annotations

import argparse

from localmoe.cli.model_rows import size_rows
from localmoe.cli.output import ProgressBars, note, print_pairs
from localmoe.core.config import EngineConfig
from localmoe.core.errors import BudgetError
from localmoe.core.model_facts import Fit, ModelFacts
from localmoe.core.uninterrupted import ended_at_once
from localmoe.core.units import format_bytes
from localmoe.hub.download_record import DownloadRecord
from localmoe.hub.downloads import discard_download
from localmoe.hub.local_models import models_folder
from localmoe.hub.unfinished import missing_bytes


def run_pull(args: argparse.Namespace) -> None:
    """Download, and print the model's folder.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    if args.discard:
        print(f"Freed {format_bytes(discard_download(args.model))}.")
        return
    if args.plan:
        _show_fit(args.model, args.revision)
        return
    with ended_at_once():
        from localmoe.engine.pulling import pull_model  # it needs transformers, to say what can be run

    with ProgressBars() as progress:
        folder = pull_model(args.model, args.revision, progress=progress)
    print(folder)
    note(f"localmoe generate {args.model} --prompt Hello")


def _show_fit(repo_id: str, revision: str | None) -> None:
    """What the repo's config says that the model needs, beside what this computer has.

    Raises:
        LocalMoeError: the Hub cannot be asked, the engine cannot run it, or it does not fit.
    """
    with ended_at_once():
        from localmoe.engine.facts import repo_facts
        from localmoe.engine.fit import fit_model
        from localmoe.hardware.limits import measured_rates
        from localmoe.hardware.probe import probe_hardware

    facts, hardware = repo_facts(repo_id, revision), probe_hardware()
    rates = measured_rates(
        hardware, device="cuda" if hardware.gpus else "cpu", emulated_link_bytes_per_s=None
    )
    missing = missing_bytes(models_folder(), DownloadRecord(repo_id, facts.revision), facts.num_bytes)
    fit = fit_model(facts, hardware, rates, download_bytes=missing)
    rows = [*_needs(facts), *_answer(fit)]
    if fit.plan is None:
        config = EngineConfig(experts_on="disk")
        rows += _from_disk(fit_model(facts, hardware, None, config, download_bytes=missing))
    print_pairs(f"{repo_id} ({facts.footprint.architecture})", rows)
    if not fit.fits:
        raise BudgetError(fit.reason)


def _needs(facts: ModelFacts) -> list[tuple[str, object]]:
    return [
        *size_rows(facts.footprint),
        ("Context", f"{facts.footprint.max_context} tokens at most"),
        ("Download", format_bytes(facts.num_bytes)),
        ("Licence", (facts.licence or "not named") + (", gated" if facts.gated else "")),
    ]


def _from_disk(fit: Fit) -> list[tuple[str, object]]:
    """Of a model that does not fit otherwise."""
    if not fit.fits:
        return []
    return [
        ("With --experts-on disk", "yes, slower"),
        ("  RAM", f"{format_bytes(fit.ram_bytes)}, {100 * fit.ram_share:.0f} % of the experts"),
        ("  experts' file", format_bytes(fit.disk_bytes)),
    ]


def _answer(fit: Fit) -> list[tuple[str, object]]:
    if fit.plan is None:
        return [("Fits", "no")]
    rows: list[tuple[str, object]] = [
        ("Fits", "yes" if fit.fits else "no"),
        ("RAM", format_bytes(fit.ram_bytes)),
    ]
    if fit.device == "cuda":
        rows.append(("VRAM", format_bytes(fit.vram_bytes)))
    rows.append(("Experts in slots", f"{100 * fit.plan.resident_share:.0f} %"))
    rows.append(("Draft", "yes" if fit.drafting else f"no: {fit.plan.drafting_reason}"))
    if fit.tokens_per_s is not None:
        rows.append(("Predicted limit", f"{fit.tokens_per_s:.1f} tok/s"))
    return rows
