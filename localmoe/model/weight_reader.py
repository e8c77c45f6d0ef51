"""Read tensors of safetensors files straight into memory that is already there, floats of eight and four bits
and integers of four as the 16-bit weights that they are with their scales. Does not decide where they belong.

Plain reads instead of a memory map: a map's pages would count as the process's memory beside the
destination, which would double the peak of a load.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch
from torch import Tensor

from localmoe.core.errors import CheckpointError
from localmoe.hub.checkpoint import TensorHeader
from localmoe.hub.file_version import FileVersion, open_again
from localmoe.hub.float8_tensors import POWERS
from localmoe.hub.safetensors_header import BlockScales, Packing
from localmoe.kernels.fp8_tiles import SCALE_COLUMNS
from localmoe.quant.float8 import decode_into
from localmoe.quant.int4 import Int4Rows, codes_of, zeros_of
from localmoe.quant.nvfp4 import unpack

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)  # fmt: skip
_SHORT_FLOATS = ("F8", "F6", "F4")  # that names of dtypes begin with
_DECODED = 1 << 20  # weights of eight or four bits at once: they stay in a core's cache


def stored_dtype(header: TensorHeader) -> torch.dtype:
    """The torch dtype of a stored tensor, as it is read.

    Raises:
        CheckpointError: localmoe does not read this dtype.
    """
    if header.scales is not None or header.integers is not None:
        return torch.bfloat16
    if header.dtype.startswith(_SHORT_FLOATS):
        raise CheckpointError(
            f"Tensor {header.name} in {header.file.name} has floats of few bits ({header.dtype}), and "
            "config.json does not say, or not in a way that is known, what scales them: use the original."
        )
    if header.dtype not in DTYPES:
        raise CheckpointError(
            f"Tensor {header.name} has dtype {header.dtype}: localmoe needs 16- or 32-bit weights."
        )
    return DTYPES[header.dtype]


def file_bytes(header: TensorHeader, elements: int) -> int:
    """That so many of a tensor's elements take in the file, without their scales.

    Raises:
        CheckpointError: localmoe does not read this dtype.
    """
    if is_four_bits(header) or header.integers is not None:
        return elements // 2
    return elements * (1 if header.scales is not None else stored_dtype(header).itemsize)


def is_four_bits(header: TensorHeader) -> bool:
    """Whether a tensor is in NVFP4."""
    return header.scales is not None and header.scales.factor is not None


def shares_columns(header: TensorHeader) -> bool:
    """Whether a tensor is one of eight-bit weights of which 128 columns side by side share a scale."""
    scales = header.scales
    return scales is not None and (scales.columns % SCALE_COLUMNS == 0 or scales.columns >= header.shape[-1])


def check_kind(header: TensorHeader, wanted: Tensor) -> None:
    """
    Raises:
        CheckpointError: whole numbers are stored where a model has floats.
    """
    if wanted.is_floating_point() and not stored_dtype(header).is_floating_point:
        raise CheckpointError(
            f"Tensor {header.name} in {header.file.name} holds whole numbers ({header.dtype}), where the "
            "model has floats: it is quantised in a way that its config does not say; use the original."
        )


def wrong_shape(what: str, found: Sequence[int], expected: Sequence[int]) -> CheckpointError:
    """What to raise of a tensor."""
    return CheckpointError(
        f"{what} has shape {list(found)}, the model expects {list(expected)}: config.json and weights do not "
        "belong together."
    )


def _in_order(header: TensorHeader, places: Tensor, group: int, groups: int) -> Tensor | None:
    """The group of each column; None if columns side by side have one, as they would without it."""
    if int(places.amin()) < 0 or int(places.amax()) >= groups:
        raise CheckpointError(
            f"Tensor {header.name} in {header.file.name} has columns in groups that have no scale: download "
            "the model again."
        )
    return None if torch.equal(places, torch.arange(len(places)) // group) else places


class WeightReader:
    """Keeps one file open at a time; a context manager, for one thread."""

    def __init__(self) -> None:
        self._held: tuple[Path, FileVersion] | None = None
        self._file: io.FileIO | None = None
        self._scales: tuple[BlockScales, Tensor] | None = None  # that were read last
        self._integers: tuple[TensorHeader, Int4Rows] | None = None  # likewise

    def read_part(self, header: TensorHeader, first_element: int, out: Tensor) -> None:
        """Fill a contiguous tensor of the dtype that is read with stored elements from `first_element` on.

        Raises:
            CheckpointError: the file is not the one of the header any more, ends early or cannot be read.
        """
        assert out.is_contiguous() and out.dtype == stored_dtype(header)
        if header.scales is None:
            if header.integers is None:
                self._read(header, first_element * out.element_size(), out)
            else:
                self._decode_integers(header, first_element, out.view(-1))
            return
        rows, columns = header.shape[-2:]
        block, flat = (header.scales.rows, header.scales.columns), out.view(-1)
        for start in range(0, len(flat), _DECODED):
            part, first = flat[start : start + _DECODED], first_element + start
            codes = torch.empty(file_bytes(header, len(part)), dtype=torch.uint8)
            self._read(header, file_bytes(header, first), codes)
            if is_four_bits(header):
                line, inside = divmod(first, columns)
                scales = self._scales_of_rows(header, line, -(-(inside + len(part)) // columns))
                decode_into(unpack(codes), scales, inside, columns, scales.shape[1], block, part)
            else:
                decode_into(codes, self._scales_of(header.scales), first, columns, rows, block, part)

    def read_codes(self, header: TensorHeader, first_element: int, out: Tensor) -> Tensor:
        """Fill uint8 (n,) with the codes of whole rows; float32 (n / C, G), the scales of each row's 128
        columns. header: shares_columns. Raises as read_part."""
        assert header.scales is not None, "of eight-bit weights"
        self._read(header, first_element, out)
        rows, columns = header.shape[-2:]
        first = first_element // columns
        lines = torch.arange(first, first + len(out) // columns)
        places = torch.arange(0, columns, SCALE_COLUMNS) // header.scales.columns
        scales = self._scales_of(header.scales)
        return scales[lines // rows, lines % rows // header.scales.rows][:, places]

    def read_fours(self, header: TensorHeader, first_element: int, out: Tensor) -> tuple[Tensor, float]:
        """Fill uint8 (n,) with the codes of whole rows of one matrix, two to a byte; uint8 (2 n / C, C / 16),
        their scales, and the matrix's. header: is_four_bits. Raises as read_part."""
        assert header.scales is not None and is_four_bits(header)
        self._read(header, file_bytes(header, first_element), out)
        rows, columns = header.shape[-2:]
        scales = torch.empty(2 * len(out) // columns, header.scales.grid[1], dtype=torch.uint8)
        self._read(header.scales.header, first_element // columns * header.scales.grid[1], scales)
        factors = self._factors_of(header.scales)
        factor = factors[first_element // (rows * columns) % len(factors)]
        return scales, float(1 / factor if header.scales.divides else factor)

    def read_integers(self, header: TensorHeader) -> Int4Rows:
        """All of a matrix of integers of four bits, which may lie so that no row is one piece. Raises as
        read_part."""
        packed, (rows, columns) = header.integers, header.shape
        assert packed is not None, "of integers"
        if self._integers is None or self._integers[0] != header:
            shape = {
                Packing.ROWS: (rows, columns // 8),
                Packing.COLUMNS: (columns // 8, rows),
                Packing.MIXED: (columns, rows // 8),
            }[packed.packing]
            words = torch.empty(shape, dtype=torch.int32)
            self._read(header, 0, words)
            stored, zeros, places = (
                None if one is None else self._whole(one)
                for one in (packed.scales, packed.zeros, packed.places)
            )
            assert stored is not None, "of integers"
            scales = (stored if packed.packing is Packing.ROWS else stored.T).float().contiguous()
            groups = scales.shape[1]
            if places is not None:
                places = _in_order(header, places.long(), packed.group, groups)
            found = Int4Rows(
                codes_of(words, packed.packing), scales,
                zeros_of(zeros, packed.packing, packed.more, rows, groups), packed.group, places,
            )  # fmt: skip
            self._integers = header, found
        return self._integers[1]

    def _decode_integers(self, header: TensorHeader, first: int, out: Tensor) -> None:
        """bfloat16 (n,) of the weights from `first` on."""
        columns = header.shape[1]
        rows, step = self.read_integers(header), max(1, _DECODED // columns) * columns
        end = first + len(out)
        for start in range(first // columns * columns, end, step):
            stop = min(start + step, -(-end // columns) * columns)
            weights = rows.some(start // columns, (stop - start) // columns).decode().view(-1)
            begin, until = max(start, first), min(stop, end)
            out[begin - first : until - first] = weights[begin - start : until - start]

    def _whole(self, header: TensorHeader) -> Tensor:
        out = torch.empty(header.shape, dtype=DTYPES[header.dtype])
        self._read(header, 0, out)
        return out

    def _scales_of_rows(self, header: TensorHeader, first: int, count: int) -> Tensor:
        """float32 (1, N, G) of N rows of four-bit weights, counted through all matrices; those of all experts
        together would take half of what codes do."""
        assert header.scales is not None, "of four-bit weights"
        stored = torch.empty(count, header.scales.grid[1], dtype=torch.uint8)
        self._read(header.scales.header, first * header.scales.grid[1], stored)
        factors = self._factors_of(header.scales)
        matrices = torch.arange(first, first + count) // header.shape[-2]
        each, found = factors[matrices % len(factors), None], stored.view(torch.float8_e4m3fn).float()
        return (found / each if header.scales.divides else found * each)[None]

    def _factors_of(self, scales: BlockScales) -> Tensor:
        """float32 (1,) or (M,): of the tensor or of each matrix, as it is stored."""
        assert scales.factor is not None, "of four-bit weights"
        stored = torch.empty(math.prod(scales.factor.shape), dtype=torch.float32)
        self._read(scales.factor, 0, stored)
        return stored

    def _scales_of(self, scales: BlockScales) -> Tensor:
        """float32 (M, R, C) of M matrices of eight-bit weights."""
        if self._scales is None or self._scales[0] != scales:
            powers = scales.header.dtype in POWERS
            dtype = torch.uint8 if powers else stored_dtype(scales.header)
            stored = torch.empty(scales.header.shape, dtype=dtype)
            self._read(scales.header, 0, stored)
            by_matrix = (stored.view(torch.float8_e8m0fnu) if powers else stored).float()
            self._scales = scales, by_matrix.view(-1, *scales.grid).contiguous()
        return self._scales[1]

    def _read(self, header: TensorHeader, first_byte: int, out: Tensor) -> None:
        """Bytes as they are stored."""
        file = self._open(header)
        target = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        try:
            file.seek(header.offset + first_byte)
            while done < len(target):
                count = file.readinto(target[done:])
                if not count:
                    raise CheckpointError(
                        f"Weight file {header.file} ends too early: download the model again."
                    )
                done += count
        except OSError as error:
            raise CheckpointError(f"Reading {header.file} failed: {error.strerror}.") from error

    def _open(self, header: TensorHeader) -> io.FileIO:
        wanted = header.file, header.version
        if self._file is None or self._held != wanted:
            self.close()
            try:
                self._file = open_again(*wanted)
            except OSError as error:
                raise CheckpointError(f"Opening {header.file} failed: {error.strerror}.") from error
            self._held = wanted
        return self._file

    def close(self) -> None:
        """Close the open file, if any."""
        if self._file is not None:
            self._file.close()
        self._held, self._file = None, None

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
