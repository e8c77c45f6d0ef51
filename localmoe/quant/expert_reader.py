"""Reads the quantised matrices of single experts from a checkpoint's files. Does not decide which checkpoint,
nor whether it belongs to the model."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import CheckpointError, DraftError
from localmoe.hub.file_version import FileVersion, open_again
from localmoe.hub.safetensors_header import TensorHeader
from localmoe.kernels.codes import CodeMatrix
from localmoe.quant.expert_names import ExpertNaming, Projection
from localmoe.quant.matrix_layout import MatrixLayout, Part

ExpertMatrices = tuple[CodeMatrix, ...]  # gate, if there is one, up and down
_DTYPE_NAMES = {torch.int32: "I32", torch.float16: "F16", torch.uint8: "U8", torch.float32: "F32"}
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_DOWNLOAD_ADVICE = re.compile(r"[;:,] (download|get|give|remove) [^;:]*$")  # wrong for a draft made here


def damaged(folder: Path, what: str) -> DraftError:
    """The error of a draft that is not whole."""
    what = _DOWNLOAD_ADVICE.sub("", what.rstrip("."))
    return DraftError(
        f"The draft in {folder} is damaged ({what}): build it again with 'localmoe draft MODEL'."
    )


@dataclass(frozen=True, slots=True)
class ExpertReader:
    """The experts among a checkpoint's tensors.

    Attributes:
        folder: for errors.
        tensors: headers by name; names that are not asked for play no part.
    """

    folder: Path
    tensors: Mapping[str, TensorHeader]
    layout: MatrixLayout
    naming: ExpertNaming

    @property
    def form(self) -> DraftForm:
        """What experts take in memory."""
        return DraftForm(self.layout.bits, self.layout.group_size, self.layout.codebook)

    @property
    def act_order(self) -> bool:
        """Whether columns may be in an order of their own."""
        return self.layout.act_order

    def matrix(
        self, decoder_layer: int, expert: int, projection: Projection, shape: tuple[int, int]
    ) -> CodeMatrix:
        """One matrix of `shape` (N, K), in memory of its own.

        Raises:
            DraftError: a tensor is missing, damaged, or of another shape, or the matrix has a bias.
        """
        with OpenFile(self.folder) as file:
            return self._matrix(file, self.naming.module(decoder_layer, expert, projection), shape)

    def layer(
        self,
        decoder_layer: int,
        num_experts: int,
        up_shape: tuple[int, int],
        device: torch.device | None = None,
    ) -> Iterator[ExpertMatrices]:
        """gate, if the naming has one, and up of `up_shape` (I, H), and down (H, I), of each expert of one
        layer in turn; each file is opened once and, as experts lie in order, read from one end to the other.

        Args:
            device: where codes are unpacked, which takes longer than to read them; None: on the CPU. There
                they take a byte each. All else is on the CPU.

        Raises:
            DraftError: as `matrix`.
        """
        projections = self.naming.projections
        shapes = *[up_shape] * (len(projections) - 1), up_shape[::-1]
        with OpenFile(self.folder) as file:
            for expert in range(num_experts):
                modules = [self.naming.module(decoder_layer, expert, name) for name in projections]
                yield self._matrices(file, modules, shapes, device)  # and keep none of them meanwhile

    def _matrices(
        self,
        file: OpenFile,
        modules: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        device: torch.device | None,
    ) -> ExpertMatrices:
        return tuple(
            self._matrix(file, module, shape, device) for module, shape in zip(modules, shapes, strict=True)
        )

    def _matrix(
        self, file: OpenFile, module: str, shape: tuple[int, int], device: torch.device | None = None
    ) -> CodeMatrix:
        parts = self.layout.parts(*shape)
        headers = {name: self._header(f"{module}.{name}", part) for name, part in parts.items()}
        found = {
            name: torch.frombuffer(file.read(header), dtype=parts[name][0]).reshape(header.shape)
            for name, header in headers.items()
        }
        self._check_bias(file, f"{module}.bias")
        if device is not None:
            found[self.layout.code_part] = found[self.layout.code_part].to(device)
        try:
            return self.layout.unpack(found, shape)
        except ValueError as error:
            raise DraftError(
                f"The draft in {self.folder} cannot be used: of its matrix {module}, {error}; build one with "
                "'localmoe draft MODEL'."
            ) from None

    def _header(self, name: str, part: Part) -> TensorHeader:
        header = self.tensors.get(name)
        if header is None:
            raise damaged(self.folder, f"it has no tensor {name}, so it is incomplete or of another model")
        dtype, shape = _DTYPE_NAMES[part[0]], part[1]
        fits = len(header.shape) == len(shape) and all(
            wanted in (-1, found) for wanted, found in zip(shape, header.shape, strict=True)
        )
        if not fits or header.dtype != dtype or header.num_bytes == 0:
            raise DraftError(
                f"The draft in {self.folder} does not fit the model: tensor {name} is {header.dtype} "
                f"{list(header.shape)} and should be {dtype} {list(shape)}; build it again with 'localmoe "
                "draft MODEL'."
            )
        return header

    def _check_bias(self, file: OpenFile, name: str) -> None:
        """Some exporters write a bias of zeros beside every matrix; any other would be lost."""
        header = self.tensors.get(name)
        if header is None or header.num_bytes == 0:
            return
        dtype = _FLOATS.get(header.dtype)
        values: Tensor | None = None if dtype is None else torch.frombuffer(file.read(header), dtype=dtype)
        if values is None or bool(values.any()):
            raise DraftError(
                f"The draft in {self.folder} cannot be used: its tensor {name} ({header.dtype}) is not all "
                "zeros, and experts of a draft have no bias of their own; build one with 'localmoe draft "
                "MODEL'."
            )


class OpenFile:
    """Keeps one file open at a time. Plain reads, so that no mapping keeps the file's pages resident."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: tuple[Path, FileVersion] | None = None
        self._stream: io.FileIO | None = None

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, header: TensorHeader) -> bytearray:
        """The tensor's bytes.

        Raises:
            DraftError: the file is not the one of the header any more, cannot be read, or ends early.
        """
        data = bytearray(header.num_bytes)
        view, count = memoryview(data), 0
        try:
            stream = self._open(header)
            stream.seek(header.offset)
            while count < len(data) and (read := stream.readinto(view[count:])):
                count += read
        except CheckpointError:
            raise DraftError(
                f"The draft's file {header.file} has changed since it was opened: load the draft again."
            ) from None
        except OSError as error:
            raise DraftError(
                f"The draft's file {header.file} cannot be read: {error.strerror or error}."
            ) from error
        if count < len(data):
            raise damaged(self._folder, f"{header.file.name} has become shorter since it was opened")
        return data

    def _open(self, header: TensorHeader) -> io.FileIO:
        wanted = header.file, header.version
        if self._stream is None or self._held != wanted:
            self._close()
            self._stream, self._held = open_again(*wanted), wanted
        return self._stream

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None
