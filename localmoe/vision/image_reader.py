"""What a model's image processor makes of a picture: patches, and how many tokens these become. transformers'
own processor does it. Runs no encoder."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import transformers
from torch import Tensor

from localmoe.core.errors import CheckpointError, ConfigError, sentence_of
from localmoe.core.types import Image
from localmoe.hub.picture_settings import settings_file
from localmoe.model.vision_kinds import VisionKind
from localmoe.vision.image_file import read_image

_LAYOUTS, _PATCHES = 1024, 4  # kept: of pictures asked for last
_TRIAL = (320, 200)  # pixels
# what transformers' processor makes of a picture: float32 numbers of its patches, and int64 how many in time,
# height and width, or where each is
Patches = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """A picture in tokens.

    Attributes:
        digest: SHA-256 of the file.
        height, width: in tokens.
    """

    digest: bytes
    height: int
    width: int

    @property
    def tokens(self) -> int:
        """Of the whole picture, row by row."""
        return self.height * self.width


class ImageReader:
    """Of one model. Any thread may ask.

    Attributes:
        token_id, around: of the model's kind.
    """

    def __init__(self, folder: Path, kind: VisionKind, most_tokens: int) -> None:
        """most_tokens: of a picture; a larger one is scaled down.

        Raises CheckpointError: the processor's settings are damaged."""
        self.token_id, self.around, self._kind = kind.token_id, kind.around, kind
        try:
            self._processor: Any = transformers.AutoImageProcessor.from_pretrained(
                folder, backend="pil", trust_remote_code=False
            )
            self._options = _options(self._processor, kind, most_tokens)
            self._try()
        except Exception as error:  # settings may make any line of transformers fail
            what = settings_file(folder) or folder
            raise CheckpointError(
                f"{what} cannot be used ({sentence_of(error)}): download the model again, or ask without "
                "pictures."
            ) from error
        self._lock = threading.Lock()
        self._layouts: OrderedDict[bytes, ImageLayout] = OrderedDict()
        self._patches: OrderedDict[bytes, Patches] = OrderedDict()

    def count(self, image: Image) -> int:
        """Tokens that it takes. Raises ConfigError: it cannot be read."""
        return self.layout(image).tokens

    def layout(self, image: Image) -> ImageLayout:
        """In tokens. Raises ConfigError: it cannot be read."""
        digest = hashlib.sha256(image.data).digest()
        with self._lock:
            if digest in self._layouts:
                self._layouts.move_to_end(digest)
                return self._layouts[digest]
        height, width = _sides(self._processed(image, digest), self._kind)
        layout = ImageLayout(digest, height // self._kind.merge, width // self._kind.merge)
        with self._lock:
            _keep(self._layouts, digest, layout, _LAYOUTS)
        return layout

    def patches(self, image: Image) -> Patches:
        """What the encoder is given. Raises ConfigError: it cannot be read."""
        digest = hashlib.sha256(image.data).digest()
        with self._lock:
            found = self._patches.get(digest)
        return found or self._processed(image, digest)

    def _processed(self, image: Image, digest: bytes) -> Patches:
        pixels = read_image(image.data)
        try:
            found = self._made(pixels)
        except Exception as error:  # code of the model's makers may fail in any way on what was never tried
            raise ConfigError(
                f"The picture cannot be processed ({sentence_of(error)}): use another one."
            ) from error
        with self._lock:
            _keep(self._patches, digest, found, _PATCHES)
        return found

    def _made(self, image: PIL.Image.Image) -> Patches:
        made = self._processor(images=[image], return_tensors="pt", **self._options)
        names = ("pixel_values", "image_grid_thw" if self._kind.by_grid else "image_position_ids")
        return {name: made[name] for name in names}

    def _try(self) -> None:
        """Raises ValueError: what it makes of a picture is not what the model's encoder reads."""
        kind, pixels = self._kind, self._made(PIL.Image.new("RGB", _TRIAL))["pixel_values"]
        merge = self._processor.merge_size if kind.by_grid else self._processor.pooling_kernel_size
        made = self._processor.patch_size, merge, pixels.shape[-1]
        wanted = kind.patch, kind.merge, kind.patch_numbers
        if made != wanted:
            raise ValueError(f"its patches, {made}, are not those of config.json, {wanted}")
        if not pixels.isfinite().all():
            raise ValueError("it makes no numbers of pixels")


def _options(processor: Any, kind: VisionKind, most_tokens: int) -> dict[str, Any]:
    """By which pictures have no more tokens than that."""
    if not kind.by_grid:
        return {"do_resize": True, "max_soft_tokens": min(int(processor.max_soft_tokens), kind.most_tokens)}
    pixels = most_tokens * (kind.merge * kind.patch) ** 2
    size = dict(processor.size)
    edges = {edge: min(int(size[edge]), pixels) for edge in ("shortest_edge", "longest_edge")}
    return {"do_resize": True, "size": edges}


def _sides(patches: Patches, kind: VisionKind) -> tuple[int, int]:
    """Height and width in patches."""
    if kind.by_grid:
        _, height, width = (int(size) for size in patches["image_grid_thw"][0])
        return height, width
    columns, rows = (patches["image_position_ids"][0].amax(dim=0) + 1).tolist()  # of padding -1
    return int(rows), int(columns)


def _keep(held: OrderedDict[bytes, Any], key: bytes, value: object, most: int) -> None:
    held[key] = value
    held.move_to_end(key)
    while len(held) > most:
        held.popitem(last=False)
