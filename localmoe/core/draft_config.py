"""How a draft is made, checked where it is said. Builds nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from localmoe.core.config import ALLOWED_DRAFT_BITS, DeviceName
from localmoe.core.errors import ConfigError
from localmoe.core.units import format_bytes

Method = Literal["gptq", "nf4", "rtn"]
METHODS: tuple[Method, ...] = ("gptq", "nf4", "rtn")  # the best first
BITS = ALLOWED_DRAFT_BITS
GROUP_SIZES = (32, 64, 128, 256)
NF4_BITS, NF4_GROUP_SIZE = 4, 64  # bitsandbytes'
LEAST_SEQUENCES = 8  # of calibration; one is held out
GPTQ_BUDGET_BYTES = 8 << 30  # of device memory, unless the user gives another


@dataclass(frozen=True, slots=True)
class DraftForm:
    """What decides how many bytes a draft takes in memory. codebook: codes stand for the values of a table,
    as NF4's do."""

    bits: int = 4
    group_size: int = 128
    codebook: bool = False


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """How a draft is calibrated and quantised; with the calibration text it reproduces the draft.

    Attributes:
        num_tokens: of calibration; sequence_length: tokens that see each other.
        gate_weighted: a token counts by the square of its router weight (MoEQuant) instead of once.
    """

    bits: int = 4
    group_size: int = 128
    num_tokens: int = 65536
    sequence_length: int = 512
    seed: int = 0
    gate_weighted: bool = True
    act_order: bool = True

    def provenance(self) -> dict[str, int | bool]:
        """What the draft's provenance does not name otherwise."""
        return {k: v for k, v in asdict(self).items() if k not in ("bits", "group_size", "seed")}


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How a draft is made.

    Attributes:
        gptq: bits and group size of any method (of NF4: `nf4_settings`), and how GPTQ calibrates.
        calibration: a text of the user's own; None: the built-in one.
        device: where GPTQ computes.
        budget_bytes: device memory that it may take.
    """

    method: Method = "gptq"
    gptq: GptqSettings = field(default_factory=GptqSettings)
    calibration: Path | None = None
    device: DeviceName = "auto"
    budget_bytes: int = GPTQ_BUDGET_BYTES

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.gptq.bits not in BITS:
            raise ConfigError(
                f"A draft of {self.gptq.bits} bits by method '{self.method}' cannot be built: use method "
                f"{' or '.join(METHODS)} and {', '.join(map(str, BITS))} bits."
            )
        if self.method == "nf4" and (self.gptq.bits, self.gptq.group_size) != (NF4_BITS, NF4_GROUP_SIZE):
            raise ConfigError(
                f"An NF4 draft of {self.gptq.bits} bits in groups of {self.gptq.group_size} cannot be built: "
                f"NF4 has {NF4_BITS} bits and groups of {NF4_GROUP_SIZE}, so leave both options out."
            )
        if self.gptq.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"Group size {self.gptq.group_size} is out of range: use one of {sizes}.")
        if self.gptq.sequence_length < 1:
            raise ConfigError(
                f"Sequences of {self.gptq.sequence_length} tokens are too short: give at least 1."
            )
        least = LEAST_SEQUENCES * self.gptq.sequence_length
        if self.gptq.num_tokens < least:
            raise ConfigError(
                f"{self.gptq.num_tokens:,} calibration tokens are too few: give at least {least:,}, "
                f"which are {LEAST_SEQUENCES} sequences."
            )
        if not 0 <= self.gptq.seed < 1 << 63:
            raise ConfigError(f"Seed {self.gptq.seed} is out of range: use 0 to 2^63 - 1.")
        if self.budget_bytes < 1:
            raise ConfigError(
                f"A budget of {format_bytes(self.budget_bytes)} is out of range: give a positive size."
            )


def nf4_settings() -> DraftSettings:
    """Of an NF4 draft, which knows one size of codes and groups and no calibration."""
    return DraftSettings("nf4", GptqSettings(NF4_BITS, NF4_GROUP_SIZE))
