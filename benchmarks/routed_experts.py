"""The target's expert kernels on a GPU: correct, row-invariant, and how near to the memory's and the link's
speed.

python benchmarks/routed_experts.py [--sweep] [--shapes qwen1.5-moe,...]

For each shape: error against float64, whether a token's bits are the same for 1 to 64 tokens, then
microseconds a layer in a CUDA graph over distinct layers, all experts in slots, beside the floor (bytes of
the distinct experts over the read bandwidth measured in the same run); then with some of them read over the
link.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from localmoe.experts.records import RecordLayout
from localmoe.kernels.activations import Activation
from localmoe.kernels.bf12_tiles import Bf12Matrix
from localmoe.kernels.gpu import routed_experts as kernels
from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.gpu.routed_experts import ExpertShape, Launch, routed_experts
from localmoe.kernels.int4_tiles import ZERO_BITS
from localmoe.kernels.residency import ON_HOST, ResidencyView
from localmoe.kernels.weight_forms import WeightForm
from localmoe.quant.float8 import decode_rows
from localmoe.quant.int4 import Int4Rows
from localmoe.quant.mxfp4 import decode
from localmoe.quant.nvfp4 import decode_rows as decode_nvfp4

SILU = Activation("silu")
OAI = Activation("swiglu_oai", alpha=1.702, limit=7.0, interleaved=True)


@dataclass(frozen=True)
class Case:
    """A model's experts: shape, number, experts a token."""

    shape: ExpertShape
    experts: int
    top_k: int


CASES = {
    "qwen1.5-moe": Case(ExpertShape(2048, 1408, False, SILU), 60, 4),
    "qwen3-30b-a3b": Case(ExpertShape(2048, 768, False, SILU), 128, 8),
    "phi-3.5-moe": Case(ExpertShape(4096, 6400, False, SILU), 16, 2),
    "qwen1.5-moe-bf12": Case(ExpertShape(2048, 1408, False, SILU, form=WeightForm.BF12), 60, 4),
    "qwen1.5-moe-fp8": Case(ExpertShape(2048, 1408, False, SILU, form=WeightForm.FP8), 60, 4),
    "qwen1.5-moe-int4": Case(ExpertShape(2048, 1408, False, SILU, form=WeightForm.INT4), 60, 4),
    "phi-3.5-moe-int4": Case(ExpertShape(4096, 6400, False, SILU, form=WeightForm.INT4), 16, 2),
    "qwen1.5-moe-int4-32": Case(ExpertShape(2048, 1408, False, SILU, form=WeightForm.INT4_32), 60, 4),
    "phi-3.5-moe-int4-32": Case(ExpertShape(4096, 6400, False, SILU, form=WeightForm.INT4_32), 16, 2),
    "qwen1.5-moe-nvfp4": Case(ExpertShape(2048, 1408, False, SILU, form=WeightForm.NVFP4), 60, 4),
    "phi-3.5-moe-nvfp4": Case(ExpertShape(4096, 6400, False, SILU, form=WeightForm.NVFP4), 16, 2),
    "phi-3.5-moe-fp8": Case(ExpertShape(4096, 6400, False, SILU, form=WeightForm.FP8), 16, 2),
    "phi-3.5-moe-bf12": Case(ExpertShape(4096, 6400, False, SILU, form=WeightForm.BF12), 16, 2),
    "gpt-oss-20b": Case(ExpertShape(2880, 2880, True, OAI, form=WeightForm.MXFP4), 32, 4),
    "gpt-oss-20b-16-bit": Case(ExpertShape(2880, 2880, True, OAI), 32, 4),
}


_BITS = {
    WeightForm.PLAIN: 16, WeightForm.MXFP4: 4, WeightForm.BF12: 12, WeightForm.FP8: 8, WeightForm.NVFP4: 4.5,
    WeightForm.INT4: 4.25, WeightForm.INT4_32: 5,
}  # fmt: skip
_PACKED = 4  # records in BF12 that differ


def _pack(matrices: Sequence[Bf12Matrix]) -> None:
    for matrix in matrices:
        matrix.put(0, torch.randn(matrix.rows, matrix.columns).mul_(0.02).bfloat16())


