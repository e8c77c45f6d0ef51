"""What opening a verify pass takes the host: scores, landing slots, and the residency table as it is
uploaded, with empty and with full slots. The GPU waits for it where a gate ends drafts. Runs on a CPU,
without kernels and weights; measure on an idle machine.

python benchmarks/pass_opening.py [--share 0.25] [--passes 400]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from localmoe.core.types import ExpertKey
from localmoe.experts.device_memory import DeviceExpertMemory
from localmoe.experts.host_store import HostStore
from localmoe.experts.records import RecordLayout
from localmoe.experts.residency_block import ResidencyBlock
from localmoe.experts.slots import DeviceSlots
from localmoe.experts.transfers import HostTransfers
from localmoe.prefetch.policies.moe_speq import MoeSpeqPolicy
from localmoe.prefetch.policies.on_demand import OnDemandPolicy
from localmoe.prefetch.policy import CacheShape, Policy
from localmoe.prefetch.scheduler import Scheduler

SHAPES = {"qwen1.5-moe-a2.7b": (24, 60, 4), "qwen3-30b-a3b": (48, 128, 8)}
LAYOUT = RecordLayout((4, 2), (2, 2), transposed=False)  # of which nothing is read
CPU = torch.device("cpu")


def make_memory(
    shape: tuple[int, int, int], slots: int, make: Callable[[CacheShape], Policy]
) -> DeviceExpertMemory:
    """Of such a model, with empty slots."""
    layers, experts, _ = shape
    block = ResidencyBlock(layers, experts, CPU)
    scheduler = Scheduler(make(CacheShape(*shape, slots)))
    memory = DeviceExpertMemory(
        HostStore([LAYOUT] * layers, experts, torch.float32),
        DeviceSlots(slots, LAYOUT.elements, torch.float32, CPU),
        block,
        HostTransfers(block.done),
        scheduler.keep_scores,
    )
    scheduler.attach(memory)
    return memory


def opening(memory: DeviceExpertMemory, passes: int) -> str:
    """Microseconds of one."""
    took, nothing = [], np.zeros(memory.block.log.shape, dtype=np.int32)
    for _ in range(passes):
        began = time.perf_counter()
        memory.open_pass()
        took.append(1e6 * (time.perf_counter() - began))
        memory.close_pass(nothing)
    return f"{np.median(took):.0f} us (least {min(took):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.25, help="of the experts that find room")
    parser.add_argument("--passes", type=int, default=400)
    args = parser.parse_args()
    for name, shape in SHAPES.items():
        layers, experts, _ = shape
        slots = int(args.share * layers * experts)
        for policy in (OnDemandPolicy, MoeSpeqPolicy):
            memory = make_memory(shape, slots, policy)
            empty = opening(memory, args.passes)
            for place in range(slots):
                memory.prefetch(ExpertKey(*divmod(place, experts)), float(place))
            memory.pump()
            memory.drop_prefetches()
            full = opening(memory, args.passes)
            assert len(memory.resident_keys()) == slots
            print(f"{name}, {slots} slots, {policy.__name__}: empty {empty}, full {full}")


if __name__ == "__main__":
    main()
