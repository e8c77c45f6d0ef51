"""GPTQ drafts of model folders: small settings, what a build reports, and a program that is killed while
it builds: python gptq_builds.py MODEL OUT DONE builds, prints a line after DONE experts, and waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from localmoe.core.draft_config import DraftSettings, GptqSettings
from localmoe.core.types import Progress
from localmoe.engine.drafting import build_draft

SMALL = DraftSettings("gptq", GptqSettings(num_tokens=1024, sequence_length=64), device="cpu")


def small(**gptq: Any) -> DraftSettings:
    """SMALL with other GptqSettings."""
    return replace(SMALL, gptq=replace(SMALL.gptq, **gptq))


def build(
    model: Path | str,
    out: Path | None,
    settings: DraftSettings = SMALL,
    report: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> tuple[Path, list[int]]:
    """The draft's folder, and the numbers of finished experts that were reported."""
    done: list[int] = []

    def progress(progress: Progress) -> None:
        if progress.unit == "experts":
            done.append(progress.done)
            if report is not None:
                report(progress.done)

    return build_draft(str(model), out, settings, progress=progress, cancel=cancel), done


def weights_of(draft: Path) -> dict[str, bytes]:
    """A draft's weight files and their index."""
    return {path.name: path.read_bytes() for path in draft.glob("model*")}


def main(model: str, out: str, last: int) -> None:
    torch.set_num_threads(1)

    def wait(done: int) -> None:
        if done == last:
            print("here", flush=True)
            threading.Event().wait()

    build(model, Path(out), report=wait)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
