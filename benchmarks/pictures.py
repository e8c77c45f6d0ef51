"""What models that read pictures keep for them, of shapes that stand for their text part."""

from __future__ import annotations

from dataclasses import replace

from localmoe.core.types import ModelFootprint

# see ModelFootprint.image_bytes
IMAGE_BYTES = {"qwen3.5-35b-a3b": 335_544_320, "gemma-4-26b-a4b": 219_348_992}


def as_published(shape: str, footprint: ModelFootprint) -> ModelFootprint:
    """A shape's footprint with what the whole model plans."""
    return replace(footprint, image_bytes=IMAGE_BYTES.get(shape.removesuffix("-fp8"), 0))
