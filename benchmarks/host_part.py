"""What the host does for each layer of a pass that is not captured, as of prompts, without launching: kernels
are replaced by nothing, in Triton's interpreter, so that no GPU is needed.

    python benchmarks/host_part.py [--architecture qwen3_moe] [--layers 12] [--tokens 120]

Prints milliseconds a layer, launches a layer, and how often PyTorch's mode was asked, by whom.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from support.tiny_models import tiny_model, write_model
from triton.runtime.interpreter import InterpretedFunction

from localmoe.core.config import EngineConfig
from localmoe.engine.loading import assemble
from localmoe.engine.planning import PreparedModel, prepare_model
from localmoe.engine.settings import ComputeSettings
from localmoe.model.device_linear import KernelMode
from localmoe.model.device_runner import DeviceRunner

ROUNDS = 15
CONFIG = EngineConfig(device="cpu", context=256, draft_length=0)


def prepared(folder: Path, architecture: str, layers: int) -> PreparedModel:
    """A tiny model, as if its passes ran on a GPU."""
    path = write_model(folder, tiny_model(architecture, dtype=torch.float16, num_hidden_layers=layers))
    found = prepare_model(str(path), CONFIG)
    compute = ComputeSettings(torch.device("cpu"), torch.float16, whole_passes=True)
    skeleton = replace(found.source.skeleton(torch.float16), host_embedding=found.skeleton.host_embedding)
    return replace(found, skeleton=skeleton, compute=compute)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", default="qwen3_moe")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=120)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setattr(DeviceRunner, "prepare", lambda runner: None)  # noqa: B010
    launched, asked = Counter[str](), Counter[str]()

    def nothing(kernel: Any, *_: Any, **__: Any) -> None:
        launched[kernel.fn.__name__] += 1

    with tempfile.TemporaryDirectory() as folder:
        model = prepared(Path(folder), args.architecture, args.layers)
        parts = assemble(model, CONFIG, progress=None, cancel=None)
        runner = parts.runner
        assert isinstance(runner, DeviceRunner)
        setattr(InterpretedFunction, "run", nothing)  # noqa: B010
        tokens = [(7 * i + i * i) % 250 for i in range(args.tokens)]

        def one_pass() -> float:
            runner.sequence.truncate(0)
            began = time.perf_counter()
            runner.open_pass()
            runner.issue.ask(tokens, 0)
            return time.perf_counter() - began

        one_pass()
        plainly = KernelMode.__torch_function__

        def heard(mode: KernelMode, func: Any, types: Any, given: Any = (), more: Any = None) -> Any:
            asked[sys._getframe(1).f_code.co_name] += 1
            return plainly(mode, func, types, given, more)

        setattr(KernelMode, "__torch_function__", heard)  # noqa: B010
        launched.clear()
        one_pass()
        setattr(KernelMode, "__torch_function__", plainly)  # noqa: B010
        launches = launched.total() / args.layers
        took_ms = 1e3 * statistics.median(one_pass() for _ in range(ROUNDS)) / args.layers
        often = ", ".join(f"{name} {count / args.layers:.0f}" for name, count in asked.most_common(6))
        print(f"{args.architecture}, {args.layers} layers: {took_ms:.3f} ms a layer without launching, "
              f"{launches:.1f} launches, the mode asked "
              f"{asked.total() / args.layers:.0f} times ({often})")  # fmt: skip
        parts.close()


if __name__ == "__main__":
    main()
