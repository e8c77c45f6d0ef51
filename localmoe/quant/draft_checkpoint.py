"""Reads the expert matrices of a draft folder, or of a ready-made GPTQ checkpoint. Does not decide where a
draft lies, and takes nothing but experts from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localmoe.core.errors import CheckpointError, DraftError, ModelNotFoundError, UnsupportedModelError
from localmoe.hub.checkpoint import Checkpoint, TensorHeader
from localmoe.hub.weight_files import read_json_object
from localmoe.kernels.int4 import QuantizedMatrix, check_group_size
from localmoe.quant.draft_format import BITS, PROVENANCE_FILE, DraftProvenance, ExpertNaming, Projection
from localmoe.quant.packing import GPTQ_DTYPES, GptqTensors, GptqVersion, gptq_shapes, unpack_matrix

_VERSIONS: dict[str, GptqVersion] = {"gptq": 1, "gptq_v2": 2}
_DTYPE_NAMES = {torch.int32: "I32", torch.float16: "F16"}
_DOWNLOAD_ADVICE = re.compile(r"[;:,] (download|get|give|remove) [^;:]*$")  # wrong for a draft made here


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A checked draft folder.

    Attributes:
        provenance: None in a GPTQ checkpoint that localmoe did not write.
    """

    folder: Path
    provenance: DraftProvenance | None
    bits: int
    group_size: int
    _version: GptqVersion
    _checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: Path) -> DraftCheckpoint:
        """Check the folder's JSON files and the headers of its weight files; reads no weights.

        Raises:
            DraftError: the draft is missing, damaged, truncated, or not in symmetric 4-bit GPTQ format.
        """
        try:
            checkpoint = Checkpoint.open(folder)
        except (ModelNotFoundError, UnsupportedModelError):
            raise DraftError(
                f"There is no draft in {folder}: build one with 'localmoe draft MODEL'."
            ) from None
        except CheckpointError as error:
            raise _damaged(folder, str(error)) from error
        group_size, version = _check_quantization(folder, checkpoint.config.get("quantization_config"))
        provenance = _read_provenance(folder)
        if provenance is not None and (provenance.bits, provenance.group_size) != (BITS, group_size):
            raise _damaged(folder, "its two descriptions of bits and group size differ")
        return cls(folder, provenance, BITS, group_size, version, checkpoint)

    def check_base(self, fingerprint: str, name: str) -> None:
        """Hold the draft against the model `name` whose checkpoint has this fingerprint.

        Raises:
            DraftError: it belongs to another model, or does not say to which.
        """
        if self.provenance is None:
            raise DraftError(
                f"The checkpoint in {self.folder} does not say which model it is a draft of (it has no "
                f"{PROVENANCE_FILE}): build a draft with 'localmoe draft {name}'."
            )
        base = self.provenance
        if base.base_fingerprint != fingerprint:
            raise DraftError(
                f"The draft in {self.folder} belongs to another model ({base.base_model}, fingerprint "
                f"{base.base_fingerprint[:12]}) and not to {name} ({fingerprint[:12]}): build one with "
                f"'localmoe draft {name}'."
            )

    def matrix(
        self,
        naming: ExpertNaming,
        decoder_layer: int,
        expert: int,
        projection: Projection,
        shape: tuple[int, int],
    ) -> QuantizedMatrix:
        """One expert's matrix of `shape` (N, K), in memory of its own.

        Raises:
            DraftError: a tensor is missing, damaged, or of another shape.
        """
        module = naming.module(decoder_layer, expert, projection)
        found: dict[str, Tensor] = {}
        for part, expected in gptq_shapes(*shape, self.group_size).items():
            found[part] = self._tensor(f"{module}.{part}", part, expected)
        try:
            return unpack_matrix(GptqTensors(**found), self.group_size, self._version)
        except ValueError as error:
            raise DraftError(
                f"The draft in {self.folder} cannot be used: of its matrix {module}, {error}; build it again "
                "with 'localmoe draft MODEL'."
            ) from None

    def _tensor(self, name: str, part: str, shape: tuple[int, ...]) -> Tensor:
        header = self._checkpoint.tensors.get(name)
        if header is None:
            raise _damaged(self.folder, f"it has no tensor {name}, so it is incomplete or of another model")
        dtype = GPTQ_DTYPES[part]
        if header.shape != shape or header.dtype != _DTYPE_NAMES[dtype]:
            raise DraftError(
                f"The draft in {self.folder} does not fit the model: tensor {name} is {header.dtype} "
                f"{list(header.shape)} and should be {_DTYPE_NAMES[dtype]} {list(shape)}; build it again "
                "with 'localmoe draft MODEL'."
            )
        return torch.frombuffer(self._read(header), dtype=dtype).reshape(shape)

    def _read(self, header: TensorHeader) -> bytearray:
        """Plain reads, so that no mapping keeps the file's pages resident."""
        data = bytearray(header.num_bytes)
        try:
            with header.file.open("rb", buffering=0) as stream:
                stream.seek(header.offset)
                view, count = memoryview(data), 0
                while count < len(data):
                    read = stream.readinto(view[count:])
                    if not read:
                        break
                    count += read
        except OSError as error:
            raise DraftError(
                f"The draft's file {header.file} cannot be read: {error.strerror or error}."
            ) from error
        if count < len(data):
            raise _damaged(self.folder, f"{header.file.name} has become shorter since it was opened")
        return data


def _damaged(folder: Path, what: str) -> DraftError:
    what = _DOWNLOAD_ADVICE.sub("", what.rstrip("."))
    return DraftError(
        f"The draft in {folder} is damaged ({what}): build it again with 'localmoe draft MODEL'."
    )


def _check_quantization(folder: Path, config: object) -> tuple[int, GptqVersion]:
    """Group size and format version of a `quantization_config`."""
    values: dict[str, Any] = config if isinstance(config, dict) else {}
    if values.get("quant_method") != "gptq":
        raise DraftError(
            f"{folder} is no draft: its {values.get('quant_method') or 'plain'} weights are not in GPTQ "
            "format; build a draft with 'localmoe draft MODEL'."
        )
    layout = str(values.get("checkpoint_format", values.get("format", "gptq")))
    if values.get("bits") != BITS or values.get("sym") is not True or layout not in _VERSIONS:
        raise DraftError(
            f"The draft in {folder} has {values.get('bits')} bits (sym {values.get('sym')}, format {layout}) "
            f"and this version reads symmetric {BITS}-bit GPTQ: build one with 'localmoe draft MODEL'."
        )
    group_size = values.get("group_size")
    try:
        if type(group_size) is not int:
            raise ValueError(f"group size {group_size} is no number")
        check_group_size(group_size)
    except ValueError as error:
        raise DraftError(
            f"The draft in {folder} cannot be used: {error}; build one with 'localmoe draft MODEL'."
        ) from None
    return group_size, _VERSIONS[layout]


def _read_provenance(folder: Path) -> DraftProvenance | None:
    path = folder / PROVENANCE_FILE
    if not path.exists():
        return None
    try:
        return DraftProvenance.from_json(read_json_object(path))
    except (CheckpointError, ValueError) as error:
        raise _damaged(folder, f"{PROVENANCE_FILE}: {error}") from None
