"""What has to be known of a model to tell whether it fits a machine, and the answer. Finds out neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from localmoe.core.plan_types import MemoryPlan
from localmoe.core.types import ModelFootprint


@dataclass(frozen=True, slots=True)
class MtpSizes:
    """A layer that a model was trained with to predict one token more (MTP), which can draft.

    Attributes:
        shared_params: all of its weights but the routed experts', which are as many as in another layer.
        buffer_bytes: of what is no weight.
        kv_elements_per_token: what it caches.
        inner_size: I of its experts.
    """

    shared_params: int
    buffer_bytes: int
    kv_elements_per_token: int
    inner_size: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that the engine can run.

    Attributes:
        weight_bytes: of one weight in the checkpoint.
        num_bytes: of the files to download, or of the weights in the folder.
        unsuited: why steps cannot run whole in the GPU's kernels; "" if they can.
        unsuited_in_place: why a CPU cannot compute its experts where they lie; "" if it can.
        has_draft: whether one was made on this machine.
        record_files: bytes of each file of its experts (experts.record_file) that was made here.
        mtp: the layer for it that the files have, if it can draft; None: none, or, of a repo without an index
            of its tensors, not known.
        licence: short name, "" where none is known.
        revision: commit on the Hub; "" for a folder.
    """

    footprint: ModelFootprint
    weight_bytes: int
    num_bytes: int
    unsuited: str = ""
    unsuited_in_place: str = ""
    has_draft: bool = False
    record_files: tuple[int, ...] = ()
    mtp: MtpSizes | None = None
    licence: str = ""
    gated: bool = False
    revision: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelFacts:
        """The facts that `as_dict` gave."""
        footprint, mtp = ModelFootprint(**values["footprint"]), values.get("mtp")
        made = {
            "footprint": footprint,
            "record_files": tuple(values.get("record_files", ())),
            "mtp": None if mtp is None else MtpSizes(**mtp),
        }
        return cls(**{**values, **made})


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model would lie in a machine's memory.

    Attributes:
        fits: whether it can be loaded.
        reason: why not, or "".
        vram_bytes: of GPU memory that the plan takes; 0 without a GPU.
        ram_bytes: of host RAM, the experts' records and, without a GPU, the rest.
        drafting: whether the draft fits too.
        by_mtp: whether it is the model's MTP layer.
        tokens_per_s: predicted upper limit; None where the rates were not measured, and where experts lie on
            the disk, whose rate is not.
        context: tokens.
        budget_bytes, better_context: what would make it fit, where the plan names that.
        missing_disk_bytes: that a download, or the file of experts, lacks on the disk.
        disk_bytes: of that file, where experts lie on the disk; else 0.
        disk_is_written: that file is there already.
        ram_share: of all experts, those that RAM holds at a time.
        plan: the planner's division, where there is one.
    """

    fits: bool
    reason: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    vram_bytes: int = 0
    ram_bytes: int = 0
    drafting: bool = False
    by_mtp: bool = False
    tokens_per_s: float | None = None
    context: int = 0
    budget_bytes: int | None = None
    better_context: int | None = None
    missing_disk_bytes: int = 0
    disk_bytes: int = 0
    disk_is_written: bool = False
    ram_share: float = 1.0
    plan: MemoryPlan | None = None


@dataclass(frozen=True, slots=True)
class BudgetRange:
    """Device memory budgets that make sense for a model.

    Attributes:
        least_bytes: the smallest that works, without a draft.
        most_bytes: what "auto" takes: all that is free but a reserve, or all that the model can use.
        free_bytes, total_bytes: of the device's memory now, once what is loaded has given its own back.
    """

    least_bytes: int
    most_bytes: int
    free_bytes: int
    total_bytes: int
