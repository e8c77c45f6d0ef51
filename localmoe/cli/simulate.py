"""`localmoe simulate`: what policies would do on a machine that need not be here, with simulated or recorded
routing. All that it prints is predicted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace

from localmoe.cli.output import note, number, percent, print_json, print_table
from localmoe.core.errors import ConfigError
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_rate
from localmoe.engine.model_source import ModelSource
from localmoe.engine.random_source import RandomSource
from localmoe.engine.sources import CheckpointSource
from localmoe.engine.what_if import best_hits, card_plan, summary_of
from localmoe.hardware.cards import Card, find_card
from localmoe.hardware.context import check_context, usual_context
from localmoe.hardware.limits import Rates
from localmoe.hardware.ram_experts import budget_experts
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import find_shape
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.registry import POLICIES, check_policy, decides_within_passes
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_machine import predict_disk, predict_in_place, predict_machine
from localmoe.prefetch.simulator_sources import windows
from localmoe.prefetch.simulator_types import Machine, Prompt, Window

COLUMNS = (
    "policy, draft length", "tok/s", "TPOT ms", "hit rate", "late", "reused", "best possible", "share of it",
    "copied MB / token", "read MB / token", "prefetched / token", "wasted / token", "stall ms / token",
)  # fmt: skip


_RATES = ("hit_rate", "late_rate", "reuse_rate", "best_reuse_rate", "share_of_best")


def run_simulate(args: argparse.Namespace) -> None:
    """Simulate every policy x draft length.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    policies = [check_policy(name) for name in args.policy or POLICIES]
    footprint, stored_bytes = _footprint(args)
    card = None if args.card is None else find_card(args.card)
    context = _context(args, footprint)
    machine, lengths = _machine(args, footprint, card, context, stored_bytes)
    rows = []
    for length in lengths:
        best: int | None = None
        for policy in policies:
            tally = simulate(policy, machine, _windows(args, footprint, length))
            if best is None:  # demands are the routing's, whatever the policy
                best = best_hits(tally, machine)
            rows.append(summary_of(policy, length, tally, best, machine))
    report = {
        "predicted": True,
        "model": footprint.name,
        "card": None if card is None else str(card),
        "drafter": args.drafter,
        "gate_accuracy": args.gate_accuracy,
        "synthetic": args.synthetic.as_dict(),
        "machine": asdict(machine),
        "rows": rows,
    }
    if args.json:
        print_json(report)
    else:
        _print(args, footprint, card, machine, rows)


def _footprint(args: argparse.Namespace) -> tuple[ModelFootprint, int]:
    """Sizes of the model, and bytes a weight in its checkpoint."""
    source: ModelSource
    if args.shape is not None:
        source = RandomSource(find_shape(args.shape), args.synthetic)
    else:
        source = CheckpointSource.open(args.model)
    skeleton = source.skeleton(source.stored_dtype)
    name = args.shape or source.name
    footprint = (
        measure_footprint(name, source.stored_dtype, skeleton).in_codes().in_whole_passes()
    )  # as on a GPU
    return footprint, source.stored_dtype.itemsize


def _context(args: argparse.Namespace, footprint: ModelFootprint) -> int:
    """Tokens that a text may have.

    Raises:
        ConfigError: they are more than the model was made for, or answers would be longer.
    """
    check_context(args.context, footprint)
    context = usual_context(footprint) if args.context is None else args.context
    if args.prompt_tokens + args.max_new_tokens > context:
        longer = footprint.max_context
        remedy = f", or a --context of up to {longer}" if context < longer else ""
        raise ConfigError(
            f"A prompt of {args.prompt_tokens} tokens and an answer of {args.max_new_tokens} do not fit the "
            f"context of {context}: use a smaller --prompt-tokens or --max-new-tokens{remedy}."
        )
    return context


def _windows(args: argparse.Namespace, footprint: ModelFootprint, length: int) -> Iterator[Prompt | Window]:
    tokens = SyntheticModel(
        args.synthetic, footprint.num_layers, footprint.num_experts, footprint.experts_per_token
    )
    return windows(
        tokens,
        draft_length=length,
        answers=args.answers,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.max_new_tokens,
        self_draft=args.drafter == "self",
        gate_accuracy=args.gate_accuracy,
        seed=args.seed,
    )


