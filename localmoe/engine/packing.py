"""Load a model whose experts and output head are to be packed, or, where the weights of either do not allow
it, the same with those in 16 bits. Decides nothing else."""

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
from localmoe.model.packed_head import UnpackableHeadError


def load_parts(
    prepare: Callable[[EngineConfig], PreparedModel],
    config: EngineConfig,
    *,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> tuple[EngineParts, EngineConfig, Encoder]:
    """The parts, the configuration that they are of, and what encodes for them. What cannot be packed is
    found out while it is read; then the load begins again, with a plan that has room for it in 16 bits.

    Raises:
        LocalMoeError: as `prepare` and `assemble`.
    """
    prepared = prepare(config)
    while True:
        encoder = prepared.source.encoder(prepared.footprint.vocab_size)  # of the same files
        try:
            return assemble(prepared, config, progress=progress, cancel=cancel), config, encoder
        except UnpackableError as error:
            assert config.pack_experts, "nothing was to be packed"
            source, skeleton = prepared.source, prepared.skeleton
            head = isinstance(error, UnpackableHeadError)
            log_unpackable(source.name, str(error), head=head)
            if error.lasting:
                source.never_pack(head=head)
        if source.can_pack_head(skeleton) if head else source.can_pack(skeleton):
            config = replace(config, pack_experts=False)  # it was not remembered
        prepared = prepare(config)
