"""How fast do weights reach the expert records, against reading the files alone? Both with the same threads.

Writes a Qwen2-MoE checkpoint of normal weights, one tensor a matrix of an expert or fused, of which records
are copies, or packed on the way; or a gpt-oss one whose experts are in MXFP4 (records are then 3.8 times as
large as what is read). It times, with the files in the page cache and without:

    read     the files into one buffer a thread that is used again and again: no memory is touched first
    fill     the files into fresh memory of the same size, without looking at what is in them
    load     `load_weights`; with --device cuda also with pinning, during the reads and after them

Each time is the best of --rounds. A virtual machine gets memory from its host when it is first used, which
can take longer than the reads; with --touch-first the memory has been used (and given back) just before.

    python benchmarks/load_speed.py [--gib 4] [--layout all] [--device cpu] [--touch-first] [--json]
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.loader import load_weights
from localmoe.model.parallel_reader import num_threads
from localmoe.model.skeleton import build_skeleton, with_records

HIDDEN, INNER, EXPERTS = 2048, 1408, 60
OSS_WIDTH, OSS_EXPERTS = 2880, 32
LAYOUTS = ("experts", "fused", "packed", "mxfp4")
FILE_BYTES = 4 << 30
CHUNK_BYTES = 4 << 20
Shapes = dict[str, list[int]]


def write_checkpoint(folder: Path, gib: float, layout: str) -> Checkpoint:
    """A model folder with as many layers as fit the size (at least one)."""
    config = (oss_config if layout == "mxfp4" else qwen_config)(gib * (1 << 30))
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes: dict[str, list[int]] = {}
    stored = {"fused": lambda name, shape: {name: shape}, "mxfp4": in_blocks}.get(layout, published)
    for name, parameter in model.named_parameters():
        shapes |= stored(name, list(parameter.shape))
    weights = torch.randn(32 << 20).mul_(0.02).to(torch.bfloat16).view(torch.uint8)
    write_files(folder, shapes, None if layout == "mxfp4" else weights.numpy().tobytes())
    return Checkpoint.open(folder)


def qwen_config(num_bytes: float) -> Any:
    """Qwen1.5-MoE-A2.7B, with other layers."""
    layer_bytes = 2 * 3 * HIDDEN * INNER * EXPERTS
    return transformers.AutoConfig.for_model(
        "qwen2_moe", hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, vocab_size=32000,
        num_hidden_layers=max(1, round(num_bytes / layer_bytes)), num_experts_per_tok=4,
        num_attention_heads=16, num_key_value_heads=16, shared_expert_intermediate_size=5632,
        intermediate_size=5632,
    )  # fmt: skip


def oss_config(num_bytes: float) -> Any:
    """gpt-oss-20b, with other layers."""
    layer_bytes = 17 / 32 * 3 * OSS_WIDTH**2 * OSS_EXPERTS
    config = transformers.AutoConfig.for_model(
        "gpt_oss", hidden_size=OSS_WIDTH, intermediate_size=OSS_WIDTH, num_local_experts=OSS_EXPERTS,
        num_hidden_layers=max(1, round(num_bytes / layer_bytes)), num_experts_per_tok=4, vocab_size=32000,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    config.quantization_config = {"quant_method": "mxfp4"}
    return config


def published(name: str, shape: list[int]) -> Shapes:
    """A parameter as published checkpoints store it: one tensor a matrix of an expert."""
    path, _, leaf = name.rpartition(".")
    if not path.endswith(".experts"):
        return {name: shape}
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    matrix = [shape[1] // len(parts), shape[2]]
    return {f"{path}.{expert}.{part}.weight": matrix for expert in range(shape[0]) for part in parts}


def in_blocks(name: str, shape: list[int]) -> Shapes:
    """A parameter as gpt-oss's checkpoints store it: blocks of 32 weights along a row, and their scales."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: shape}
    blocks = [shape[0], shape[2], shape[1] // 32]
    return {f"{name}_blocks": [*blocks, 16], f"{name}_scales": blocks}


def element_bytes(name: str) -> int:
    """Of a stored tensor."""
    return 1 if name.endswith(("_blocks", "_scales")) else 2


def write_files(folder: Path, shapes: Shapes, block: bytes | None = None) -> None:
    """Random bytes, or those of `block` (one block, from a different place each time), in files of at most
    some 4 GiB."""
    groups: list[Shapes] = [{}]
    size = 0
    for name, shape in shapes.items():
        num_bytes = element_bytes(name) * torch.Size(shape).numel()
        if size and size + num_bytes > FILE_BYTES:
            groups, size = [*groups, {}], 0
        groups[-1][name] = shape
        size += num_bytes
    block = (os.urandom(64 << 20) if block is None else block) * 2
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        index |= dict.fromkeys(group, file)
        write_file(folder / file, group, block)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_file(path: Path, shapes: Shapes, block: bytes) -> None:
    """One safetensors file, on the disk when this returns."""
    header, end = {}, 0
    for name, shape in shapes.items():
        width = element_bytes(name)
        start, end = end, end + width * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16" if width == 2 else "U8", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, end, len(block) // 2):
            offset = start // 7 % (len(block) // 2) & ~1  # 16-bit numbers stay whole
            stream.write(memoryview(block)[offset : offset + min(len(block) // 2, end - start)])
        stream.flush()
        os.fsync(stream.fileno())


def read_files(files: tuple[Path, ...], target: memoryview | None) -> None:
    """Read every byte with the loader's number of threads: into a buffer a thread, or into `target`."""
    jobs, end = [], 0
    for file in files:
        size = file.stat().st_size
        jobs += [(file, start, end + start) for start in range(0, size, CHUNK_BYTES)]
        end += size
    jobs.reverse()

    def work() -> None:
        handles = {file: io.FileIO(file) for file in files}
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while True:
            try:
                file, start, place = jobs.pop()
            except IndexError:
                break
            handles[file].seek(start)
            handles[file].readinto(buffer if target is None else target[place : place + CHUNK_BYTES])
        for handle in handles.values():
            handle.close()

    threads = [threading.Thread(target=work) for _ in range(num_threads())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fresh_memory(num_bytes: int) -> mmap.mmap:
    """As the records': private, in huge pages where there are some."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(num_bytes: int) -> None:
    """Use that much memory and give it back."""
    torch.frombuffer(fresh_memory(num_bytes), dtype=torch.uint8).fill_(1)
    gc.collect()


def drop_cache(files: tuple[Path, ...]) -> None:
    """Forget the files' pages, so that they are read from the disk again."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_load(
    checkpoint: Checkpoint, device: torch.device, *, packed: bool, pin: bool, pin_after: bool
) -> float:
    """Seconds of `load_weights` alone, without the skeleton."""
    skeleton = build_skeleton(checkpoint, torch.bfloat16)
    if packed:
        skeleton = with_records(skeleton, WeightForm.BF12)
    start = time.perf_counter()
    store: HostStore = load_weights(skeleton, checkpoint, device=device, pin=pin)
    if pin_after:
        store.pin()
    seconds = time.perf_counter() - start
    store.close()
    del skeleton, store
    gc.collect()
    return seconds


def measure(
    checkpoint: Checkpoint, device: torch.device, args: argparse.Namespace, *, packed: bool, cold: bool
) -> dict[str, float]:
    """Best rates in bytes a second, by what was timed."""
    total = sum(file.stat().st_size for file in checkpoint.files)

    def timed(action: Callable[[], float | None]) -> float:
        times = []
        for _ in range(args.rounds):
            if args.touch_first:
                touch(total)
            if cold:
                drop_cache(checkpoint.files)
            start = time.perf_counter()
            seconds = action()
            times.append(time.perf_counter() - start if seconds is None else seconds)
        return total / min(times)

    def fill() -> float:
        memory = fresh_memory(total + CHUNK_BYTES)
        start = time.perf_counter()
        read_files(checkpoint.files, memoryview(memory))
        return time.perf_counter() - start

    loads = {"load": (False, False)}
    if device.type == "cuda":
        loads |= {"load, pin during": (True, False), "load, pin after": (False, True)}
    actions: dict[str, Callable[[], float | None]]
    actions = {"read": lambda: read_files(checkpoint.files, None), "fill": fill}
    for name, (pin, after) in loads.items():
        actions[name] = lambda pin=pin, after=after: time_load(  # type: ignore[misc]
            checkpoint, device, packed=packed, pin=pin, pin_after=after
        )
    if not cold:
        read_files(checkpoint.files, None)
    return {name: timed(action) for name, action in actions.items()}


def describe(rates: dict[str, float]) -> str:
    """Rates and ratios in one line."""
    parts = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
    return parts + "".join(f"; load / {name} {rates['load'] / rates[name]:.0%}" for name in ("read", "fill"))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--layout", choices=(*LAYOUTS, "all"), default="all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--touch-first", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint (default: temporary)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    results: list[dict[str, object]] = []
    for layout in LAYOUTS if args.layout == "all" else (args.layout,):
        with tempfile.TemporaryDirectory(dir=args.folder) as place:
            checkpoint = write_checkpoint(Path(place) / "model", args.gib, layout)
            for cold in (False, True):
                rates = measure(checkpoint, device, args, packed=layout == "packed", cold=cold)
                results.append({"layout": layout, "cold": cold, "bytes": checkpoint.total_bytes, **rates})
                if not args.json:
                    where = "from disk" if cold else "from the page cache"
                    print(f"{layout}, {checkpoint.total_bytes / 1e9:.1f} GB, {where}:", describe(rates))
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
