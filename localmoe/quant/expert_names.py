"""How a checkpoint names the matrices of single experts: finds the pattern in its tensors' names. Opens no
file and knows no model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
# gate, up and down of the Qwen and DeepSeek families, and of the Mixtral family
PROJECTION_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
UNGATED_NAMES = ("up_proj", "down_proj")
_EXPERT_TENSOR = re.compile(
    r"(?P<prefix>.*layers\.)\d+(?P<middle>\..*experts\.)\d+\.(?P<projection>\w+)\.(?P<part>\w+)"
)


@dataclass(frozen=True, slots=True)
class ExpertNaming:
    """How an architecture names its experts' modules in a standard checkpoint.

    Attributes:
        prefix: with {layer} (the model's decoder-layer index) and {expert}, for example
            "model.layers.{layer}.mlp.experts.{expert}".
        gate, up, down: the projections, for example "gate_proj", "up_proj", "down_proj" or "w1", "w3", "w2";
            gate is None where there is none.
    """

    prefix: str
    gate: str | None
    up: str
    down: str

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Those that an expert has, in order."""
        return PROJECTIONS if self.gate is not None else PROJECTIONS[1:]

    def module(self, decoder_layer: int, expert: int, projection: Projection) -> str:
        """Full name of one matrix's module."""
        stem = self.prefix.format(layer=decoder_layer, expert=expert)
        return f"{stem}.{getattr(self, projection)}"


def find_naming(names: Iterable[str], part: str) -> ExpertNaming | None:
    """The naming that most experts' tensors `...PROJECTION.part` follow (`part` is "weight" or "qweight");
    None where no expert has tensors of its own."""
    found: Counter[tuple[str, str]] = Counter()
    projections: set[str] = set()
    for name in names:
        match = _EXPERT_TENSOR.fullmatch(name)
        if match and match["part"] == part:
            found[match["prefix"], match["middle"]] += 1
            projections.add(match["projection"])
    known = next((names for names in PROJECTION_NAMES if projections.issuperset(names)), None)
    if known is None and not projections.issuperset(UNGATED_NAMES):
        return None
    (prefix, middle), _ = found.most_common(1)[0]
    prefix, middle = (part.replace("{", "{{").replace("}", "}}") for part in (prefix, middle))
    return ExpertNaming(f"{prefix}{{layer}}{middle}{{expert}}", *(known or (None, *UNGATED_NAMES)))
