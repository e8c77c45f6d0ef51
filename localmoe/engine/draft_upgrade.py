"""Puts a GPTQ draft in the place of a rounded or NF4 one while the engine is in use: built in the pauses
between answers, taken over without a restart. Quantises nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import psutil
import torch

from localmoe.core.config import EngineConfig
from localmoe.core.draft_config import DraftSettings, GptqSettings
from localmoe.core.errors import BudgetError, DraftError
from localmoe.core.types import Progress, ProgressCallback
from localmoe.core.units import format_bytes
from localmoe.engine.drafting import DraftBasis, make_draft
from localmoe.engine.drafts import DraftInfo, replace_draft
from localmoe.engine.loading import EngineParts
from localmoe.engine.settings import choose_compute
from localmoe.engine.sources import CheckpointSource
from localmoe.engine.turns import Turns
from localmoe.model.gptq_build import least_build_bytes
from localmoe.model.loader import load_shared
from localmoe.model.skeleton import build_skeleton
from localmoe.quant.builder import DraftCancelledError

_SPARE = 1.25  # of the least device memory for a build: a few experts at once
_RAM_SHARE = 0.5  # of the free RAM, that the shared weights and the tokens may take


def why_not_better(parts: EngineParts, config: EngineConfig) -> str:
    """Why there is no better draft to build for what is loaded; "" if there is."""
    draft = parts.draft
    if config.draft_dir is not None:
        return "the draft is one that was named"
    if parts.other is not None:
        return f"{parts.other.name} drafts"
    if not isinstance(parts.prepared.source, CheckpointSource) or draft is None:
        return "nothing is drafted"
    if draft.method not in ("RTN", "NF4"):
        return f"the draft is {draft}"
    return ""


def improve_draft(
    parts: EngineParts,
    config: EngineConfig,
    turns: Turns,
    reserve: Callable[[int], None],
    *,
    progress: ProgressCallback | None,
    cancel: threading.Event,
) -> DraftInfo:
    """Build the model's GPTQ draft where loading looks for it, and replace the loaded one by it.

    Args:
        reserve: takes so much of the engine's device memory for the build, 0 gives it back; raises
            BudgetError.

    Raises:
        DraftError: there is nothing to improve, or RAM or disk do not suffice.
        DraftCancelledError, LoadCancelledError: `cancel` was set; finished layers are kept.
    """
    reason = why_not_better(parts, config)
    source = parts.prepared.source
    if reason or not isinstance(source, CheckpointSource):
        raise DraftError(f"No better draft can be built here: {reason}.")

    def give_way() -> None:
        turns.pause(cancel)
        _check_cancel(cancel)

    def told(report: Progress) -> None:
        if progress is not None:
            progress(report)
        give_way()

    with turns.work(cancel):
        _check_cancel(cancel)
        with _place(parts, DraftSettings("gptq", GptqSettings(config.draft_bits)), reserve) as settings:
            compute = choose_compute(settings.device, "auto", source.stored_dtype)
            _check_ram(parts, settings, compute.dtype.itemsize)
            skeleton = build_skeleton(source.checkpoint, compute.dtype)
            cpu = torch.device("cpu")
            load_shared(skeleton, source.checkpoint, parts.store, device=cpu, progress=told, cancel=cancel)
            basis = DraftBasis(source.model, source.checkpoint, skeleton, parts.store)
            pause = partial(turns.pause, cancel)
            folder = make_draft(basis, None, settings, progress=progress, cancel=cancel, pause=pause)
        prepared, layers = parts.prepared, parts.passes.draft
        if layers is None:  # it is laid aside, and the better one is read when it is taken back
            parts.draft = DraftInfo(config.draft_bits, "GPTQ", settings.gptq.group_size)
            return parts.draft
        base = source.draft_base(prepared.skeleton, parts.store)
        device = prepared.compute.device
        parts.draft = replace_draft(
            folder, prepared.skeleton, device, layers, base, give_way, fused=parts.fused_draft
        )
        return parts.draft


@contextmanager
def _place(
    parts: EngineParts, settings: DraftSettings, reserve: Callable[[int], None]
) -> Iterator[DraftSettings]:
    """On the GPU where the engine can spare the memory, else on the CPU."""
    on_cpu = replace(settings, device="cpu")
    if parts.prepared.compute.device.type != "cuda":
        yield on_cpu
        return
    skeleton = parts.prepared.skeleton
    wanted = int(_SPARE * least_build_bytes(skeleton, settings.gptq, parts.store.dtype.itemsize))
    try:
        reserve(wanted)
    except BudgetError:
        yield on_cpu
        return
    try:
        yield replace(settings, device="cuda", budget_bytes=wanted)
    finally:
        torch._C._cuda_clearCublasWorkspaces()  # of this thread's products: 32 MiB on large GPUs
        torch.cuda.empty_cache()
        reserve(0)


def _check_cancel(cancel: threading.Event) -> None:
    if cancel.is_set():
        raise DraftCancelledError("Building a better draft was cancelled.")


def _check_ram(parts: EngineParts, settings: DraftSettings, itemsize: int) -> None:
    """The shared weights are in RAM again, and what enters a layer.

    Raises:
        DraftError: they do not fit.
    """
    footprint = parts.prepared.footprint
    tokens = settings.gptq.num_tokens * footprint.hidden_size
    if settings.device == "cpu":
        tokens *= 4  # what the experts are asked and answer is here too
    needed = (footprint.shared_params + tokens) * itemsize
    free = psutil.virtual_memory().available
    if needed > free * _RAM_SHARE:
        raise DraftError(
            f"Building a better draft needs {format_bytes(needed)} of RAM beside the loaded model, and "
            f"{format_bytes(free)} are free: close other programs, or build it with 'localmoe draft "
            f"{parts.prepared.source.name}' while the model is not loaded."
        )
