"""Experts on the CPU: bytes of weights a second by threads, experts a job and tokens an expert, beside
torch's own products, a plain read, and (with a GPU) copies to it at the same time.

python benchmarks/cpu_experts.py [--shape qwen1.5-moe-a2.7b] [--form plain|mxfp4|bf12|fp8|nvfp4|int4]
    [--threads 8 15 16]
                                 [--compute bfloat16|float32]    float32: as where no GPU is
                                 [--no-matrix-unit]    vectors alone, where the processor has AMX

Random weights, the answers are checked against float64. Prints a table.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from localmoe.core.types import ExpertKey
from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.host_store import HostStore
from localmoe.experts.records import RecordLayout
from localmoe.hardware.cpu import core_counts, cpu_name_and_flags
from localmoe.kernels.activations import Activation
from localmoe.kernels.int4_tiles import SPANS
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.shapes import find_shape

EXPERTS = 96  # records that take turns: more than any cache holds
JOBS = (
    (1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (27, 1), (8, 2), (27, 2), (8, 3), (8, 4), (27, 4), (8, 8),
    (8, 16), (4, 32), (4, 64), (8, 32), (8, 64),
)  # fmt: skip


def make_store(hidden: int, inner: int, form: WeightForm) -> HostStore:
    layout = RecordLayout((2 * inner, hidden), (hidden, inner), False, form)
    store = HostStore([layout], EXPERTS, torch.bfloat16)
    for expert in range(EXPERTS):
        key = ExpertKey(0, expert)
        if form is WeightForm.PLAIN:
            store.record(key).normal_(0, 0.02)
            continue
        if form is WeightForm.BF12:
            for packed in store.bf12_views(key):
                packed.put(0, torch.empty(packed.rows, packed.columns).normal_(0, 0.02).bfloat16())
            continue
        if form is WeightForm.FP8:
            for eight in store.fp8_views(key):
                numbers = torch.empty(eight.rows, eight.columns).normal_(0, 100).clamp(-448, 448)
                codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
                eight.put(0, codes, torch.full((eight.rows, eight.scales.shape[1]), 2.0**-12))
            continue
        if form in SPANS:
            for integers in store.int4_views(key):
                integers.codes.random_(0, 256)
                integers.words.fill_(int(torch.tensor(2.0**-8).view(torch.int32)) | 7)
            continue
        if form is WeightForm.NVFP4:
            for four in store.nvfp4_views(key):
                four.codes.random_(0, 256)
                four.scales.random_(100, 120)
                four.factors.fill_(2.0**-14)
            continue
        for matrix in store.mxfp4_views(key):
            matrix.codes.random_(0, 256)
            matrix.scales.random_(119, 122)
    return store


def check(lane: CpuLane, store: HostStore, compute: torch.dtype) -> None:
    """One job against float64."""
    inner = store.layouts[0].down_shape[1]
    x = torch.randn(3, lane.layout.hidden).to(compute)
    pair = 2 * lane.layout.top_k  # of token 2
    out = lane.compute(0, x, [(5, [pair], inner)])
    gate_up, down = (view.double() for view in store.weights(ExpertKey(0, 5)))
    product = x[2].double() @ gate_up.T
    wanted = (F.silu(product[:inner]) * product[inner:]).to(compute).double() @ down.T
    assert torch.allclose(out[pair].double(), wanted, rtol=1e-3, atol=1e-3), (
        "the CPU lane computes something else"
    )


def lane_rate(
    lane: CpuLane, num_experts: int, tokens: int, compute: torch.dtype, seconds: float = 0.25
) -> tuple[float, float]:
    """(bytes a second of the jobs alone, microseconds a job from posting to reading the answer)."""
    inner = lane._store.layouts[0].down_shape[1]
    x = torch.randn(tokens, lane.layout.hidden).to(compute)
    pairs = [lane.layout.top_k * row for row in range(tokens)]
    jobs = [
        [((first + i) % EXPERTS, pairs, inner) for i in range(num_experts)]
        for first in range(0, EXPERTS, num_experts)
    ]
    lane.compute(0, x, jobs[0])
    before, started, count = lane.counters(), time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        lane.compute(0, x, jobs[count % len(jobs)])
        count += 1
    wall, after = time.perf_counter() - started, lane.counters()
    return (after.num_bytes - before.num_bytes) / (after.busy_s - before.busy_s), wall / count * 1e6


def torch_rates(store: HostStore, threads: int) -> None:
    """The same products by torch: one after the other, and one expert a thread."""
    inner, hidden = store.layouts[0].down_shape[1], store.layouts[0].down_shape[0]
    num_bytes = EXPERTS * store.layouts[0].num_bytes(torch.bfloat16)

    def expert(index: int, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = store.views(ExpertKey(0, index))
        product = F.linear(x, gate_up)
        return F.linear(F.silu(product[:, :inner]) * product[:, inner:], down)

    for tokens in (1, 2, 4, 8, 16):
        x = torch.randn(tokens, hidden).bfloat16()
        torch.set_num_threads(threads)
        expert(0, x)
        started = time.perf_counter()
        for index in range(EXPERTS):
            expert(index, x)
        together = num_bytes / (time.perf_counter() - started)
        torch.set_num_threads(1)
        with concurrent.futures.ThreadPoolExecutor(
            threads, initializer=lambda: torch.set_num_threads(1)
        ) as pool:
            list(pool.map(lambda e, x=x: expert(e, x), range(EXPERTS)))
            started = time.perf_counter()
            list(pool.map(lambda e, x=x: expert(e, x), range(EXPERTS)))
            apart = num_bytes / (time.perf_counter() - started)
        print(
            f"torch, {threads} threads, {tokens:2d} tokens: {together / 1e9:6.1f} GB/s one by one, "
            f"{apart / 1e9:6.1f} one expert a thread",
            flush=True,
        )
    torch.set_num_threads(threads)


@contextmanager
def copies_to_the_gpu(report: list[float]) -> Iterator[None]:
    """Host-to-device copies without pause; their bytes a second are appended at the end."""
    stop, count = threading.Event(), [0]
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")

    def pump() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                target.copy_(source, non_blocking=True)
                stream.synchronize()
                count[0] += source.numel()

    thread = threading.Thread(target=pump)
    thread.start()
    time.sleep(0.1)
    started, before = time.perf_counter(), count[0]
    yield
    report.append((count[0] - before) / (time.perf_counter() - started))
    stop.set()
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--threads", type=int, nargs="*", default=[])
    parser.add_argument("--form", choices=[form.value for form in WeightForm], default="plain")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-matrix-unit", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    form, compute = WeightForm(args.form), getattr(torch, args.compute)
    config = find_shape(args.shape).config()
    inner = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    physical, logical = core_counts()
    name, flags = cpu_name_and_flags()
    print(f"{name}, {physical} cores, {logical} threads, {' '.join(flags)}, torch {torch.__version__}")
    store = make_store(int(config.hidden_size), inner, form)
    products = 3 * inner * int(config.hidden_size) / store.layouts[0].num_bytes(torch.bfloat16)  # a byte
    words = store._layers[0].view(torch.int64)
    words.sum()
    started = time.perf_counter()
    words.sum()
    print(f"plain read by torch: {words.nbytes / (time.perf_counter() - started) / 1e9:.1f} GB/s")
    for threads in args.threads or [physical]:
        started = time.perf_counter()
        lane = CpuLane(
            store, Activation("silu"), [(None, None)], tokens=72, top_k=8, threads=threads, pinned=False,
            dtype=compute,
        )  # fmt: skip
        print(f"{threads} threads, ready in {time.perf_counter() - started:.2f} s")
        lane.use_matrix_unit(not args.no_matrix_unit)
        print(f"matrix unit {'used' if lane.has_matrix_unit and not args.no_matrix_unit else 'not used'}")
        check(lane, store, compute)
        for num_experts, tokens in JOBS:
            rate, microseconds = lane_rate(lane, num_experts, tokens, compute)
            line = (
                f"{threads:2d} threads, {num_experts:2d} experts x {tokens:2d} tokens: "
                f"{rate / 1e9:6.1f} GB/s, {microseconds:8.0f} us a job, "
                f"{rate * tokens * products / 1e9:6.1f} G products/s"
            )
            if torch.cuda.is_available() and (num_experts, tokens) in ((2, 1), (27, 1), (27, 2), (27, 4)):
                copied: list[float] = []
                with copies_to_the_gpu(copied):
                    rate, _ = lane_rate(lane, num_experts, tokens, compute)
                line += f"; beside copies {rate / 1e9:.1f} and {copied[0] / 1e9:.1f} GB/s"
            print(line, flush=True)
        lane.close()
    if not args.no_torch and form is WeightForm.PLAIN:
        torch_rates(store, physical)


if __name__ == "__main__":
    main()
