"""Models that a CPU runs alone, by the shape of their weights (random): experts and linear layers where their
16-bit weights lie, and the same experts copied into float32 slots. Prints what a token takes beside what
reading its weights takes at the rate measured in the same run.

    python benchmarks/in_place.py --shapes olmoe-1b-7b gpt-oss-20b --prompt 128 --tokens 24
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import BudgetError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.engine import Engine
from localmoe.experts import cpu_lane
from localmoe.experts.in_place import InPlaceMemory
from localmoe.model.shapes import SHAPES

_WAYS = {"in place": "auto", "slots": "vram+link"}
_READ_BYTES = 1 << 30


def read_rate() -> float:
    """Bytes a second of plain reading by all of PyTorch's threads, the best of five."""
    numbers = torch.ones(_READ_BYTES // 4)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        numbers.sum()
        best = max(best, _READ_BYTES / (time.perf_counter() - started))
    return best


def read_bytes(engine: Engine) -> float:
    """Of weights, for one token: linear layers, and its experts."""
    footprint, plan = engine.footprint, engine.plan
    linear_bytes = 2 if plan.in_place else 4
    experts = footprint.num_layers * footprint.experts_per_token * plan.slot_bytes
    return footprint.linear_params * linear_bytes + experts


def pytorch_threads(count: int) -> None:
    """Have PyTorch use so many in passes whose experts lie in place, instead of one."""

    @contextmanager
    def threads(memory: InPlaceMemory) -> Iterator[None]:
        torch.set_num_threads(count)
        yield

    setattr(InPlaceMemory, "one_pytorch_thread", threads)  # noqa: B010


def measure(shape: str, way: str, args: argparse.Namespace, rate: float) -> None:
    """One line."""
    config = EngineConfig(
        device="cpu", draft_length=0, context=args.context, lanes=_WAYS[way],  # type: ignore[arg-type]
        cpu_threads=args.threads if way == "in place" else None, pack_experts=not args.no_packing,
    )  # fmt: skip
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    try:
        engine = Engine.load_shape(SHAPES[shape], config, SyntheticSettings())
    except BudgetError as error:
        print(f"{shape}, {way}: {error}", flush=True)
        return
    with engine:
        load_s = time.perf_counter() - started
        generator = torch.Generator().manual_seed(1)
        rows = []
        for _ in range(1 + args.answers):
            ids = torch.randint(0, engine.footprint.vocab_size, (args.prompt,), generator=generator)
            request = GenerationRequest(prompt_token_ids=tuple(ids.tolist()), max_new_tokens=args.tokens)
            rows.append(list(engine.stream(request))[-1].stats)
        tpot_s = statistics.median(row.tpot_s or 0.0 for row in rows[1:])
        ttft_s = statistics.median(row.ttft_s for row in rows[1:])
        floor_s = read_bytes(engine) / rate
        held = psutil.Process().memory_info().rss - before
        share = f"{engine.plan.resident_share:.0%} in slots" if way == "slots" else engine.info().lanes
        print(
            f"{shape}, {way} ({share}): {1e3 * tpot_s:.1f} ms a token ({1 / tpot_s:.1f} tok/s), reading "
            f"{read_bytes(engine) / 1e9:.2f} GB takes {1e3 * floor_s:.1f}; {args.prompt} tokens of a prompt "
            f"{ttft_s:.2f} s; loaded in {load_s:.1f} s, RAM {held / 1e9:.1f} GB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["olmoe-1b-7b"], choices=sorted(SHAPES))
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=_WAYS)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--answers", type=int, default=3)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, help="in place; default: PyTorch's")
    parser.add_argument("--no-packing", action="store_true", help="experts in 16 bits")
    parser.add_argument("--pytorch-threads", type=int, help="in place; default: one")
    parser.add_argument("--spin-us", type=float, help="for which the lane's threads look out for a job")
    args = parser.parse_args()
    if args.pytorch_threads is not None:
        pytorch_threads(args.pytorch_threads)
    if args.spin_us is not None:
        cpu_lane.SPIN_S = 1e-6 * args.spin_us
    rate = read_rate()
    print(f"{torch.get_num_threads()} threads of PyTorch, which read {rate / 1e9:.1f} GB/s")
    for shape in args.shapes:
        for way in args.ways:
            measure(shape, way, args, rate)


if __name__ == "__main__":
    main()
