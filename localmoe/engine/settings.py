"""Choose device, dtypes and context from what the user asked for and what is there. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localmoe.core.config import DeviceName, DraftLength, DtypeName, EngineConfig
from localmoe.core.errors import ConfigError, DraftError, DraftingRefusedError, HardwareError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint
from localmoe.core.units import format_rate

SWITCHED_OFF = "switched off"  # why there is no draft: the load asked for none


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """Where and in which dtype the target computes; whether its steps run whole on the GPU, or why not; and
    whether experts are computed where their records lie (experts.in_place)."""

    device: torch.device
    dtype: torch.dtype
    whole_passes: bool = False
    by_layers_because: str = ""
    in_place: bool = False


def choose_compute(device: DeviceName, dtype: DtypeName, stored: torch.dtype) -> ComputeSettings:
    """On CUDA the checkpoint's own 16 bits (bfloat16 for other dtypes); on CPU float32, to which 16 bits
    convert exactly.

    Raises:
        HardwareError: CUDA was asked for and is not there.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise HardwareError("No CUDA device was found: use --device cpu, or install the NVIDIA driver.")
    on_cuda = device == "cuda" or (device == "auto" and has_cuda)
    if dtype != "auto":
        chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    elif on_cuda:
        chosen = torch.float16 if stored == torch.float16 else torch.bfloat16
    else:
        chosen = torch.float32
    if chosen.itemsize < stored.itemsize:
        chosen = stored if dtype == "auto" else chosen
    return ComputeSettings(torch.device("cuda", 0) if on_cuda else torch.device("cpu"), chosen)


def choose_draft_length(
    wanted: DraftLength, plan: MemoryPlan, footprint: ModelFootprint, *, has_draft: bool
) -> DraftLength:
    """What is wanted, or 0 where "auto" finds no draft.

    Raises:
        DraftError: a length is wanted and there is no draft. DraftingRefusedError: there cannot be one.
    """
    if wanted == 0 or has_draft:
        return wanted
    if wanted == "auto":
        return 0
    reason = plan.drafting_reason
    if not footprint.can_rollback:
        raise DraftingRefusedError(f"Drafting is not possible: {reason}. Use draft length 0 or auto.")
    remedy = (
        "load the model again with drafting on" if reason == SWITCHED_OFF else "use draft length 0 or auto"
    )
    raise DraftError(f"No draft is loaded ({reason}): {remedy}.")


def check_emulation(config: EngineConfig, device: torch.device) -> None:
    """An emulated link makes sense on CPU only.

    Raises:
        ConfigError: it was asked for on a GPU.
    """
    if config.emulated_link_bytes_per_s is not None and device.type != "cpu":
        raise ConfigError("An emulated link needs --device cpu: a GPU has a real one.")


def check_lanes(config: EngineConfig, by_layers_because: str) -> None:
    """The CPU lane works beside passes that run whole on a GPU only.

    Raises:
        ConfigError: it was asked for by name where they do not.
    """
    if by_layers_because and config.lanes in ("all", "vram+cpu"):
        raise ConfigError(
            f"The CPU lane cannot take part here ({by_layers_because}): use --lanes auto or vram+link."
        )


def may_compute_in_place(config: EngineConfig, compute: ComputeSettings, stored: torch.dtype) -> bool:
    """Whether 16-bit experts of a model on the CPU stay where they are: unless a budget or a link asks for
    slots, or settings for other sums. The architecture has to allow it too."""
    asks_for_slots = config.vram_budget_bytes is not None or config.emulated_link_bytes_per_s is not None
    return (
        compute.device.type == "cpu"
        and stored.itemsize == 2
        and compute.dtype in (torch.float32, stored)
        and config.lanes == "auto"
        and not (config.strict or asks_for_slots)
    )


def describe_passes(compute: ComputeSettings) -> str:
    """For people: how a step runs."""
    if compute.whole_passes:
        return "whole steps in one CUDA graph each"
    return f"layer by layer through the host ({compute.by_layers_because})"


def describe_link(config: EngineConfig, compute: ComputeSettings) -> str:
    """For people: "emulated 2.0 GB/s", "PCIe", "memory copy" or "none"."""
    if compute.in_place:
        return "none, nothing is copied"
    if config.emulated_link_bytes_per_s is not None:
        return f"emulated {format_rate(config.emulated_link_bytes_per_s)}"
    return "PCIe" if compute.device.type == "cuda" else "memory copy"
