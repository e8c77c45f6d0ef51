"""Which models read pictures here, and what their config says of that. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_GRIDS: Final = frozenset({"qwen3_5_moe", "qwen3_vl_moe"})
_POOLED: Final = "gemma4"
KINDS: Final = _GRIDS | {_POOLED}
_CHANNELS: Final = 3
# of a picture, by which it is scaled down; where a token stands for 32 x 32 pixels, a million pixels and
# 393,000, as a CPU takes seconds for that
GPU_TOKENS: Final = 1024
CPU_TOKENS: Final = 384
_POOLED_TOKENS: Final = 280  # what Gemma's processor scales each picture to, unless it is told otherwise
# while a GPU reads one, for each number of a patch's hidden size, and besides: 264 and 203 MiB measured of
# two real shapes; a CPU needs less
_PATCH_BYTES: Final = 64
_FURTHER_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class VisionKind:
    """Of a model that reads pictures.

    Attributes:
        token_id: which a chat template writes for a picture, and a prompt has for each of its tokens.
        around: ids that a prompt has before and behind these.
        merge: patches a side that become one token.
        patch: pixels a side of a patch.
        patch_numbers: that the encoder is given of one.
        most_tokens: of a picture, on a GPU.
        hidden_size: of the vision encoder.
        depth: decoder layers behind which something of a picture is added (DeepStack).
        by_grid: patches come with a grid, and attention turns tokens by time, row and column (M-RoPE); else
            with a place each, and by their place in the text.
        sees_whole: where layers see a window, a picture's tokens see each other, also those behind them.
    """

    token_id: int
    around: tuple[tuple[int, ...], tuple[int, ...]]
    merge: int
    patch: int
    patch_numbers: int
    most_tokens: int
    hidden_size: int
    depth: int
    by_grid: bool
    sees_whole: bool

    @property
    def uncut_tokens(self) -> int:
        """Of the longest picture that a pass has to take whole; 0: passes may end within each."""
        return self.most_tokens if self.sees_whole else 0

    @property
    def image_bytes(self) -> int:
        """What reading the largest picture takes beside weights in RAM."""
        return self.most_tokens * self.merge**2 * self.hidden_size * _PATCH_BYTES + _FURTHER_BYTES


def find_kind(config: Any) -> VisionKind | None:
    """Of transformers' config; None where it reads no pictures, or in a way that is not known here."""
    vision = getattr(config, "vision_config", None)
    if config.model_type not in KINDS or vision is None:
        return None
    text = config.get_text_config()
    kind = _pooled(config, vision) if config.model_type == _POOLED else _by_grid(config, vision)
    in_vocabulary = all(
        0 <= one < text.vocab_size for one in (kind.token_id, *kind.around[0], *kind.around[1])
    )
    # behind the embedding some look tokens up once more, a picture's too
    return kind if in_vocabulary and not getattr(text, "hidden_size_per_layer_input", 0) else None


def _by_grid(config: Any, vision: Any) -> VisionKind:
    patch = int(vision.patch_size)
    return VisionKind(
        token_id=int(config.image_token_id), around=((), ()), merge=int(vision.spatial_merge_size),
        patch=patch, patch_numbers=_CHANNELS * int(vision.temporal_patch_size) * patch**2,
        most_tokens=GPU_TOKENS, hidden_size=int(vision.hidden_size),
        depth=len(getattr(vision, "deepstack_visual_indexes", None) or ()), by_grid=True, sees_whole=False,
    )  # fmt: skip


def _pooled(config: Any, vision: Any) -> VisionKind:
    patch = int(vision.patch_size)
    return VisionKind(
        token_id=int(config.image_token_id),
        around=((int(config.boi_token_id),), (int(config.eoi_token_id),)),
        merge=int(vision.pooling_kernel_size), patch=patch, patch_numbers=_CHANNELS * patch**2,
        most_tokens=_POOLED_TOKENS, hidden_size=int(vision.hidden_size), depth=0, by_grid=False,
        sees_whole=config.get_text_config().use_bidirectional_attention == "vision",
    )  # fmt: skip
