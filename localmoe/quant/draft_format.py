"""What a draft folder's names and JSON files say: expert names, quantization config, provenance. Writes and
reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Literal

from localmoe import __version__

PROVENANCE_FILE = "localmoe_draft.json"
QUANTIZE_CONFIG_FILE = "quantize_config.json"
BITS = 4
Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
_PRIVATE_KEY = "_name_or_path"  # may hold a path of the machine that wrote the config
# not quantised, as regular expressions on module names
_KEPT_IN_16_BIT = (
    r".*self_attn.*",
    r".*shared_expert.*",
    r".*mlp\.gate$",
    r".*mlp\.router$",
    r".*block_sparse_moe\.gate$",
)


@dataclass(frozen=True, slots=True)
class ExpertNaming:
    """How an architecture names its experts' modules in a standard checkpoint.

    Attributes:
        prefix: with {layer} (the model's decoder-layer index) and {expert}, for example
            "model.layers.{layer}.mlp.experts.{expert}".
        gate, up, down: the projections, for example "gate_proj", "up_proj", "down_proj" or "w1", "w3", "w2".
    """

    prefix: str
    gate: str
    up: str
    down: str

    def module(self, decoder_layer: int, expert: int, projection: Projection) -> str:
        """Full name of one matrix's module."""
        stem = self.prefix.format(layer=decoder_layer, expert=expert)
        return f"{stem}.{getattr(self, projection)}"


@dataclass(frozen=True, slots=True)
class DraftProvenance:
    """Where a draft comes from.

    Attributes:
        base_model: name of the 16-bit model; never a path.
        base_fingerprint: its checkpoint's fingerprint.
        method: how the codes were chosen, for example "rtn".
        created: UTC, ISO 8601.
    """

    base_model: str
    base_fingerprint: str
    method: str
    bits: int
    group_size: int
    created: str
    localmoe_version: str

    @classmethod
    def now(
        cls, base_model: str, base_fingerprint: str, method: str, group_size: int, bits: int = BITS
    ) -> DraftProvenance:
        """The provenance of a draft made now by this version; of a path only the last part is kept."""
        for kind in (PurePosixPath, PureWindowsPath):
            if kind(base_model).is_absolute():
                base_model = kind(base_model).name
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(base_model, base_fingerprint, method, bits, group_size, created, __version__)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DraftProvenance:
        """What `to_json` wrote; other keys are ignored.

        Raises:
            ValueError: a key is missing or has another type.
        """
        found: dict[str, Any] = {}
        for name in cls.__slots__:
            expected = int if name in ("bits", "group_size") else str
            if type(values.get(name)) is not expected:
                raise ValueError(f"{name} is missing or no {expected.__name__}")
            found[name] = values[name]
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the provenance file."""
        return asdict(self)


def quantization_config(group_size: int) -> dict[str, Any]:
    """The `quantization_config` of a symmetric 4-bit GPTQ checkpoint (format v1) of routed experts only."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": BITS,
        "group_size": group_size,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "pack_dtype": "int32",
        "dynamic": {f"-:{pattern}": {} for pattern in _KEPT_IN_16_BIT},
    }


def draft_config(base_config: Mapping[str, Any], group_size: int) -> dict[str, Any]:
    """The base model's config with the quantization config, without paths of this machine."""
    config = _without_private(base_config)
    config["quantization_config"] = quantization_config(group_size)
    return config


def _without_private(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_private(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key != _PRIVATE_KEY
    }
