"""What a draft folder's JSON files say: quantization config and provenance. Writes and reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from localmoe import __version__
from localmoe.quant.expert_names import PROJECTIONS, ExpertNaming, Projection

__all__ = [
    "PROJECTIONS",
    "PROVENANCE_FILE",
    "QUANTIZE_CONFIG_FILE",
    "DraftProvenance",
    "ExpertNaming",
    "Projection",
    "Setting",
    "draft_config",
    "quantization_config",
]

PROVENANCE_FILE = "localmoe_draft.json"
QUANTIZE_CONFIG_FILE = "quantize_config.json"
Setting = str | int | float | bool
_LATER_KEYS = ("base_revision", "calibration_hash", "seed", "settings")  # absent in older drafts
_PRIVATE_KEY = "_name_or_path"  # may hold a path of the machine that wrote the config
# not quantised, as regular expressions on module names
_KEPT_IN_16_BIT = (
    r".*self_attn.*",
    r".*shared_expert.*",
    r".*mlp\.gate$",
    r".*mlp\.router$",
    r".*block_sparse_moe\.gate$",
    r".*\.mixer\.(?!experts\.).*",
)


@dataclass(frozen=True, slots=True)
class DraftProvenance:
    """Where a draft comes from, and what makes the same one again.

    Attributes:
        base_model: name of the 16-bit model; never a path.
        base_fingerprint: its checkpoint's fingerprint.
        method: how the codes were chosen: "rtn", "gptq" or "nf4".
        created: UTC, ISO 8601.
        base_revision: of the Hub snapshot that the weights came from; "" if unknown.
        calibration_hash: SHA-256 of the calibration text; "" where none was used.
        settings: the method's other parameters.
    """

    base_model: str
    base_fingerprint: str
    method: str
    bits: int
    group_size: int
    created: str
    localmoe_version: str
    base_revision: str = ""
    calibration_hash: str = ""
    seed: int = 0
    settings: Mapping[str, Setting] = field(default_factory=dict)

    @classmethod
    def now(
        cls,
        base_model: str,
        base_fingerprint: str,
        method: str,
        group_size: int,
        bits: int = 4,
        *,
        base_revision: str = "",
        calibration_hash: str = "",
        seed: int = 0,
        settings: Mapping[str, Setting] | None = None,
    ) -> DraftProvenance:
        """The provenance of a draft made now by this version; of a path only the last part is kept."""
        for kind in (PurePosixPath, PureWindowsPath):
            if kind(base_model).is_absolute():
                base_model = kind(base_model).name
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(
            base_model, base_fingerprint, method, bits, group_size, created, __version__,
            base_revision, calibration_hash, seed, dict(settings or {}),
        )  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DraftProvenance:
        """What `to_json` wrote, also by versions that knew fewer keys; keys of later versions are ignored.

        Raises:
            ValueError: a key is missing or has another type.
        """
        found: dict[str, Any] = {}
        for name in (entry.name for entry in fields(cls)):
            if name in _LATER_KEYS and name not in values:
                continue
            expected = {"bits": int, "group_size": int, "seed": int, "settings": dict}.get(name, str)
            if type(values.get(name)) is not expected:
                raise ValueError(f"{name} is missing or no {expected.__name__}")
            found[name] = values[name]
        if not all(isinstance(value, Setting) for value in found.get("settings", {}).values()):
            raise ValueError("settings holds more than plain values")
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the provenance file."""
        return asdict(self)

    def same_recipe(self, other: DraftProvenance) -> bool:
        """Whether both describe the same codes: all but when and by which version they were made."""
        return replace(self, created="", localmoe_version="") == replace(
            other, created="", localmoe_version=""
        )


def quantization_config(group_size: int, bits: int = 4) -> dict[str, Any]:
    """The `quantization_config` of a symmetric GPTQ checkpoint (format v1) of routed experts only."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "pack_dtype": "int32",
        "dynamic": {f"-:{pattern}": {} for pattern in _KEPT_IN_16_BIT},
    }


def draft_config(base_config: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The base model's config with a quantization config, without paths of this machine."""
    config = _without_private(base_config)
    config["quantization_config"] = dict(quantization)
    return config


def _without_private(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_private(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key != _PRIVATE_KEY
    }