class Layers:
    """Weights of several layers, all resident, and pinned host copies of the first layer's."""

    def __init__(self, case: Case, num_layers: int) -> None:
        self.case = case
        hidden, inner = case.shape.hidden, case.shape.inner
        shapes = [(2 * inner, hidden), (hidden, inner)]
        if case.shape.transposed:
            shapes = [shape[::-1] for shape in shapes]
        self.layout = RecordLayout(shapes[0], shapes[1], case.shape.transposed, case.shape.form)
        self.record_bytes = self.layout.num_bytes(torch.bfloat16)
        self.weights = [self._records() for _ in range(num_layers)]
        self.done = torch.zeros(1, dtype=torch.int64, device="cuda")

    def _records(self) -> Tensor:
        """(E, words)."""
        experts = self.case.experts
        if self.layout.bf12:
            return self._packed()[torch.arange(experts, device="cuda") % _PACKED]
        if self.layout.fp8:
            return self._in_fp8()
        if self.layout.form is WeightForm.PLAIN:
            return torch.randn(experts, self.layout.elements, device="cuda", dtype=torch.bfloat16).mul_(0.02)
        records = torch.randint(0, 256, (experts, self.record_bytes), device="cuda", dtype=torch.uint8)
        for record in records:
            if self.layout.span:
                for integers in self.layout.int4_views(record):
                    scales = torch.rand(integers.words.shape, device="cuda").mul_(0.005)
                    words = scales.view(torch.int32) & ~ZERO_BITS
                    integers.words.copy_(words | torch.randint_like(words, 0, 16))
                continue
            if self.layout.nvfp4:
                for four in self.layout.nvfp4_views(record):
                    four.scales.random_(100, 120)
                    four.factors.fill_(1e-4)
                continue
            for matrix in self.layout.mxfp4_views(record):
                matrix.scales.random_(118, 122)
        return records

    def _in_fp8(self) -> Tensor:
        """Codes of normal weights."""
        size = self.case.experts, self.record_bytes
        codes = torch.randn(size, device="cuda", dtype=torch.bfloat16).mul_(100).clamp_(-448, 448)
        records = codes.to(torch.float8_e4m3fn).view(torch.uint8)
        for record in records:
            for matrix in self.layout.fp8_views(record):
                matrix.scales.uniform_(1e-4, 3e-4)
        return records

    def _packed(self) -> Tensor:
        """A few records in BF12, packed on the host."""
        records = torch.zeros(_PACKED, self.record_bytes, dtype=torch.uint8)
        with ThreadPoolExecutor() as threads:
            list(threads.map(_pack, (self.layout.bf12_views(record) for record in records)))
        return records.cuda()

    def matrices(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """gate_up (2I, H) and down (H, I)."""
        record = self.weights[layer][expert]
        if self.layout.mxfp4:
            taken = (matrix.take() for matrix in self.layout.mxfp4_views(record.cpu()))
            both = [decode(codes.view(len(codes), -1, 16), scales).cuda() for codes, scales in taken]
            return both[0], both[1]
        if self.layout.bf12:
            gate, up, down = (matrix.take().cuda() for matrix in self.layout.bf12_views(record.cpu()))
            return torch.cat((gate, up)), down
        if self.layout.fp8:
            parts = self.layout.fp8_views(record.cpu())
            gate, up, down = (decode_rows(*each.take()).cuda() for each in parts)
            return torch.cat((gate, up)), down
        if self.layout.nvfp4:
            fours = self.layout.nvfp4_views(record.cpu())
            gate, up, down = (decode_nvfp4(*each.take()).cuda() for each in fours)
            return torch.cat((gate, up)), down
        if self.layout.span:
            rows = (Int4Rows(*each.take(), each.span) for each in self.layout.int4_views(record.cpu()))
            gate, up, down = (each.decode().cuda() for each in rows)
            return torch.cat((gate, up)), down
        gate_up, down = self.layout.views(record)
        return (gate_up.T, down.T) if self.layout.transposed else (gate_up, down)

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two records hold the same weights."""
        if not self.layout.packed:
            return torch.equal(one, other)
        if not self.layout.bf12:  # of whole pages, whose ends nobody reads
            both = [self.layout.packed_views(record.cpu()) for record in (one, other)]
            taken = (zip(a.take(), b.take(), strict=True) for a, b in zip(*both, strict=True))
            return all(torch.equal(a, b) for parts in taken for a, b in parts)
        pairs = zip(self.layout.bf12_views(one), self.layout.bf12_views(other), strict=True)
        return all(torch.equal(a.take(), b.take()) for a, b in pairs)

    def view(self, layer: int) -> ResidencyView:
        """All experts in slots."""
        experts = self.case.experts
        start, stride = self.weights[layer].data_ptr(), self.record_bytes
        address = start + stride * torch.arange(experts, device="cuda")
        zeros = torch.zeros(experts, dtype=torch.int64, device="cuda")
        return ResidencyView(
            address, address, zeros, torch.rand(experts, device="cuda"), torch.zeros_like(zeros)[:4],
            self.done, torch.zeros(experts, dtype=torch.int32, device="cuda"),
        )  # fmt: skip


def run(layers: Layers, layer: int, view: ResidencyView, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One layer's experts."""
    live = LIVE[x.shape[0]]
    groups = group_pairs(index, live, view)
    return routed_experts(
        x, groups, index, weights, live, layers.done, layers.case.shape, layers.case.experts
    )


LIVE: dict[int, Tensor] = {}


def run_again(
    layers: Layers, view: ResidencyView, table: list[Tensor], x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """With the table as it was before a pass entered what it kept."""
    for tensor, was in zip((view.address, view.ticket, view.landing), table, strict=True):
        tensor.copy_(was)
    return run(layers, 0, view, x, index, weights)


def reference(layers: Layers, layer: int, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """float64, with the intermediate rounded as the kernels do."""
    shape = layers.case.shape
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for t, k in itertools.product(*map(range, index.shape)):
        gate_up, down = (matrix.double() for matrix in layers.matrices(layer, int(index[t, k])))
        y = gate_up @ x[t].double()
        gate, up = shape.activation.split(y)
        hidden = shape.activation.apply(gate, up).bfloat16().double()
        out[t] += weights[t, k].double() * (down @ hidden)
    return out


def timed_graph(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median microseconds a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(repeats + 3):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        if i >= 3:
            times.append(a.elapsed_time(b))
    return float(sorted(times)[len(times) // 2]) * 1e3 / len(calls)


def read_bandwidth() -> float:
    """Bytes a second that a plain sum over a large tensor reads."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return data.nbytes / timed_graph([lambda: data.sum()] * 2) * 1e6


def routed(case: Case, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, case.shape.hidden, device="cuda", dtype=torch.bfloat16)
    index = torch.rand(tokens, case.experts, device="cuda").topk(case.top_k).indices
    weights = torch.rand(tokens, case.top_k, device="cuda")
    return x, index, weights


def check(layers: Layers) -> None:
    x, index, weights = routed(layers.case, 64)
    whole = run(layers, 0, layers.view(0), x, index, weights)
    want = reference(layers, 0, x, index, weights)
    error = float((whole.double() - want).norm() / want.norm())
    same = {}
    for tokens in (1, 2, 5, 9, 16, 17, 33):
        part = run(layers, 0, layers.view(0), x[:tokens], index[:tokens], weights[:tokens])
        last = run(layers, 0, layers.view(0), x[-tokens:], index[-tokens:], weights[-tokens:])
        same[tokens] = torch.equal(part, whole[:tokens]) and torch.equal(last, whole[-tokens:])
    differ = [tokens for tokens, ok in same.items() if not ok]
    print(f"  error {error:.1e}, same bits for {len(same) - len(differ)} of {len(same)} widths, not {differ}")
    for block_rows in (32, 64, 128):
        live = LIVE[64]
        groups = group_pairs(index, live, layers.view(0))
        try:
            other = routed_experts(
                x,
                groups,
                index,
                weights,
                live,
                layers.done,
                layers.case.shape,
                layers.case.experts,
                block_rows=block_rows,
            )
            print(f"  tiles of {block_rows} rows: same bits {torch.equal(other, whole)}")
        except Exception as error:  # tiles that do not fit the device must not end the check
            print(f"  tiles of {block_rows} rows: {str(error)[:80]}")


def speed(layers: Layers, tokens: int) -> tuple[float, float]:
    """(us a layer, bytes of distinct experts a layer)."""
    parts = [routed(layers.case, tokens) for _ in layers.weights]
    views = [layers.view(i) for i in range(len(layers.weights))]
    calls = [lambda i=i: run(layers, i, views[i], *parts[i]) for i in range(len(parts))]
    distinct = sum(int(index.unique().numel()) for _, index, _ in parts) / len(parts)
    return timed_graph(calls), distinct * layers.record_bytes


def over_the_link(layers: Layers) -> None:
    """A window of 9 tokens with 1 to 8 of its experts on the host, read and kept, or only read."""
    case = layers.case
    records = layers.weights[0]
    host = torch.empty(records.shape, dtype=records.dtype, pin_memory=True)
    host.copy_(records)
    spare = torch.zeros_like(records[:8])
    x, index, weights = routed(case, 9)
    want = run(layers, 0, layers.view(0), x, index, weights)
    asked = index.unique().tolist()
    for missing in (1, 4, 8):
        for keep in (False, True):
            view = layers.view(0)
            for expert in asked[:missing]:
                view.address[expert] = host[expert].data_ptr()
                view.ticket[expert] = ON_HOST
            landing = torch.zeros(8, dtype=torch.int64, device="cuda")
            if keep:
                landing[:missing] = spare.data_ptr() + layers.record_bytes * torch.arange(
                    missing, device="cuda"
                )
            view = replace(view, landing=landing, score=torch.full_like(view.score, float("inf")))
            before = [tensor.clone() for tensor in (view.address, view.ticket, view.landing)]
            got = run(layers, 0, view, x, index, weights)
            kept = all(
                layers.same(spare[int(view.log[e]) >> 8], layers.weights[0][e]) for e in asked[:missing]
            ) if keep else None  # fmt: skip
            us = timed_graph([partial(run_again, layers, view, before, x, index, weights)])
            rate = missing * layers.record_bytes / us / 1e3
            same = torch.equal(got, want)
            print(f"  {missing} missing, keep {keep}: {us:.0f} us, {rate:.1f} GB/s, same {same}, kept {kept}")


def sweep(layers: Layers) -> None:
    shape = layers.case.shape
    for tokens in (1, 9):
        base = (kernels.gate_up_launch, kernels.down_launch)
        for which in (0, 1):
            results = []
            for n, k, w, s in itertools.product((16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (3, 4, 5)):
                size = (shape.hidden, shape.inner)[which]
                tile = (2 - which) * n + 16
                bits = _BITS[shape.form]
                if size % k or tile * k * bits // 8 * s > 96 << 10 or n * k < 2048 or n * k > 16384:
                    continue
                launch = Launch(n, k, w, s)
                names = ("gate_up_launch", "down_launch")
                setattr(kernels, names[which], lambda *a, v=launch: v)
                try:
                    results.append((speed(layers, tokens)[0], n, k, w, s))
                except Exception as error:  # blocks that do not fit must not end the sweep
                    print("   fail", launch, str(error)[:60])
                setattr(kernels, names[which], base[which])
            results.sort()
            print(
                f"  sweep T={tokens} {'gate_up' if which == 0 else 'down'}: "
                + "; ".join(f"{us:.1f} us n{n} k{k} w{w} s{s}" for us, n, k, w, s in results[:5]),
                f"... worst {results[-1]}",
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", default=",".join(CASES))
    args = parser.parse_args()
    for tokens in range(1, 65):
        LIVE[tokens] = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    bandwidth = read_bandwidth()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}, memory {bandwidth / 1e12:.2f} TB/s read")
    for name in args.shapes.split(","):
        case = CASES[name]
        layers = Layers(case, 24 if case.shape.mxfp4 else 8 if case.shape.inner < 4000 else 3)
        print(f"{name}")
        check(layers)
        for tokens in (1, 2, 5, 9, 17, 33, 64):
            us, num_bytes = speed(layers, tokens)
            floor = num_bytes / bandwidth * 1e6
            share = 100 * floor / us
            print(
                f"  {tokens:3d} tokens: {us:8.1f} us a layer, floor {floor:8.1f} us, {share:.0f} % of it",
                flush=True,
            )
        if not name.startswith("phi-3.5-moe"):
            over_the_link(layers)
        if args.sweep:
            sweep(layers)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    main()
