"""How a GPTQ checkpoint's matrices are laid out, by its own description: bits, groups, format version. Reads
no tensor and does not decide whether the checkpoint fits a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from localmoe.core.errors import CheckpointError, DraftError
from localmoe.hub.weight_files import checked_file, read_json_object
from localmoe.kernels.codebook import cut_groups
from localmoe.kernels.codes import BITS, DEFAULT_GROUP_SIZE, CodeMatrix, check_group_size
from localmoe.quant.draft_format import QUANTIZE_CONFIG_FILE, quantization_config
from localmoe.quant.matrix_layout import Part
from localmoe.quant.packing import (
    GPTQ_DTYPES,
    GptqTensors,
    GptqVersion,
    check_packable,
    gptq_num_bytes,
    gptq_shapes,
    pack_matrix,
    unpack_matrix,
)

_VERSIONS: dict[str, GptqVersion] = {"gptq": 1, "gptq_v2": 2}
_WHOLE_ROW = -1  # group size of files with one scale a row
_LARGEST_GROUP = 256  # that the GPU's kernels know
_WIDEST_ROW = 1 << 16  # rows are filled up to whole groups


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """How the matrices of a checkpoint lie in its files. See MatrixLayout.

    Attributes:
        stored_group_size: input features that share a scale in the files; -1: all of a row.
        version: of the zero points.
        act_order: whether the files say that their groups follow the order of activations.
    """

    bits: int
    stored_group_size: int
    version: GptqVersion = 1
    act_order: bool = False

    @property
    def group_size(self) -> int:
        """Of the matrices that are read: groups wider than the kernels know are cut into groups of 128 with
        one scale, which is exact."""
        wide = self.stored_group_size == _WHOLE_ROW or self.stored_group_size > _LARGEST_GROUP
        return DEFAULT_GROUP_SIZE if wide else self.stored_group_size

    @property
    def codebook(self) -> bool:
        """Codes are integers."""
        return False

    @property
    def code_part(self) -> str:
        """GPTQ's own name."""
        return "qweight"

    def config(self) -> dict[str, Any]:
        """Of the checkpoints that localmoe writes: format v1, columns in order."""
        return quantization_config(self.stored_group_size, self.bits)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """Codes, zero points, scales and groups."""
        shapes = gptq_shapes(out_features, in_features, self._stored_group(in_features), self.bits)
        return {part: (GPTQ_DTYPES[part], shape) for part, shape in shapes.items()}

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Raises ValueError: a side does not fill whole words."""
        check_packable(out_features, in_features, self.bits)
        return gptq_num_bytes(out_features, in_features, self._stored_group(in_features), self.bits)

    def pack(self, matrix: CodeMatrix) -> dict[str, Tensor]:
        """Raises ValueError: a side does not fill whole words."""
        assert (matrix.bits, matrix.group_size) == (self.bits, self.stored_group_size)
        assert matrix.columns is None, "the draft's config says that columns are in order"
        tensors = pack_matrix(matrix, self.version)
        return {part: getattr(tensors, part) for part in GPTQ_DTYPES}

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> CodeMatrix:
        """Raises ValueError: as `unpack_matrix`."""
        stored = self._stored_group(shape[1])
        matrix = unpack_matrix(GptqTensors(**parts), stored, self.version, self.bits)
        return matrix if stored == self.group_size else cut_groups(matrix, self.group_size)

    def _stored_group(self, in_features: int) -> int:
        return in_features if self.stored_group_size == _WHOLE_ROW else self.stored_group_size


def read_layout(folder: Path, config: Mapping[str, Any], *, ready_made: bool = True) -> GptqLayout:
    """What config.json's `quantization_config` says, or, where a ready-made checkpoint's has none,
    quantize_config.json (which may name no method, as only GPTQ writes it). A missing format means v1.

    Raises:
        DraftError: the weights are no symmetric GPTQ of 2, 3, 4 or 8 bits.
    """
    values = _quantization_values(folder, config, ready_made)
    if values.get("quant_method") != "gptq":
        raise DraftError(
            f"{folder} is no draft: its {values.get('quant_method') or 'plain'} weights are not in GPTQ "
            "format; build a draft with 'localmoe draft MODEL'."
        )
    bits, group_size = values.get("bits"), values.get("group_size")
    version = _VERSIONS.get(str(values.get("checkpoint_format", values.get("format", "gptq"))))
    if type(bits) is not int or bits not in BITS or values.get("sym") is not True or version is None:
        layout = values.get("checkpoint_format", values.get("format", "gptq"))
        raise DraftError(
            f"The draft in {folder} has {bits} bits (sym {values.get('sym')}, format {layout}) and this "
            f"version reads symmetric GPTQ of {', '.join(map(str, BITS))} bits in the formats gptq and "
            "gptq_v2: build one with 'localmoe draft MODEL'."
        )
    try:
        _check_stored_group(group_size)
    except ValueError as error:
        raise DraftError(
            f"The draft in {folder} cannot be used: {error}; build one with 'localmoe draft MODEL'."
        ) from None
    assert isinstance(group_size, int)
    return GptqLayout(bits, group_size, version, values.get("desc_act") is True)


def _quantization_values(folder: Path, config: Mapping[str, Any], ready_made: bool) -> dict[str, Any]:
    values = config.get("quantization_config")
    if values is None and ready_made and os.path.lexists(folder / QUANTIZE_CONFIG_FILE):
        try:
            values = read_json_object(checked_file(folder, QUANTIZE_CONFIG_FILE))
        except CheckpointError as error:
            raise DraftError(f"The draft in {folder} cannot be used: {error}") from None
        values = {"quant_method": "gptq", **values}
    return values if isinstance(values, dict) else {}


def _check_stored_group(group_size: object) -> None:
    """Raises ValueError: no group size of a GPTQ file that can be computed with."""
    if type(group_size) is not int:
        raise ValueError(f"group size {group_size} is no number")
    if group_size == _WHOLE_ROW:
        return
    check_group_size(group_size)
    if group_size > _LARGEST_GROUP and group_size % DEFAULT_GROUP_SIZE:
        raise ValueError(f"group size {group_size} is neither up to {_LARGEST_GROUP} nor a multiple of 128")
    if group_size > _WIDEST_ROW:
        raise ValueError(f"group size {group_size} is wider than any row: one scale a row is {_WHOLE_ROW}")
