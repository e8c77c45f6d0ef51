"""Does the simulator say what an engine does whose experts lie on the disk? A model's shape on the CPU, in
place, with few of its experts in RAM, and the simulator on the same routing and times.

The run itself tells what it computed for (waiting apart) and how fast the disk was; what it waited for is
simulated. Then hit rates, bytes read and time per output token are compared.

    python benchmarks/simulator_disk.py [--shape olmoe-1b-7b] [--ram 4] [--routing sticky:0.66] [--tokens 48]

The file with all experts is written to localmoe's home (LOCALMOE_HOME) and deleted at the end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
from support.recorded_runs import machine_of, record_run

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.model.shapes import SHAPES
from localmoe.prefetch.simulator import simulate

GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="olmoe-1b-7b")
    parser.add_argument("--ram", type=float, nargs="+", default=[4.0], help="GiB for experts")
    parser.add_argument("--routing", default="sticky:0.66")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--answers", type=int, default=3)
    args = parser.parse_args()
    settings = SyntheticSettings(parse_routing(args.routing))
    for ram in args.ram:
        config = EngineConfig(
            context=1024, draft_length=0, device="cpu", experts_on="disk", ram_budget_bytes=int(ram * GIB)
        )
        with Engine.load_shape(SHAPES[args.shape], config, settings) as engine:
            share = 100 * engine.plan.ram_experts / engine.footprint.total_experts
            print(f"synthetic: {args.shape}, {share:.0f} % of the experts in RAM, {args.routing}", flush=True)
            compare(engine, args)


def compare(engine: Engine, args: argparse.Namespace) -> None:
    """Answers on demand: what a policy guesses of random weights says nothing."""
    chance = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            prompt_token_ids=tuple(chance.integers(0, engine.footprint.vocab_size, args.prompt).tolist()),
            max_new_tokens=args.tokens, policy="on-demand", draft_length=0,
        )
        for _ in range(args.answers)
    ]  # fmt: skip
    recorder, stats = record_run(engine, requests)
    machine = machine_of(engine, recorder, stats, engine.footprint.total_experts)
    assert machine.disk is not None
    found = simulate("on-demand", machine, recorder.story).counters.freeze()
    demands, decoded = sum(s.expert_demands for s in stats), sum(s.new_tokens - 1 for s in stats)
    real_s = sum((s.tpot_s or 0.0) * (s.new_tokens - 1) for s in stats) / decoded
    read = sum((s.disk_bytes_per_token or 0.0) * (s.new_tokens - 1) for s in stats) / decoded
    hits, simulated_s = sum(s.hits for s in stats) / demands, found.tpot_s or 0.0
    rate = machine.disk.read_bytes / machine.disk.read_s
    simulated_read = found.disk_bytes_per_token or 0.0
    print(
        f"synthetic: hits {100 * hits:.1f} / {100 * (found.hit_rate or 0):.1f} %, read {read / 1e6:.0f} / "
        f"{simulated_read / 1e6:.0f} MB a token at {rate / 1e9:.2f} GB/s, {1e3 * real_s:.0f} / "
        f"{1e3 * simulated_s:.0f} ms ({100 * (simulated_s / real_s - 1):+.1f} %)",
        flush=True,
    )


if __name__ == "__main__":
    main()
