"""Does the simulator say what all lanes together did on a GPU? What was measured there is in this file.

python benchmarks/simulator_lanes.py [--tokens 192] [--rules]

Rows are those of docs/log.md ("experts that the CPU has a part in come into slots", "packed experts on a
quiet machine", "slots between layers on a GPU", "experts that stay in MXFP4", "linear attention in whole
steps", "experts in FP8", "experts in NVFP4" and "experts in INT4"): H100s and H200s, nothing drafted,
on-demand, the CPU always taking its part, with the rates of those runs; of uniform routing without
completing, or the mean where that made no difference.
"popular" is synthetic_engine's. Prints tok/s and hit rates, measured and predicted, and by how
much these differ; with --rules instead, what is predicted if experts that are split are never completed,
always, and as the engine decides, with each kind of routing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from synthetic_engine import POPULAR, popular_trace

from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import ModelFootprint
from localmoe.engine.random_source import RandomSource
from localmoe.experts.slot_worth import SlotWorth
from localmoe.hardware.limits import Rates
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import find_shape
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.simulator import simulate
from localmoe.prefetch.simulator_machine import predict_machine
from localmoe.prefetch.simulator_sources import windows

LINK_BYTES_PER_S = 50.8e9  # of kernels that read over it
H200 = 4.8e12  # bytes a second of its memory
ROUTING = ("uniform", "sticky:0.3", "sticky:0.5", "sticky:0.66", "sticky:0.8", POPULAR)
Measured = dict[str, tuple[float, float]]  # routing -> tok/s, hit rate


@dataclass(frozen=True, slots=True)
class Row:
    """resident: share of the experts in slots. cpu: bytes a second while it is busy. packed: experts of
    bfloat16 were. packed_head: the head was too. device: published bytes a second of the GPU's memory."""

    shape: str
    resident: float
    cpu: float
    measured: Measured
    packed: bool = False
    packed_head: bool = False
    device: float = 3.35e12

    @property
    def name(self) -> str:
        return f"{self.shape}{', packed' if self.packed else ''}, {100 * self.resident:.0f} % in slots"


