"""What models that read pictures keep for them, of shapes that stand for their text part."""

from __future__ import annotations

from dataclasses import replace

from localmoe.core.types import ModelFootprint

IMAGE_BYTES = {"qwen3.5-35b-a3b": 301_989_888}  # see ModelFootprint.image_bytes


def as_published(shape: str, footprint: ModelFootprint) -> ModelFootprint:
    """A shape's footprint with what the whole model plans."""
    return replace(footprint, image_bytes=IMAGE_BYTES.get(shape, 0))
