"""Microseconds in which a layer's pairs are grouped by expert and looked up (kernels/gpu/grouping.py), in a
CUDA graph, for windows of 1 to 64 tokens, with and without the CPU lane.

    python benchmarks/grouping.py

Half of the experts are missing, and none is kept.
"""

from __future__ import annotations

from functools import partial

import torch
from lowbit_experts import graph_us
from torch import Tensor

from localmoe.kernels.gpu.grouping import group_pairs
from localmoe.kernels.lanes import LANE_WORDS, LaneView
from localmoe.kernels.mailbox import Mailbox, MailboxLayout
from localmoe.kernels.residency import ON_HOST, ResidencyView

SHAPES = {"qwen1.5-moe-a2.7b": (60, 4), "qwen3-30b-a3b": (128, 8)}
LAUNCHES = 200
DEVICE = "cuda"


def view_of(experts: int) -> ResidencyView:
    generator = torch.Generator().manual_seed(0)
    missing = torch.rand(experts, generator=generator) < 0.5
    words = torch.arange(1, experts + 1, device=DEVICE) * 16
    return ResidencyView(
        words, words.clone(), torch.where(missing, ON_HOST, 0).to(DEVICE),
        torch.full((experts,), torch.inf, device=DEVICE), torch.zeros(16, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.zeros(experts, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


def lane_of(box: Mailbox, experts: int) -> LaneView:
    words = torch.zeros(LANE_WORDS, dtype=torch.int64, device=DEVICE)
    rates = torch.tensor([20.0, 100.0, 20.0, 300.0], device=DEVICE)
    whole = torch.zeros(experts, dtype=torch.int32, device=DEVICE)
    return LaneView(
        box.address, box.layout, 0, 1408, 64, words, words[:1].clone(), rates, 1000, whole, whole[:1].clone()
    )


def launches(index: Tensor, live: Tensor, view: ResidencyView, lane: LaneView | None) -> None:
    for _ in range(LAUNCHES):
        group_pairs(index, live, view, lane)


def main() -> None:
    for name, (experts, top_k) in SHAPES.items():
        for tokens in (1, 2, 5, 9, 17, 64):
            index = torch.rand(tokens, experts, device=DEVICE).argsort(dim=1)[:, :top_k].contiguous()
            live = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
            box = Mailbox(MailboxLayout(tokens, top_k, experts, 2048), torch.bfloat16, pinned=True)
            took = []
            for lane in (None, lane_of(box, experts)):
                body = partial(launches, index, live, view_of(experts), lane)
                took.append(graph_us(body) / LAUNCHES)
            print(f"{name}, {tokens} tokens: {took[0]:.2f} us, with the CPU lane {took[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
