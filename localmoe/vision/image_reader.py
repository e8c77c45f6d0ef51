"""What a model's image processor makes of a picture: patches, and how many tokens these become. transformers'
own processor does it. Runs no encoder."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import transformers
from torch import Tensor

from localmoe.core.errors import CheckpointError, sentence_of
from localmoe.core.types import Image
from localmoe.model.vision_kinds import VisionKind
from localmoe.vision.image_file import read_image

PROCESSOR_FILE: Final = "preprocessor_config.json"
_LAYOUTS, _PATCHES = 1024, 4  # kept: of pictures asked for last


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
        token_id: of the model's kind.
    """

    def __init__(self, folder: Path, kind: VisionKind, most_tokens: int) -> None:
        """most_tokens: of a picture; a larger one is scaled down.

        Raises CheckpointError: the processor's settings are damaged."""
        self.token_id, self._merge = kind.token_id, kind.merge
        pixels = most_tokens * (kind.merge * kind.patch) ** 2
        try:
            self._processor: Any = transformers.AutoImageProcessor.from_pretrained(
                folder, backend="pil", trust_remote_code=False
            )
            size = dict(self._processor.size)
            self._size = {
                "shortest_edge": min(int(size["shortest_edge"]), pixels),
                "longest_edge": min(int(size["longest_edge"]), pixels),
            }
        except Exception as error:  # settings may make any line of transformers fail
            raise CheckpointError(
                f"{folder / PROCESSOR_FILE} cannot be used ({sentence_of(error)}): download the model again."
            ) from error
        self._lock = threading.Lock()
        self._layouts: OrderedDict[bytes, ImageLayout] = OrderedDict()
        self._patches: OrderedDict[bytes, tuple[Tensor, Tensor]] = OrderedDict()

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
        _, grid = self._processed(image, digest)
        _, height, width = (int(size) for size in grid[0])
        layout = ImageLayout(digest, height // self._merge, width // self._merge)
        with self._lock:
            _keep(self._layouts, digest, layout, _LAYOUTS)
        return layout

    def patches(self, image: Image) -> tuple[Tensor, Tensor]:
        """Float32 (patches, numbers of one), and int64 (1, 3): how many in time, height and width.

        Raises ConfigError: it cannot be read."""
        digest = hashlib.sha256(image.data).digest()
        with self._lock:
            found = self._patches.get(digest)
        return found or self._processed(image, digest)

    def _processed(self, image: Image, digest: bytes) -> tuple[Tensor, Tensor]:
        picture = read_image(image.data)
        made = self._processor(images=[picture], size=self._size, return_tensors="pt")
        found = made["pixel_values"], made["image_grid_thw"]
        with self._lock:
            _keep(self._patches, digest, found, _PATCHES)
        return found


def _keep(held: OrderedDict[bytes, Any], key: bytes, value: object, most: int) -> None:
    held[key] = value
    held.move_to_end(key)
    while len(held) > most:
        held.popitem(last=False)