def _machine(
    args: argparse.Namespace, footprint: ModelFootprint, card: Card | None, context: int, stored_bytes: int
) -> tuple[Machine, list[int]]:
    """The machine, and the draft lengths that are possible on it.

    Raises:
        BudgetError: the model does not fit the card, or a layer's experts the RAM. ConfigError: there is
            nothing left to simulate.
    """
    lengths, num_slots, rates = (
        list(args.draft_lengths),
        args.slots,
        Rates(args.memory or 0.0, args.link or 0.0),
    )
    disk = None
    if args.disk is not None:
        disk = predict_disk(footprint, budget_experts(footprint, args.ram_budget), args.disk)
        if args.layer_by_layer:
            machine = predict_in_place(footprint, args.cpu, disk)
            return _with_drafter(args, machine), lengths
    if card is not None:
        wanted = args.drafter == "self" and any(lengths)
        plan = card_plan(footprint, card, context, stored_bytes, drafting=wanted)
        num_slots = args.slots or plan.num_slots
        rates = Rates(args.memory or card.rates.device_bytes_per_s, args.link or card.rates.link_bytes_per_s)
        if wanted and not plan.drafting:
            note(f"No drafting: {plan.drafting_reason}.")
            lengths = [length for length in lengths if length == 0]
    if not lengths:
        raise ConfigError(
            f"The draft of {footprint.name} does not fit this card, and all draft lengths asked for need it: "
            "add 0, or use --drafter prompt-lookup."
        )
    machine = predict_machine(
        footprint, num_slots, rates, whole_passes=not args.layer_by_layer, cpu_bytes_per_s=args.cpu, disk=disk
    )
    return _with_drafter(args, machine), lengths


def _with_drafter(args: argparse.Namespace, machine: Machine) -> Machine:
    return machine if args.drafter == "self" else replace(machine, draft_token_s=0.0)


def _print(
    args: argparse.Namespace,
    footprint: ModelFootprint,
    card: Card | None,
    machine: Machine,
    rows: list[dict[str, str | int | float | None]],
) -> None:
    total = footprint.total_experts
    drafter = "" if args.drafter == "self" else f", drafter {args.drafter}"
    given = "a computer without a GPU" if machine.in_place else "a machine as given"
    print(f"predicted: {footprint.name} on {card or given}")
    draft_ms = 1e3 * machine.draft_token_s
    cpu = "" if args.cpu is None else f"CPU {format_rate(args.cpu)}, "
    if machine.in_place:
        print(f"predicted: all computed by the {cpu}a draft token {draft_ms:.2f} ms{drafter}")
    else:
        link, copy_ms = format_rate(machine.expert_bytes / machine.copy_s), 1e3 * machine.copy_s
        print(
            f"predicted: {machine.num_slots} slots = {percent(machine.num_slots / total)} of the experts, "
            f"link {link}, {cpu}a copy {copy_ms:.2f} ms, a draft token {draft_ms:.2f} ms{drafter}"
        )
    if machine.disk is not None:
        print(
            f"predicted: {machine.disk.ram_experts} experts in RAM = "
            f"{percent(machine.disk.ram_experts / total)} of them, all on a disk of {format_rate(args.disk)}"
        )
    print(f"predicted: {args.synthetic}, gate accuracy {args.gate_accuracy:g}, {args.answers} answers")
    print_table(None, COLUMNS, [_cells(row) for row in rows])
    shown = {row["policy"] for row in rows}
    names = [name for name in POLICIES if name in shown and decides_within_passes(name)]
    if names and not args.layer_by_layer:
        print(f"Whole passes: of {', '.join(names)} only the cache is left: decided within a pass.")


def _cells(row: dict[str, str | int | float | None]) -> tuple[str, ...]:
    def value(name: str, factor: float = 1.0) -> float | None:
        found = row[name]
        return factor * found if isinstance(found, (int, float)) else None

    return (
        f"{row['policy']}, {row['draft_length']}",
        number(value("tokens_per_s")), number(value("tpot_s", 1e3)),
        *(percent(value(name)) for name in _RATES),
        number(value("h2d_bytes_per_token", 1e-6)), number(value("disk_bytes_per_token", 1e-6)),
        number(value("prefetched_per_token")), number(value("wasted_per_token")),
        number(value("stall_s_per_token", 1e3)),
    )  # fmt: skip
