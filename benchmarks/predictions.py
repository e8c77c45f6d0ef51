"""The predictions of docs/performance.md: tokens a second of consumer cards that were not here, by the
simulator, from published rates; nothing is loaded or measured.

    python benchmarks/predictions.py [--cpu 45e9] [--routing sticky:0.66] [--acceptance 0.9] [--tokens 192]
        [--ram 22 --disk 3.5e9]

Each cell is the better of nothing drafted and four tokens drafted where the draft fits; the share of the
experts in slots goes with it. With --ram, so many GiB hold experts, and those of the models whose experts
they do not hold lie on a disk; nothing is drafted there. How far the simulator is off where something was
measured say simulator_lanes.py and simulator_disk.py.
"""

from __future__ import annotations

import argparse

import torch
from pictures import as_published
from what_fits import NAMES

from localmoe.core.errors import BudgetError
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import ModelFootprint
from localmoe.engine.what_if import card_plan
from localmoe.hardware.cards import CARDS, Card
from localmoe.hardware.ram_experts import budget_experts
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import SHAPES
from localmoe.model.skeleton import skeleton_from_config
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_machine import predict_disk, predict_machine
from localmoe.prefetch.simulator_sources import windows
from localmoe.prefetch.simulator_types import Disk

LENGTHS = (0, 4)
PROMPT = 80


def speed(
    footprint: ModelFootprint, card: Card, length: int, settings: SyntheticSettings, args: argparse.Namespace
) -> tuple[float, float] | None:
    """tok/s and the share of experts in slots; None where the model or its draft does not fit."""
    try:
        plan = card_plan(footprint, card, args.context, 2, drafting=length > 0)
    except BudgetError:
        return None
    if length and not plan.drafting:
        return None
    model = SyntheticModel(settings, footprint.num_layers, footprint.num_experts, footprint.experts_per_token)
    disk = disk_of(footprint, args)
    if length and disk is not None:
        return None
    machine = predict_machine(footprint, plan.num_slots, card.rates, cpu_bytes_per_s=args.cpu, disk=disk)
    story = windows(
        model, draft_length=length, answers=1, prompt_tokens=PROMPT, new_tokens=2 * args.tokens,
        self_draft=True, gate_accuracy=0.85, seed=0,
    )  # fmt: skip
    tally = simulate("moe-speq", machine, story, warm_up=args.tokens)
    return tally.counters.freeze().tokens_per_s or 0.0, plan.num_slots / footprint.total_experts


def disk_of(footprint: ModelFootprint, args: argparse.Namespace) -> Disk | None:
    """Where the experts lie that RAM does not hold. Raises BudgetError: it does not hold a layer's."""
    if args.ram is None:
        return None
    count = budget_experts(footprint, int(args.ram * (1 << 30)))
    return None if count == footprint.total_experts else predict_disk(footprint, count, args.disk)


def cell(footprint: ModelFootprint, card: Card, settings: SyntheticSettings, args: argparse.Namespace) -> str:
    """The better length's."""
    found = [speed(footprint, card, length, settings, args) for length in LENGTHS]
    best = max((one for one in found if one is not None), default=None)
    return "-" if best is None else f"{best[0]:.0f} ({100 * min(1.0, best[1]):.0f} %)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", type=float, default=45e9, help="bytes a second beside the link")
    parser.add_argument("--routing", default="sticky:0.66")
    parser.add_argument("--acceptance", type=float, default=0.9)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--ram", type=float, help="GiB for experts; default: all of them")
    parser.add_argument("--disk", type=float, default=3.5e9, help="bytes a second, of what RAM does not hold")
    args = parser.parse_args()
    settings = SyntheticSettings(parse_routing(args.routing), args.acceptance, 0.9)
    print(f"predicted, tok/s: {args.routing}, acceptance {args.acceptance:g}, CPU {args.cpu / 1e9:g} GB/s")
    if args.ram is not None:
        print(f"predicted: {args.ram:g} GiB of RAM for experts, beside a disk of {args.disk / 1e9:g} GB/s")
    columns = []
    for name in NAMES:
        skeleton = skeleton_from_config(SHAPES[name].config(), torch.bfloat16, name)
        footprint = measure_footprint(name, torch.bfloat16, skeleton, device="cuda")
        footprint = as_published(name, footprint.in_whole_passes().in_codes())
        columns.append([cell(footprint, card, settings, args) for card in CARDS.values()])
        if args.ram is not None:
            held = budget_experts(footprint, int(args.ram * (1 << 30))) / footprint.total_experts
            print(f"predicted: {NAMES[name]}: RAM holds {100 * held:.0f} % of the experts", flush=True)
    print(f"| | {' | '.join(NAMES.values())} |\n|{'---|' * (len(NAMES) + 1)}")
    for card, cells in zip(CARDS.values(), zip(*columns, strict=True), strict=True):
        print(f"| {card} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
