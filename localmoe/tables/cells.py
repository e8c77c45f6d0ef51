"""What a table is made of: cells (one setting on one set of prompts), and the machine that they run on. Runs
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from localmoe.core.config import DraftLength
from localmoe.core.switches import DEFAULT_SWITCHES, Switches

MIXED = "mixed"  # the first prompts of every dataset
RESIDENT = "resident"  # no policy: all experts are in slots when the first prompt comes
Level = Literal["low", "medium", "high"]
LEVELS: tuple[Level, ...] = ("low", "medium", "high")
# MoE-SpeQ's cache sizes (table 3), of 64 experts a layer with 6 a token
_PAPER_SLOTS: Mapping[Level, int] = {"low": 6, "medium": 16, "high": 32}
_PAPER_EXPERTS, _PAPER_TOP_K = 64, 6


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: who prefetches (or RESIDENT), how many tokens are drafted, experts in device memory, and
    what is off."""

    dataset: str
    policy: str
    draft_length: DraftLength
    num_slots: int
    switches: Switches = DEFAULT_SWITCHES

    @property
    def resident(self) -> bool:
        """Nothing is to be missing."""
        return self.policy == RESIDENT

    @property
    def runs(self) -> str:
        """The policy that runs."""
        return "on-demand" if self.resident else self.policy

    @property
    def key(self) -> str:
        """Its name in a results file."""
        parts = [self.dataset, self.policy, str(self.draft_length), str(self.num_slots)]
        off = str(self.switches)
        return " / ".join([*parts, off] if off else parts)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on a machine, as far as tables need to know it.

    Attributes:
        name: of the model, or of the shape.
        kind: whether figures are measured, or predicted by the simulator.
        device: "cpu", "cuda: NVIDIA ...", or the card that is predicted for.
        synthetic: what stands in for a trained model's routing; "" for a trained one.
        whole_passes: steps run whole on a GPU.
        draft_bytes, slot_bytes: of the whole draft, and of one expert, on the device.
        datasets: what there are prompts of.
        draft_length: of the settings that draft a fixed number of tokens.
    """

    name: str
    kind: Literal["measured", "predicted"]
    machine: str
    device: str
    dtype: str
    link: str
    draft: str
    passes: str
    synthetic: str
    whole_passes: bool
    num_layers: int
    num_experts: int
    experts_per_token: int
    slot_bytes: int
    draft_bytes: int
    datasets: tuple[str, ...]
    prompts: int
    max_new_tokens: int
    draft_length: int

    def as_dict(self) -> dict[str, object]:
        """Plain values, for a results file."""
        return {**asdict(self), "datasets": list(self.datasets)}

    @property
    def label(self) -> str:
        """What stands in front of its figures."""
        shape = "synthetic routing, " if self.synthetic else ""
        link = f", {self.link} link" if "emulated" in self.link else ""
        return f"{self.kind}: {self.name}, {shape}{self.device}{link}"

    @property
    def total_experts(self) -> int:
        """Of all layers."""
        return self.num_layers * self.num_experts

    @property
    def mixed(self) -> str:
        """The prompts of tables that have no column for datasets."""
        return self.datasets[0] if self.synthetic else MIXED

    def slots_a_layer(self, level: Level) -> int:
        """Experts in device memory for each layer: as far between one token's experts and all of them as the
        paper's (for 64 experts of which a token uses 6: 6, 16 and 32)."""
        part = (_PAPER_SLOTS[level] - _PAPER_TOP_K) / (_PAPER_EXPERTS - _PAPER_TOP_K)
        return round(self.experts_per_token + part * (self.num_experts - self.experts_per_token))

    def slots(self, level: Level) -> int:
        """Experts in device memory, of all layers."""
        return self.num_layers * self.slots_a_layer(level)

    def slots_without_draft(self, level: Level) -> int:
        """Experts that fit into the same memory where no draft lies."""
        return min(self.total_experts, self.slots(level) + self.draft_bytes // self.slot_bytes)


def subject_from(value: Mapping[str, object]) -> Subject:
    """What `as_dict` gave.

    Raises:
        TypeError, KeyError: it is something else.
    """
    fields = dict(value)
    datasets = fields.pop("datasets")
    if not isinstance(datasets, list):
        raise TypeError("datasets are no list")
    return Subject(**fields, datasets=tuple(str(name) for name in datasets))  # type: ignore[arg-type]