ROWS = (
    Row("qwen1.5-moe-a2.7b", 0.51, 90e9, {
        "uniform": (115.1, 0.514), "sticky:0.5": (129.9, 0.658), "sticky:0.66": (159.6, 0.752),
        "sticky:0.8": (208.1, 0.841), POPULAR: (187.0, 0.821),
    }),
    Row("qwen1.5-moe-a2.7b", 0.85, 95e9, {
        "uniform": (235.7, 0.849), "sticky:0.5": (232.7, 0.898), "sticky:0.66": (277.2, 0.934),
        "sticky:0.8": (307.5, 0.957), POPULAR: (316.4, 0.959),
    }),
    Row("qwen1.5-moe-a2.7b", 0.03, 98e9, {"uniform": (66.9, 0.03), "sticky:0.66": (79.1, 0.189)}),
    Row("gpt-oss-20b", 0.42, 57e9, {
        "uniform": (98.6, 0.42), "sticky:0.5": (111.1, 0.609), "sticky:0.66": (142.3, 0.732),
        POPULAR: (147.0, 0.759),
    }),
    Row("qwen1.5-moe-a2.7b", 0.66, 96e9, {
        "uniform": (180.9, 0.668), "sticky:0.5": (187.5, 0.773), "sticky:0.66": (212.0, 0.843),
        "sticky:0.8": (249.8, 0.902), POPULAR: (243.7, 0.887),
    }, packed=True),
    Row("qwen1.5-moe-a2.7b", 0.04, 98e9, {"uniform": (91.4, 0.039)}, packed=True),
    Row("qwen1.5-moe-a2.7b", 0.70, 84e9, {"uniform": (175.1, 0.703)}, packed=True),
    Row("qwen1.5-moe-a2.7b", 0.70, 99e9, {"sticky:0.5": (198.0, 0.791)}, packed=True),
    Row("qwen1.5-moe-a2.7b", 0.07, 98e9, {"uniform": (91.3, 0.076)}, packed=True),
    Row("qwen1.5-moe-a2.7b", 0.07, 81e9, {"sticky:0.5": (98.0, 0.337)}, packed=True),
    Row("qwen1.5-moe-a2.7b", 0.04, 112e9, {
        "sticky:0.5": (113.5, 0.258), "sticky:0.66": (121.2, 0.368),
    }, packed=True),
    Row("qwen1.5-moe-a2.7b", 0.53, 109e9, {"uniform": (133.0, 0.534), "sticky:0.5": (143.3, 0.667)}),
    Row("qwen1.5-moe-a2.7b", 0.06, 105e9, {"uniform": (75.6, 0.057), "sticky:0.5": (87.4, 0.289)}),
    Row("gpt-oss-20b", 0.54, 71e9, {"uniform": (121.8, 0.536), "sticky:0.5": (138.9, 0.686)}),
    Row("gpt-oss-20b", 0.96, 60e9, {"uniform": (246.9, 0.961), "sticky:0.5": (245.9, 0.973)}),
    Row("gpt-oss-20b", 1.0, 60e9, {"uniform": (298.7, 1.0)}),
    Row("qwen1.5-moe-a2.7b", 1.0, 96e9, {"uniform": (329.0, 1.0)}, packed=True),
    Row("phi-3.5-moe", 0.36, 116e9, {"sticky:0.5": (28.9, 0.491)}, packed=True),
    Row("deepseek-v2-lite", 0.49, 92e9, {"uniform": (71.7, 0.493), "sticky:0.66": (97.7, 0.712)}),
    Row("qwen3-30b-a3b", 0.23, 90e9, {"uniform": (38.3, 0.233), "sticky:0.66": (55.9, 0.546)}),
    Row("qwen3.5-35b-a3b", 0.26, 88e9, {"uniform": (77.5, 0.26), "sticky:0.66": (107.0, 0.578)}, True, True),
    Row("qwen3.5-35b-a3b", 0.09, 87e9, {"uniform": (64.7, 0.086), "sticky:0.66": (95.3, 0.473)}, True, True),
    Row("qwen3.5-35b-a3b", 0.08, 71e9, {"sticky:0.66": (85.8, 0.493)}, True, True),
    Row("qwen3.5-35b-a3b", 0.17, 77e9, {"sticky:0.66": (93.2, 0.531)}, True, True),
    Row("qwen3.5-35b-a3b", 0.43, 73e9, {"sticky:0.66": (115.8, 0.695)}, True, True),
    Row("nemotron-3-nano", 0.10, 90e9, {"sticky:0.66": (84.2, 0.48)}, True, True, H200),
    Row("nemotron-3-nano", 0.19, 90e9, {"sticky:0.66": (92.2, 0.56)}, True, True, H200),
    Row("nemotron-3-nano", 0.29, 90e9, {"sticky:0.66": (104.7, 0.61)}, True, True, H200),
    Row("nemotron-3-nano", 0.48, 90e9, {"sticky:0.66": (135.2, 0.73)}, True, True, H200),
    Row("granite-4.0-h-small", 0.14, 104e9, {
        "sticky:0.66": (31.9, 0.47), "uniform": (21.7, 0.14),
    }, packed=True, device=H200),
    Row("granite-4.0-h-small", 0.35, 104e9, {
        "sticky:0.66": (40.6, 0.60), "uniform": (25.8, 0.35),
    }, packed=True, device=H200),
    Row("lfm2-8b-a1b", 0.33, 104e9, {
        "sticky:0.66": (145.6, 0.62), "uniform": (114.4, 0.33),
    }, packed=True, device=H200),
    Row("lfm2-8b-a1b", 0.60, 104e9, {
        "sticky:0.66": (206.9, 0.77), "uniform": (168.7, 0.60),
    }, packed=True, device=H200),
    Row("lfm2-8b-a1b", 0.96, 104e9, {
        "sticky:0.66": (436.5, 0.98), "uniform": (409.7, 0.96),
    }, packed=True, device=H200),
    Row("gpt-oss-20b", 0.27, 73e9, {"sticky:0.66": (129.8, 0.626)}, packed_head=True),
    Row("gpt-oss-20b", 0.42, 69e9, {"sticky:0.66": (145.1, 0.711)}, packed_head=True),
    Row("gpt-oss-120b", 0.08, 57e9, {"sticky:0.66": (73.9, 0.57)}, packed_head=True, device=H200),
    Row("gpt-oss-120b", 0.15, 63e9, {"sticky:0.66": (80.7, 0.607)}, packed_head=True, device=H200),
    Row("gpt-oss-120b", 0.22, 62e9, {"sticky:0.66": (84.8, 0.641)}, packed_head=True, device=H200),
    Row("gpt-oss-120b", 0.36, 65e9, {"sticky:0.66": (96.9, 0.712)}, packed_head=True, device=H200),
    Row("glm-4.7-flash", 0.10, 84e9, {"sticky:0.66": (60.6, 0.523)}, True, True, H200),
    Row("glm-4.7-flash", 0.20, 90e9, {"sticky:0.66": (66.7, 0.576)}, True, True, H200),
    Row("gemma-4-26b-a4b", 0.05, 73e9, {"sticky:0.66": (70.5, 0.464)}, True, True),
    Row("gemma-4-26b-a4b", 0.09, 80e9, {"sticky:0.66": (75.2, 0.489)}, True, True),
    Row("gemma-4-26b-a4b", 0.17, 74e9, {"sticky:0.66": (78.7, 0.548)}, True, True),
    Row("gemma-4-26b-a4b", 0.21, 77e9, {"sticky:0.66": (82.5, 0.569)}, True, True),
    Row("qwen3-30b-a3b-fp8", 0.33, 80e9, {
        "uniform": (70.7, 0.33), "sticky:0.66": (92.0, 0.607),
    }, True, True, H200),
    Row("qwen3-30b-a3b-nvfp4", 0.34, 60e9, {
        "uniform": (95.0, 0.337), "sticky:0.66": (128.4, 0.637),
    }, True, True, H200),
    Row("qwen3-30b-a3b-nvfp4", 0.60, 59e9, {
        "uniform": (125.4, 0.595), "sticky:0.66": (152.8, 0.790),
    }, True, True, H200),
    Row("nemotron-3-nano-nvfp4", 0.26, 68e9, {
        "uniform": (130.0, 0.258), "sticky:0.66": (186.0, 0.629),
    }, True, True, H200),
    Row("nemotron-3-nano-nvfp4", 0.51, 70e9, {
        "uniform": (170.1, 0.508), "sticky:0.66": (228.7, 0.766),
    }, True, True, H200),
    Row("qwen3-30b-a3b-int4", 0.36, 61e9, {
        "uniform": (104.7, 0.359), "sticky:0.66": (142.6, 0.671),
    }, True, True, H200),
    Row("qwen3-30b-a3b-int4", 0.64, 63e9, {
        "uniform": (143.4, 0.635), "sticky:0.66": (174.8, 0.822),
    }, True, True, H200),
    Row("qwen3.5-35b-a3b-int4", 0.48, 53e9, {
        "uniform": (141.5, 0.482), "sticky:0.66": (164.6, 0.737),
    }, True, True, H200),
    Row("qwen3.5-35b-a3b-fp8", 0.25, 69e9, {
        "uniform": (86.0, 0.245), "sticky:0.66": (113.1, 0.558),
    }, True, True, H200),
)  # fmt: skip


