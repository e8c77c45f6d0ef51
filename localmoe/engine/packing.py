"""Load a model whose experts are to be packed, or, where its weights do not allow it, the same in 16 bits.
Decides nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from localmoe.chat.prompt import Encoder
from localmoe.core.config import EngineConfig
from localmoe.core.types import ProgressCallback
from localmoe.engine.loading import EngineParts, assemble
from localmoe.engine.log_lines import log_unpackable
from localmoe.engine.planning import PreparedModel
from localmoe.kernels.bf12_tiles import UnpackableError


def load_parts(
    prepare: Callable[[EngineConfig], PreparedModel],
    config: EngineConfig,
    *,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> tuple[EngineParts, EngineConfig, Encoder]:
    """The parts, the configuration that they are of, and what encodes for them.

    Raises:
        LocalMoeError: as `prepare` and `assemble`.
    """
    prepared = prepare(config)
    encoder = prepared.source.encoder()
    try:
        return assemble(prepared, config, progress=progress, cancel=cancel), config, encoder
    except UnpackableError as error:
        log_unpackable(prepared.source.name, str(error))
        if error.lasting:
            prepared.source.never_pack()
    config = replace(config, pack_experts=False)
    return assemble(prepare(config), config, progress=progress, cancel=cancel), config, encoder
