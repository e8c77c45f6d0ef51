"""Jobs of the CPU lane whose experts have many tokens, computed by the processor's matrix unit, or by plain
code in its place; prints how far they are from float64, and how many rows depend on those beside them."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[level]) for level in (0, 1, 2)]

import support.without_collector  # noqa: E402, F401
import torch  # noqa: E402
from support.emulated_unit import emulate  # noqa: E402

from localmoe.kernels.activations import Activation  # noqa: E402

if sys.argv[1] == "emulated":
    emulate()

from test_cpu_lane import EXPERTS, TOP_K, Rig  # noqa: E402
from test_cpu_lane_bf12 import refill  # noqa: E402

from localmoe.experts import lane_arguments  # noqa: E402
from localmoe.kernels.cpu import gathered_rows  # noqa: E402
from localmoe.kernels.cpu.processor import may_use_tiles  # noqa: E402
from localmoe.kernels.weight_forms import WeightForm  # noqa: E402

TOKENS, INNER = 150, 128
RECORDS, ROOMS = 11, 20  # places among the worker's arguments
COUNTS = ((5, 16, 150), (70, 4, 33), (17, 64, 65), (48, 2, 3), (49, 1, 32))  # tokens of each expert of a job


ACTIVATIONS = (  # biased; bytes of a thread's room: 0 is for 16 tokens
    (Activation("silu"), True, 1 << 20),
    (Activation("silu", limit=0.6), False, 1 << 20),
    (Activation("relu", gated=False), False, 0),
)


def errors_of(made: Rig, *, late: bool = False) -> list[float]:
    """Of each pair. Experts have other tokens in each job, and not the first ones. late: the first one of a
    job is not in RAM when it begins, and computed last."""
    found, chance = [], torch.Generator().manual_seed(1)
    for counts in COUNTS:
        jobs = []
        for k, count in enumerate(counts):
            tokens = torch.randperm(TOKENS, generator=chance)[:count].sort().values.tolist()
            share = INNER if count % 2 else INNER // 2
            jobs.append(((k + count) % EXPERTS, [TOP_K * token + k for token in tokens], share))
        records = made.lane._arguments[RECORDS][0]
        first, address = (1, jobs[0][0]), int(records[1, jobs[0][0]])
        if late:
            records[first] = 0
            threading.Timer(0.05, records.__setitem__, (first, address)).start()
        out = made.lane.compute(1, made.x, jobs).double()
        for expert, pairs, share in jobs:
            for pair in pairs:
                wanted = made.wanted(1, expert, pair // TOP_K, share)
                found.append(float((out[pair] - wanted).norm() / wanted.norm()))
    return found


def differing(made: Rig) -> int:
    """Rows whose bits depend on which others are with them, of as many as the matrix unit is used for."""
    pairs = [TOP_K * token for token in range(TOKENS)]
    whole = made.lane.compute(0, made.x, [(2, pairs, INNER)])[pairs].clone()
    parts = [range(3, 9), range(40, 57), range(60, 130)]
    found = [made.lane.compute(0, made.x, [(2, [pairs[i] for i in part], INNER)])[pairs] for part in parts]
    return sum(
        not torch.equal(got[i], whole[i]) for got, part in zip(found, parts, strict=True) for i in part
    )


def main() -> None:
    emulated = sys.argv[1] == "emulated"
    assert emulated or may_use_tiles()
    errors, used, changed = [], 0, 0
    for activation, biased, room in ACTIVATIONS:
        with (
            mock.patch.object(lane_arguments, "may_use_tiles", lambda: True),
            mock.patch.object(gathered_rows, "_LEAST_ROOM", room),
        ):
            made = Rig(
                192, INNER, form=WeightForm.BF12, activation=activation, biased=biased, tokens=TOKENS
            )  # fmt: skip
        try:
            refill(made, [2.0**-40, 0.0] if activation.gated else [100.0, -3.0], 4)
            alone = [made.lane.compute(0, made.x, [(2, [pair], INNER)])[pair].clone() for pair in (9, 60)]
            together = made.lane.compute(0, made.x, [(2, list(range(0, 90, 3)), INNER)])[[9, 60]]
            changed += not torch.equal(torch.stack(alone), together)  # nobody asked for the unit
            made.lane.use_matrix_unit(True)
            errors += errors_of(made) + errors_of(made, late=True)
            changed += differing(made)
            used += made.lane._arguments[ROOMS][0].any(axis=1).sum()  # by threads that gathered rows
        finally:
            made.lane.close()
    print(json.dumps({"errors": errors, "changed": changed, "used": int(used)}))


if __name__ == "__main__":
    main()
