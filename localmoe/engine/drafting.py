"""Build a draft as a task of its own (`localmoe draft`, the page's "build draft"). Loads the experts, keeps
no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from localmoe.chat.prompt import PromptEncoder
from localmoe.core.draft_config import DraftSettings, GptqSettings
from localmoe.core.errors import CheckpointError, DraftError
from localmoe.core.types import ProgressCallback
from localmoe.engine.drafts import HostExpertSource, expert_naming
from localmoe.engine.settings import choose_compute
from localmoe.experts.record_store import RecordStore
from localmoe.hardware.host_room import host_room
from localmoe.hardware.plan import check_records
from localmoe.hardware.probe import probe_hardware
from localmoe.hub.catalogue import LocalModel, draft_folder, resolve_model
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.footprint import checkpoint_dtype
from localmoe.model.gptq_build import BATCH, GptqBuild
from localmoe.model.loader import load_weights
from localmoe.model.skeleton import Skeleton, build_skeleton
from localmoe.quant.builder import (
    DraftCancelledError,
    build_nf4_draft,
    build_rtn_draft,
    estimate_layout_bytes,
)
from localmoe.quant.calibrated_layer import LittleMemoryError
from localmoe.quant.calibration import CalibrationText, cut_sequences, read_calibration
from localmoe.quant.draft_folder import DraftFolder, DraftPlaceError, DraftWriteError
from localmoe.quant.draft_format import DraftProvenance, Setting
from localmoe.quant.draft_layout import layout_of
from localmoe.quant.draft_writer import DraftWriter
from localmoe.quant.nf4 import bitsandbytes_functional

# ends of a GPTQ build after which its finished layers, minutes of work, are worth keeping
_GOES_ON_LATER = (
    KeyboardInterrupt,
    SystemExit,
    DraftCancelledError,
    DraftPlaceError,
    DraftWriteError,
    LittleMemoryError,
    torch.OutOfMemoryError,
)


@dataclass(frozen=True, slots=True)
class DraftBasis:
    """The model that a draft is made of. Its skeleton's shared weights are in RAM, and used up by GPTQ."""

    model: LocalModel
    checkpoint: Checkpoint
    skeleton: Skeleton
    store: RecordStore


