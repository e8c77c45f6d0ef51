"""A program that loads the model folders it is given, one after another, and prints what memory each took.

The first is not reported: it makes the libraries import, compile and cache what they keep for good.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path

import psutil
import torch

from localmoe.core.config import EngineConfig
from localmoe.engine import Engine


def main(folders: list[str], budget_bytes: int) -> None:
    torch.set_num_threads(1)
    config = EngineConfig(vram_budget_bytes=budget_bytes, draft_length=0, context=64)
    Engine.load(folders[0], config).close()
    gc.collect()
    before = psutil.Process().memory_info().rss
    for folder in folders[1:]:
        engine = Engine.load(folder, config)
        held = psutil.Process().memory_info().rss - before
        engine.close()
        del engine
        gc.collect()
        print(json.dumps({"held": held, "peak": peak_rss_bytes() - before}), flush=True)


def peak_rss_bytes() -> int:
    """Of this program alone: what getrusage says includes the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


if __name__ == "__main__":
    main(sys.argv[2:], int(sys.argv[1]))
