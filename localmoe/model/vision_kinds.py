"""Which models read pictures here, and what their config says of that. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

# whose text sees a picture's tokens one after another, and turns them by time, height and width
KINDS: Final = frozenset({"qwen3_5_moe", "qwen3_vl_moe"})


# of a picture, by which it is scaled down; where a token stands for 32 x 32 pixels, a million pixels and
# 393,000, as a CPU takes seconds for that
GPU_TOKENS: Final = 1024
CPU_TOKENS: Final = 384
# while a GPU reads one, for each number of a patch's hidden size: 52 measured, of a real shape; a CPU needs
# less in all
_PATCH_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class VisionKind:
    """Of a model that reads pictures.

    Attributes:
        token_id: which a chat template writes for a picture, and a prompt has for each of its tokens.
        merge: patches a side that become one token.
        patch: pixels a side of a patch.
        hidden_size: of the vision encoder.
        depth: decoder layers behind which something of a picture is added (DeepStack).
    """

    token_id: int
    merge: int
    patch: int
    hidden_size: int
    depth: int

    @property
    def image_bytes(self) -> int:
        """What reading the largest picture takes beside weights in RAM."""
        return GPU_TOKENS * self.merge**2 * self.hidden_size * _PATCH_BYTES


def find_kind(config: Any) -> VisionKind | None:
    """Of transformers' config; None where it reads no pictures, or in a way that is not known here."""
    if config.model_type not in KINDS:
        return None
    vision = config.vision_config
    return VisionKind(
        int(config.image_token_id), int(vision.spatial_merge_size), int(vision.patch_size),
        int(vision.hidden_size), len(getattr(vision, "deepstack_visual_indexes", None) or ()),
    )  # fmt: skip