def build_draft(
    model: str,
    out: Path | None = None,
    settings: DraftSettings | None = None,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Quantise a model's routed experts and publish the draft, by default where `Engine.load` looks for it.

    Raises:
        LocalMoeError: the model is not there or not supported, the experts do not fit into RAM, the
            calibration
            text cannot be used, or the disk is full.
    """
    settings = settings or DraftSettings()
    source = resolve_model(model)
    checkpoint = Checkpoint.open(source.folder)
    stored = checkpoint_dtype(checkpoint)
    compute = choose_compute(settings.device if settings.method == "gptq" else "cpu", "auto", stored)
    if settings.method == "nf4":
        bitsandbytes_functional()  # whether it is there is said before weights are read
    # what is wrong with text or place is said before weights are read
    text = read_calibration(settings.calibration) if settings.method == "gptq" else None
    DraftFolder(*_recipe(source, checkpoint, out, settings, text)).check()
    skeleton = build_skeleton(checkpoint, compute.dtype)
    records = skeleton.num_experts * sum(experts.layout.num_bytes(stored) for experts in skeleton.experts)
    check_records(source.name, records, host_room(probe_hardware(measure=False), device="cpu"))
    with load_weights(
        skeleton, checkpoint, device=torch.device("cpu"), progress=progress, cancel=cancel
    ) as store:
        basis = DraftBasis(source, checkpoint, skeleton, store)
        return make_draft(basis, out, settings, progress=progress, cancel=cancel)


def make_draft(
    basis: DraftBasis,
    out: Path | None,
    settings: DraftSettings,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    pause: Callable[[], None] | None = None,
) -> Path:
    """The same from weights that are loaded.

    Args:
        pause: see GptqBuild.run.

    Raises:
        LocalMoeError: as `build_draft`, or the model's files are not those that were loaded any more.
    """
    try:
        basis.checkpoint.check_unchanged()
    except CheckpointError as error:  # it would be right, but of a model that no load finds again
        raise DraftError(
            f"The files of {basis.model.name} have changed since they were loaded, so no draft is built of "
            "the old weights: load the model again."
        ) from error
    text = read_calibration(settings.calibration) if settings.method == "gptq" else None
    place, provenance = _recipe(basis.model, basis.checkpoint, out, settings, text)
    source = HostExpertSource(basis.skeleton, basis.store)
    tokens = None if text is None else _calibration_tokens(basis, text, settings.gptq)
    writer = DraftWriter(
        place,
        basis.checkpoint.config,
        expert_naming(basis.checkpoint, basis.skeleton),
        provenance,
        estimate_layout_bytes(source, layout_of(provenance)),
        keep_on=_GOES_ON_LATER if text else (),
    )
    try:
        with writer:
            if settings.method == "rtn":
                build_rtn_draft(
                    source, writer, provenance.bits, provenance.group_size, progress=progress, cancel=cancel
                )
            elif settings.method == "nf4":
                build_nf4_draft(source, writer, progress=progress, cancel=cancel)
            else:
                assert tokens is not None
                device = choose_compute(settings.device, "auto", basis.store.dtype).device
                budget = min(settings.budget_bytes, _memory_for_a_build(device))
                build = GptqBuild(basis.skeleton, basis.store, tokens, settings.gptq, device, budget)
                build.run(writer, progress=progress, cancel=cancel, pause=pause)
            return writer.publish()
    except DraftPlaceError as error:  # which was free when the build began
        if not text:
            raise
        kept = "or take it away and build the draft again, which goes on with all that is finished"
        raise DraftPlaceError(f"{str(error).rstrip('.')}, {kept}.") from None
    except torch.OutOfMemoryError:
        raise DraftError(
            "The GPU's memory ran out while the draft was built, as other programs use it too: close them, "
            "give a smaller --vram-budget, or use --device cpu; finished layers are kept."
        ) from None


def _recipe(
    model: LocalModel,
    checkpoint: Checkpoint,
    out: Path | None,
    settings: DraftSettings,
    text: CalibrationText | None,
) -> tuple[Path, DraftProvenance]:
    """Where the draft will lie, and what it will say of itself."""
    bits, group_size = settings.gptq.bits, settings.gptq.group_size
    fingerprint = checkpoint.fingerprint()
    others: Mapping[str, Setting] = settings.gptq.provenance() if text else {}
    if settings.method == "nf4":
        others = {"dtype": str(checkpoint_dtype(checkpoint)).removeprefix("torch.")}
    provenance = DraftProvenance.now(
        model.name,
        fingerprint,
        settings.method,
        group_size,
        bits,
        base_revision=checkpoint.revision,
        calibration_hash=text.digest if text else "",
        seed=settings.gptq.seed if text else 0,
        settings=others,
    )
    return out or draft_folder(model, settings.method, bits, group_size, fingerprint), provenance


def _memory_for_a_build(device: torch.device) -> int:
    """Bytes that a build may count on: half of the free RAM; of a GPU what is free, this process's unused
    blocks included, but for a twentieth."""
    if device.type == "cpu":
        return psutil.virtual_memory().available // 2
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(0.95 * free)


def _calibration_tokens(basis: DraftBasis, text: CalibrationText, settings: GptqSettings) -> Tensor:
    """(S, length), S a multiple of what goes through a layer at once."""
    tokenizer = PromptEncoder(basis.model.folder).tokenizer
    longest = int(getattr(basis.skeleton.text_config, "max_position_embeddings", settings.sequence_length))
    tokens = cut_sequences(
        text,
        lambda document: tokenizer(document, verbose=False)["input_ids"],
        num_tokens=settings.num_tokens,
        length=min(settings.sequence_length, longest),
        seed=settings.seed,
    )
    return tokens[: len(tokens) // BATCH * BATCH]
