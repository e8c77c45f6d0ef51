"""Reads and checks the header of one safetensors file, trusting nothing in it. Loads no weights and does
not decide which files make up a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from localmoe.core.errors import CheckpointError
from localmoe.hub.file_version import FileVersion

PREFIX_BYTES = 8  # header length, unsigned little-endian
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 64  # torch's own limit
MAX_NAME = 1000  # characters: patterns look for a tensor's place, and take the square of its name's length
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_AGAIN = "download the file again"


@dataclass(frozen=True, slots=True)
class BlockScales:
    """What weights of eight or four bits are multiplied with: a number for each `rows` x `columns` of their
    last two dimensions, `grid` of them for a matrix; and, of those of four bits, `factor`, one for the tensor
    or each matrix, or what it is divided by (`divides`)."""

    header: TensorHeader
    rows: int
    columns: int
    grid: tuple[int, int]
    factor: TensorHeader | None = None
    divides: bool = False


class Packing(Enum):
    """How integers of four bits lie in words of 32, eight each, from the lowest bits on. ROWS: (R, C / 8),
    neighbours of a row ("compressed-tensors"). COLUMNS: (C / 8, R), the same transposed (GPTQ). MIXED:
    (C, R / 8), of eight neighbours of a column those of even number first (AWQ)."""

    ROWS = "rows"
    COLUMNS = "columns"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class IntegerGroups:
    """What makes weights (R, C) of integers of four bits: an integer less its zero point, times its scale,
    both of `group` columns of a row, of the last ones perhaps fewer (hub.int4_tensors).

    Attributes:
        scales: (R, G), but of packings other than ROWS (G, R).
        zeros: the same of zero points, packed along R, or as signed bytes that are 8 less; None: 8 each.
        more: by which stored zero points are less than they are.
        places: (C,), the group of each column; None: `group` columns side by side have one.
    """

    packing: Packing
    group: int
    scales: TensorHeader
    zeros: TensorHeader | None
    more: int
    places: TensorHeader | None


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a weight file. `dtype` is the format's name ("BF16"); `offset` is where its
    `num_bytes` bytes begin, counted from the start of the file, which they are read from if it is still of
    `version`. scales: of floats of eight or four bits, without which they say nothing
    (hub.float8_tensors, nvfp4_tensors). integers: the same of integers of four bits (int4_tensors)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int
    version: FileVersion
    scales: BlockScales | None = None
    integers: IntegerGroups | None = None


@dataclass(frozen=True, slots=True)
class FileHeader:
    """One checked file: `data_start` is the first byte after the header; `version` what the file was then."""

    file: Path
    data_start: int
    version: FileVersion
    tensors: tuple[TensorHeader, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.version.num_bytes


def shown(name: str) -> str:
    """A name from a file, quoted, without control characters and not longer than a line."""
    return repr(name if len(name) <= 100 else name[:97] + "...")


def read_file_header(file: Path) -> FileHeader:
    """The checked header of a safetensors file: every byte of the file belongs to exactly one tensor.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header is not valid.
    """
    try:
        with file.open("rb") as stream:
            version = FileVersion.of(stream.fileno())
            raw = _read_raw_header(file, stream, version.num_bytes)
    except OSError as error:
        raise CheckpointError(f"Weight file {file} cannot be read: {error.strerror or error}.") from error
    data_start = PREFIX_BYTES + len(raw)
    entries = _parse_entries(file, raw)
    tensors = tuple(_parse_tensor(file, name, entry, data_start, version) for name, entry in entries.items())
    _check_coverage(file, tensors, data_start, version.num_bytes)
    return FileHeader(file, data_start, version, tensors)


def _fail(file: Path, what: str) -> NoReturn:
    raise CheckpointError(f"Weight file {file} is damaged: {what}; {_AGAIN}.")


def _read_raw_header(file: Path, stream: BinaryIO, file_bytes: int) -> bytes:
    prefix = stream.read(PREFIX_BYTES)
    if prefix == b"version ":  # "version https://git-lfs.github.com/spec/v1"
        raise CheckpointError(
            f"Weight file {file} is a Git LFS pointer of {file_bytes} bytes, not the weights: "
            "run 'git lfs pull' in its folder."
        )
    if len(prefix) < PREFIX_BYTES:
        _fail(file, f"at least {PREFIX_BYTES} bytes expected, {file_bytes} found")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        _fail(file, f"its header claims {length} bytes, and the format allows {MAX_HEADER_BYTES}")
    if PREFIX_BYTES + length > file_bytes:
        _fail(file, f"at least {PREFIX_BYTES + length} bytes expected, {file_bytes} found")
    raw = stream.read(length)
    if len(raw) != length:
        _fail(file, f"{length} header bytes expected, {len(raw)} found")
    return raw


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice")
    return unique


def _parse_entries(file: Path, raw: bytes) -> dict[str, Any]:
    """Name -> entry, without the metadata."""
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        _fail(file, f"its header is not valid JSON ({str(error)[:100]})")
    if not isinstance(entries, dict) or not raw.startswith(b"{"):
        _fail(file, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        _fail(file, "its metadata is not a map of texts")
    return entries


def _parse_tensor(
    file: Path, name: str, entry: object, data_start: int, version: FileVersion
) -> TensorHeader:
    if len(name) > MAX_NAME:
        _fail(file, f"the name of tensor {shown(name)} has {len(name)} characters, more than {MAX_NAME}")
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        _fail(file, f"tensor {shown(name)} lacks its dtype, shape or data offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise CheckpointError(
            f"Weight file {file}: tensor {shown(name)} has the unknown dtype {shown(str(dtype))}."
        )
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        _fail(file, f"the shape of tensor {shown(name)} is not a short list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(file, f"the data offsets of tensor {shown(name)} are not a range")
    total_bits = bits
    for size in shape:
        total_bits *= size
    num_bytes = offsets[1] - offsets[0]
    if total_bits != num_bytes * 8:
        needed = (total_bits + 7) // 8
        _fail(file, f"tensor {shown(name)} needs {needed} bytes by its shape, {num_bytes} by its offsets")
    return TensorHeader(name, file, dtype, tuple(shape), num_bytes, data_start + offsets[0], version)


def _are_counts(values: object) -> bool:
    """Whether this is a list of integers of 0..2^63-1 (a bool is none)."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_coverage(file: Path, tensors: Sequence[TensorHeader], data_start: int, file_bytes: int) -> None:
    """The tensors lie end to end, without gap or overlap, from the header to the end of the file."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != position:
            relation = "overlaps another tensor" if tensor.offset < position else "leaves a gap before it"
            _fail(file, f"tensor {shown(tensor.name)} {relation}")
        position += tensor.num_bytes
    if position > file_bytes:
        raise CheckpointError(
            f"Weight file {file} is truncated: {position} bytes expected, {file_bytes} found; {_AGAIN}."
        )
    if position < file_bytes:
        _fail(file, f"{position} bytes expected, {file_bytes} found")
