"""Routing of a real model, token by token, in a checked file. Neither records (model.routing_trace) nor
routes.

The file is an .npz: "experts" int16 (tokens, L, K), "starts" int64 (prompts,): the row at which each prompt's
tokens begin, and "header", a JSON text with format, version, model, number of experts. A prompt's rows are
its own tokens and its answer's but the last, which the target never reads.
"""

from __future__ import annotations

import errno
import io
import json
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localmoe.core.bounded_file import read_bounded
from localmoe.core.errors import ConfigError
from localmoe.core.output_file import write_output
from localmoe.core.units import format_bytes

MOST_BYTES = 4 << 30  # packed or not: days of answers
FORMAT, VERSION = "localmoe-routing-trace", 1
TRACE = "The trace"  # to people
_NO_TRACE = (
    ValueError, KeyError, EOFError, TypeError, AttributeError, RecursionError, NotImplementedError,
    RuntimeError, MemoryError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """What was recorded.

    Attributes:
        model: its name.
        num_experts: E.
        experts: int16 (tokens, L, K).
        starts: int64 (prompts,), ascending, from 0.
    """

    model: str
    num_experts: int
    experts: NDArray[np.int16]
    starts: NDArray[np.int64]

    def check_fits(self, num_layers: int, num_experts: int, experts_per_token: int) -> None:
        """See that a model of this shape can be routed so.

        Raises:
            ConfigError: it cannot.
        """
        _, layers, top_k = self.experts.shape
        if (layers, self.num_experts, top_k) != (num_layers, num_experts, experts_per_token):
            raise ConfigError(
                f"The trace is of {self.model} with {layers} MoE layers of {self.num_experts} experts, "
                f"{top_k} a token, but this model has {num_layers} layers of {num_experts} experts, "
                f"{experts_per_token} a token: record a trace of a model of this shape."
            )

    def rows(self, prompt: int, start: int, count: int) -> NDArray[np.int64]:
        """(count, L, K): rows from `start` after the beginning of prompt `prompt`, both taken around the
        end."""
        first = int(self.starts[prompt % len(self.starts)]) + start
        return self.experts[np.arange(first, first + count) % len(self.experts)].astype(np.int64)

    def repeat_share(self) -> float | None:
        """Mean share of a (token, layer)'s experts that the token before used too, within prompts; None if
        no prompt has two tokens. It is the P of sticky routing."""
        later = np.ones(len(self.experts), bool)
        later[self.starts] = False
        rows = later.nonzero()[0]
        if not len(rows):
            return None
        # by token, so that no (tokens, L, K, K) comes to be
        top_k = self.experts.shape[2]
        repeated = sum(
            int((self.experts[rows, :, k, None] == self.experts[rows - 1]).any(-1).sum())
            for k in range(top_k)
        )
        return repeated / self.experts[rows].size

    def write(self, path: Path) -> None:
        """Save under this very name; a file of that name is replaced once the new one is complete.

        Raises:
            ConfigError: it cannot be written.
        """
        header = json.dumps(
            {"format": FORMAT, "version": VERSION, "model": self.model, "num_experts": self.num_experts}
        )
        buffer = io.BytesIO()
        np.savez_compressed(buffer, header=np.array(header), experts=self.experts, starts=self.starts)
        write_output(TRACE, path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path) -> RoutingTrace:
        """Load and check a trace.

        Raises:
            ConfigError: the file is not there, no trace, damaged, or of another version.
        """
        try:
            data = read_bounded(path, MOST_BYTES, begins=b"PK")
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                if sum(part.file_size for part in file.zip.infolist()) > MOST_BYTES:
                    raise OSError(errno.EFBIG, f"it unpacks to more than {format_bytes(MOST_BYTES)}")
                header = json.loads(str(file["header"]))
                arrays = file["experts"], file["starts"]
        except OSError as error:
            raise ConfigError(f"The trace {path} cannot be read: {error.strerror or error}.") from error
        except _NO_TRACE as error:
            raise ConfigError(
                f"{path} is no routing trace, or is damaged: record it again with localmoe trace."
            ) from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ConfigError(f"{path} is no routing trace: record one with localmoe trace.")
        if header.get("version") != VERSION:
            raise ConfigError(
                f"The trace {path} has version {header.get('version')}, and this localmoe reads version "
                f"{VERSION}: record it again."
            )
        num_experts = header.get("num_experts")
        trace = cls(str(header.get("model")), num_experts if isinstance(num_experts, int) else 0, *arrays)
        trace._check(path)
        return trace

    def _check(self, path: Path) -> None:
        experts, starts = self.experts, self.starts
        sound = (
            experts.dtype == np.int16
            and experts.ndim == 3
            and experts.size > 0
            and starts.dtype == np.int64
            and starts.ndim == 1
            and len(starts) > 0
            and starts[0] == 0
            and bool((np.diff(starts) > 0).all())
            and starts[-1] < len(experts)
            and bool(((experts >= 0) & (experts < self.num_experts)).all())
            and bool((np.diff(np.sort(experts, axis=-1), axis=-1) > 0).all())
        )
        if not sound:
            raise ConfigError(f"The trace {path} contradicts itself: record it again with localmoe trace.")
