"""Pictures of an engine's prompts: read when they are needed for the first time, and told to the passes. Runs
no pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from localmoe.chat.image_parts import ImageTokens, images_of
from localmoe.chat.prompt_cache import PromptCache
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import HardwareError
from localmoe.core.types import Image
from localmoe.core.units import format_bytes
from localmoe.engine.loading import EngineParts, Runner
from localmoe.engine.log_lines import log_image
from localmoe.hardware.cpu import ram_bytes
from localmoe.hardware.host_room import texts_room
from localmoe.hardware.needs import kv_positions
from localmoe.model.draft_model import DraftModel
from localmoe.model.image_rows import ImageRows, PlacedRows
from localmoe.model.rotary import tabulate_all
from localmoe.vision.encoder import VisionEncoder
from localmoe.vision.features import KeptFeatures
from localmoe.vision.image_reader import ImageReader, Patches
from localmoe.vision.placing import ImageNumbers, PlacedImage, coordinates, place_images
from localmoe.vision.source import VisionSource


class EngineImages:
    """Of one engine whose model reads pictures. The answer's thread calls it."""

    def __init__(
        self, source: VisionSource, reader: ImageReader, runner: Runner, rows: ImageRows,
        device: torch.device, dtype: torch.dtype, texts: PromptCache | None,
    ) -> None:  # fmt: skip
        """rows: the runner's. dtype: of passes. texts: that give way to the encoder."""
        self._source, self._reader, self._runner, self._rows = source, reader, runner, rows
        self._texts = texts
        self._device, self._dtype = device, dtype
        self._encoder: VisionEncoder | None = None  # its weights come with the first picture
        self._kept, self._numbers = KeptFeatures(), ImageNumbers()
        self._placed: tuple[PlacedImage, ...] = ()
        self._images: tuple[Image, ...] = ()

    def begin(self, request: GenerationRequest, prompt: Sequence[int]) -> Sequence[int]:
        """What tells the prompt's text from others, where the ids of pictures are all the same."""
        self._images = images_of(request.messages)
        layouts = [self._reader.layout(image) for image in self._images]
        self._placed = place_images(prompt, self._reader.token_id, layouts)
        return self._numbers.told_apart(prompt, self._placed) if self._placed else prompt

    def read(self, length: int, held: int, stop: threading.Event | None) -> None:
        """Before the prompt's first pass: tell the passes of its pictures, and read those whose tokens are to
        run.

        Args:
            length: of the prompt.
            held: tokens of it that the sequence state has.
            stop: ends it after the picture at hand; no pass may run then.

        Raises:
            HardwareError: RAM does not suffice for the encoder.
            CheckpointError: its weights cannot be read.
            UnsupportedModelError: it cannot be built or run.
            torch.OutOfMemoryError: of a GPU.
        """
        pairs = zip(self._placed, self._images, strict=True)
        needed = [(one, image) for one, image in pairs if one.end > held]
        counters = self._runner.passes.counters
        placed = []
        try:
            for left, (one, image) in zip(range(len(needed), 0, -1), needed, strict=True):
                counters.unread_images = left
                if stop is not None and stop.is_set():
                    return
                placed.append(PlacedRows(one.start, self._features(one, image)))
            counters.unread_images = 0
        except BaseException:
            counters.ended = True  # nobody waits for the prompt any more
            raise
        turned = self._placed and self._source.kind.by_grid
        self._rows.begin(placed, coordinates(self._placed, length) if turned else None)

    @classmethod
    def of_engine(
        cls, parts: EngineParts, reader: ImageTokens | None, texts: PromptCache | None
    ) -> EngineImages | None:
        """reader: of its prompts' encoder; None: it reads no pictures. texts: that were left."""
        source, compute = parts.prepared.source.vision(), parts.prepared.compute
        if source is None or not isinstance(reader, ImageReader):
            return None
        model, drafter = parts.prepared.skeleton.model, None if parts.other is None else parts.other.model
        beside = [] if drafter is None or isinstance(drafter, DraftModel) else [drafter.module]
        if source.kind.by_grid and not compute.whole_passes:
            positions = kv_positions(parts.prepared.plan.context)  # of rows that pad a pass too
            for module in (model, *beside):
                tabulate_all(module, positions, compute.dtype)
        rows = ImageRows(model, source.kind.depth, beside, whole=source.kind.sees_whole)
        parts.runner.images = rows
        return cls(source, reader, parts.runner, rows, compute.device, compute.dtype, texts)

    def close(self) -> None:
        """Let go of what passes were told, whoever still refers to them."""
        self._rows.forget()
        if self._encoder is not None:
            self._encoder.close()
        self._encoder = None

    def _features(self, placed: PlacedImage, image: Image) -> Tensor:
        found = self._kept.get(placed.layout.digest)
        if found is None:
            began = time.perf_counter()
            found = self._encoded(self._reader.patches(image))
            self._kept.keep(placed.layout.digest, found)
            log_image(placed.layout.tokens, time.perf_counter() - began)
        return found

    def _encoded(self, patches: Patches) -> Tensor:
        if self._encoder is None:
            encoder = self._source.encoder(self._dtype)
            self._make_room(encoder.num_bytes)
            encoder.read(pin=self._device.type == "cuda")
            self._encoder = encoder
        if self._device.type != "cuda":
            return self._encoder.encode(patches, self._device)
        torch.cuda.empty_cache()  # what other passes keep, and then what this one did
        try:
            return self._encoder.encode(patches, self._device)
        finally:
            torch.cuda.empty_cache()

    def _make_room(self, needed: int) -> None:
        """In RAM; texts that were left give way. Raises HardwareError: that would not do."""
        held = 0 if self._texts is None else self._texts.num_bytes
        room = texts_room(*ram_bytes(), held, needed)
        if room < needed:
            raise HardwareError(
                f"Reading a picture takes {format_bytes(needed)} of RAM for the model's vision encoder, "
                f"and {format_bytes(room)} can be had: close other programs, or ask without pictures."
            )
        if self._texts is not None and texts_room(*ram_bytes(), 0, needed) < needed:
            self._texts.clear()
