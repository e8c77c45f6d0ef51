"""Of a checkpoint that reads pictures, what reads them. Keeps nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from localmoe.core.errors import CheckpointError, ConfigError
from localmoe.core.types import Image
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.picture_settings import PROCESSOR_FILES, settings_file
from localmoe.model.skeleton import read_model_config
from localmoe.model.vision_kinds import CPU_TOKENS, KINDS, VisionKind, find_kind
from localmoe.vision.encoder import VisionEncoder
from localmoe.vision.image_reader import ImageReader

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VisionSource:
    """What is known before a weight is read."""

    checkpoint: Checkpoint
    config: Any  # transformers', of the whole model
    kind: VisionKind

    def reader(self, device: torch.device) -> ImageReader:
        """For an engine on this device. Raises CheckpointError: the processor's settings are damaged."""
        most_tokens = (
            self.kind.most_tokens if device.type == "cuda" else min(CPU_TOKENS, self.kind.most_tokens)
        )
        return ImageReader(self.checkpoint.folder, self.kind, most_tokens)

    def reader_or_refusal(self, device: torch.device) -> ImageReader | NoProcessor:
        """The same; where its settings are damaged, what refuses pictures alone."""
        try:
            return self.reader(device)
        except CheckpointError as error:
            _LOG.warning("pictures are refused: %s", error)
            return NoProcessor(str(error), self.kind.token_id, self.kind.around)

    def encoder(self, dtype: torch.dtype) -> VisionEncoder:
        """Without weights. Raises as VisionEncoder."""
        return VisionEncoder(self.checkpoint, self.config, dtype)


@dataclass(frozen=True, slots=True)
class NoProcessor:
    """Stands for the reader of a model whose processor's settings are missing or damaged
    (chat.image_parts.ImageTokens)."""

    sentence: str  # for whoever asks with a picture
    token_id: int
    around: tuple[tuple[int, ...], tuple[int, ...]]

    def count(self, image: Image) -> int:
        """Raises ConfigError."""
        raise ConfigError(self.sentence)


def find_vision(checkpoint: Checkpoint) -> VisionSource | NoProcessor | None:
    """What reads pictures; None where nothing does. Raises as read_model_config."""
    if checkpoint.config.get("model_type") not in KINDS:
        return None
    config = read_model_config(checkpoint)
    kind = find_kind(config)
    if kind is None:
        return None
    if settings_file(checkpoint.folder) is None:
        sentence = (
            f"How the model reads pictures is said by {' or '.join(PROCESSOR_FILES)}, and "
            f"{checkpoint.folder} has neither: `localmoe pull` fetches what is missing of a model; or ask "
            "without pictures."
        )
        return NoProcessor(sentence, kind.token_id, kind.around)
    return VisionSource(checkpoint, config, kind)
