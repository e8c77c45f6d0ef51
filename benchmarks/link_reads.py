"""Bytes a second over PCIe from pinned host memory: a copy engine, and kernels that read it by plain loads
and by bulk loads of the tensor memory accelerator (compute capability 9.0 and later). Needs a GPU.

python benchmarks/link_reads.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048
ROWS = 1 << 16  # 256 MiB of bfloat16
PROGRAMS = (16, 32, 64, 128)
ROUNDS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _plain(source, sums, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, count):
        block = i * tl.num_programs(0) + tl.program_id(0)
        total += tl.load(source + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit  # type: ignore[untyped-decorator]
def _bulk(  # type: ignore[no-untyped-def]
    source, sums, count, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    tensor = tl.make_tensor_descriptor(source, [H, W], [W, 1], [R, C])
    total = tl.zeros([R, C], tl.float32)
    for i in tl.range(0, count, num_stages=4):
        block = i * tl.num_programs(0) + tl.program_id(0)
        total += tensor.load([(block // (W // C)) * R, (block % (W // C)) * C]).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


def _rate(run: Callable[[], object], num_bytes: int) -> float:
    """Bytes a second, the best of some rounds."""
    run()
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return num_bytes / best * 1e3


def _checked(rate: float, sums: Tensor, host: Tensor) -> float:
    """The rate, if each number was read once: they are all ones."""
    assert sums.sum().item() == host.numel(), "not everything was read"
    return rate


def host_data() -> Tensor:
    """(ROWS, COLUMNS) ones in pinned memory."""
    return torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16).pin_memory()


def plain_rate(host: Tensor, programs: int = 64, block: int = 4096) -> float:
    """What kernels reach with plain loads."""
    count, sums = host.numel() // block // programs, torch.zeros(programs, device="cuda")
    rate = _rate(lambda: _plain[(programs,)](host, sums, count, BLOCK=block), host.nbytes)
    return _checked(rate, sums, host)


def bulk_rate(host: Tensor, programs: int = 64) -> float:
    """What kernels reach with bulk loads of (64, 64)."""
    triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device="cuda"))
    count, sums = host.numel() // (64 * 64) // programs, torch.zeros(programs, device="cuda")
    run = lambda: _bulk[(programs,)](host, sums, count, H=ROWS, W=COLUMNS, R=64, C=64)  # noqa: E731
    return _checked(_rate(run, host.nbytes), sums, host)


def copy_rate(host: Tensor) -> float:
    """What a copy engine reaches."""
    target = torch.empty_like(host, device="cuda")
    return _rate(lambda: target.copy_(host, non_blocking=True), host.nbytes)


def main() -> None:
    """Print all."""
    host = host_data()
    print(f"{torch.cuda.get_device_name()}: copies {copy_rate(host) / 1e9:.1f} GB/s")
    for programs in PROGRAMS:
        line = f"{programs:4d} programs: plain loads {plain_rate(host, programs) / 1e9:.1f} GB/s"
        if torch.cuda.get_device_capability() >= (9, 0):
            line += f", bulk loads {bulk_rate(host, programs) / 1e9:.1f} GB/s"
        print(line)


if __name__ == "__main__":
    main()
