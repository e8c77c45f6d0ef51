"""The finished layers of a draft under construction: writes each as a shard of its own, keeps account of them
in a small file, and takes over what an ended build left. Decides neither the folder nor when a build may go
on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from localmoe.quant.draft_format import DraftProvenance
from localmoe.quant.shard_writer import ShardMark, number_shards, shard_name, write_json, write_shard

STATE_FILE = "build_state.json"


class DraftProgress:
    """A folder of `layer-DDDDD.safetensors` (D: decoder layer), each whole, and the state file, which holds
    the draft's provenance and every shard's size and checksum. A shard counts once the state file names
    it."""

    def __init__(self, folder: Path, provenance: DraftProvenance) -> None:
        self.folder = folder
        self._provenance = provenance
        self._marks: dict[int, ShardMark] = {}

    @property
    def finished_layers(self) -> tuple[int, ...]:
        """Decoder layers, ascending."""
        return tuple(sorted(self._marks))

    @property
    def num_bytes(self) -> int:
        """Bytes of their shards."""
        return sum(mark.num_bytes for mark in self._marks.values())

    def shard(self, decoder_layer: int) -> Path:
        """Where a layer's shard lies until the draft is complete."""
        return self.folder / f"layer-{decoder_layer:05}.safetensors"

    def begin(self) -> None:
        """Take over the folder's whole shards if they were made by the same recipe, and remove all else.

        Raises:
            OSError: the folder cannot be read or written.
        """
        found = self._read_state()
        names = {path.name for path in self.folder.iterdir()}
        for index, (layer, mark) in enumerate(sorted(found.items())):
            for name in (self.shard(layer).name, shard_name(index, len(found))):  # the build was publishing
                if name in names and ShardMark.of_file(self.folder / name) == mark:
                    if name != self.shard(layer).name:
                        (self.folder / name).rename(self.shard(layer))
                    self._marks[layer] = mark
                    break
        kept = {self.shard(layer).name for layer in self._marks} | {STATE_FILE}  # until there is a new one
        for path in list(self.folder.iterdir()):
            if path.name not in kept:
                path.unlink()
        self._write_state()

    def add(self, decoder_layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Write one layer's shard, in the place of an older one.

        Raises:
            OSError: the disk is full or not writable; the layer then does not count.
        """
        self._marks.pop(decoder_layer, None)
        self._marks[decoder_layer] = write_shard(self.shard(decoder_layer), tensors)
        self._write_state()

    def complete(self) -> None:
        """Make the shards a checkpoint, in the order of their layers; the folder then holds nothing else of
        ours but the state file.

        Raises:
            OSError: the disk is full or not writable.
        """
        number_shards(self.folder, [self.shard(layer) for layer in self.finished_layers])

    def _write_state(self) -> None:
        shards = {str(layer): asdict(self._marks[layer]) for layer in self.finished_layers}
        state = {"provenance": self._provenance.to_json(), "shards": shards}
        write_json(self.folder / STATE_FILE, state)

    def _read_state(self) -> dict[int, ShardMark]:
        """Shards that the folder's state file names; none if it is damaged or of another recipe."""
        try:
            state: Any = json.loads((self.folder / STATE_FILE).read_text("utf-8"))
            if not self._provenance.same_recipe(DraftProvenance.from_json(state["provenance"])):
                return {}
            return {int(layer): ShardMark(**mark) for layer, mark in state["shards"].items()}
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}
