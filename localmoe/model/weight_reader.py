"""Read tensors of safetensors files straight into memory that is already there. Does not decide where they
belong.

Plain reads instead of a memory map: a map's pages would count as the process's memory beside the
destination, which would double the peak of a load.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch
from torch import Tensor

from localmoe.core.errors import CheckpointError
from localmoe.hub.checkpoint import TensorHeader
from localmoe.hub.file_version import FileVersion, open_again

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)  # fmt: skip


def stored_dtype(header: TensorHeader) -> torch.dtype:
    """The torch dtype of a stored tensor.

    Raises:
        CheckpointError: localmoe does not read this dtype.
    """
    if header.dtype not in DTYPES:
        raise CheckpointError(
            f"Tensor {header.name} has dtype {header.dtype}: localmoe needs 16- or 32-bit weights."
        )
    return DTYPES[header.dtype]


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


class WeightReader:
    """Keeps one file open at a time; a context manager, for one thread."""

    def __init__(self) -> None:
        self._held: tuple[Path, FileVersion] | None = None
        self._file: io.FileIO | None = None

    def read_part(self, header: TensorHeader, first_element: int, out: Tensor) -> None:
        """Fill a contiguous tensor of the stored dtype with stored elements from `first_element` on.

        Raises:
            CheckpointError: the file is not the one of the header any more, ends early or cannot be read.
        """
        assert out.is_contiguous() and out.dtype == stored_dtype(header)
        file = self._open(header)
        target = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        try:
            file.seek(header.offset + first_element * out.element_size())
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