def predicted(row: Row, routing: str, footprint: ModelFootprint, tokens: int) -> tuple[float, float]:
    """tok/s and hit rate of the second half."""
    with tempfile.TemporaryDirectory() as folder:
        if routing == POPULAR:
            path = Path(folder) / "trace.npz"
            popular_trace(footprint).write(path)
            routing = f"trace:{path}"
        settings = SyntheticSettings(parse_routing(routing), 0.9, 0.9)
        shape = footprint.num_layers, footprint.num_experts, footprint.experts_per_token
        model = SyntheticModel(settings, *shape)
        story = windows(model, draft_length=0, answers=1, prompt_tokens=80, new_tokens=2 * tokens)
        machine = predict_machine(
            footprint, int(row.resident * footprint.total_experts), Rates(row.device, LINK_BYTES_PER_S),
            cpu_bytes_per_s=row.cpu,
        )  # fmt: skip
        assert machine.lane is not None, "there is a CPU"
        machine = replace(machine, lane=replace(machine.lane, always=True))  # as most rows were measured
        tally = simulate("on-demand", machine, story, warm_up=tokens)
    stats = tally.counters.freeze()
    return stats.tokens_per_s or 0.0, stats.hit_rate or 0.0


def footprint_of(row: Row) -> ModelFootprint:
    source = RandomSource(find_shape(row.shape), SyntheticSettings())
    skeleton = source.skeleton(source.stored_dtype)
    footprint = measure_footprint(row.shape, source.stored_dtype, skeleton).in_codes(packing=row.packed)
    return replace(footprint, packs_head=row.packed_head)


def compare_rules(tokens: int) -> None:
    usual = SlotWorth.link_time
    rules: dict[str, Callable[[SlotWorth, float, float], float]] = {
        "never": lambda worth, idle, expert: 0.0, "always": lambda worth, idle, expert: float("inf"),
        "engine": usual,
    }  # fmt: skip
    for row in ROWS:
        footprint = footprint_of(row)
        for routing in ROUTING:
            cells = []
            for name, rule in rules.items():
                setattr(SlotWorth, "link_time", rule)  # noqa: B010
                speed, hits = predicted(row, routing, footprint, tokens)
                cells.append(f"{name} {speed:.0f} tok/s ({100 * hits:.0f} %)")
            print(f"predicted: {row.name}, {routing}: {', '.join(cells)}", flush=True)
    setattr(SlotWorth, "link_time", usual)  # noqa: B010


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rules", action="store_true")
    args = parser.parse_args()
    if args.rules:
        compare_rules(args.tokens)
        return
    off = []
    for row in ROWS:
        footprint = footprint_of(row)
        for routing, (speed, hits) in row.measured.items():
            said, said_hits = predicted(row, routing, footprint, args.tokens)
            off.append(said / speed - 1)
            print(
                f"{row.name}, {routing}: measured {speed:.1f} tok/s ({100 * hits:.0f} % hit), predicted "
                f"{said:.1f} ({100 * said_hits:.0f} %), {100 * off[-1]:+.0f} %",
                flush=True,
            )
    print(f"off by {100 * statistics.mean(abs(share) for share in off):.0f} % in the mean")


if __name__ == "__main__":
    main()
