"""Load a model whose experts and output head are to be packed, or, where the weights of either do not allow
it, the same with those in 16 bits; and one whose MTP layer was to draft unasked and cannot be read, without.
Decides nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from localmoe.chat.prompt import Encoder
from localmoe.core.config import EngineConfig
from localmoe.core.types import ProgressCallback
from localmoe.engine.loading import EngineParts, assemble
from localmoe.engine.log_lines import log_no_layer, log_unpackable
from localmoe.engine.model_source import can_have
from localmoe.engine.mtp_drafts import UnaskedLayerError
from localmoe.engine.planning import PreparedModel
from localmoe.kernels.bf12_tiles import UnpackableError
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.packed_head import UnpackableHeadError


def load_parts(
    prepare: Callable[[EngineConfig], PreparedModel],
    config: EngineConfig,
    *,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> tuple[EngineParts, EngineConfig, Encoder]:
    """The parts, the configuration that they are of, and what encodes for them. What cannot be packed, or
    read, is found out while it is read; then the load begins again, with a plan that has room for it in 16
    bits, or that does without.

    Raises:
        LocalMoeError: as `prepare` and `assemble`.
    """
    prepared = prepare(config)
    while True:
        encoder = prepared.source.encoder(  # of the same files
            prepared.footprint.vocab_size, prepared.compute.device
        )
        try:
            return assemble(prepared, config, progress=progress, cancel=cancel), config, encoder
        except UnaskedLayerError as error:
            assert config.drafter == "auto", "it was asked for"
            log_no_layer(prepared.source.name, str(error))
            config = replace(config, drafter="self")
        except UnpackableError as error:
            config = _in_16_bits(prepared, config, error)
        prepared = prepare(config)


def _in_16_bits(prepared: PreparedModel, config: EngineConfig, error: UnpackableError) -> EngineConfig:
    """With which it is planned anew; the source remembers what it can."""
    assert config.pack_experts, "nothing was to be packed"
    source, skeleton = prepared.source, prepared.skeleton
    head = isinstance(error, UnpackableHeadError)
    form = WeightForm(prepared.footprint.expert_form)
    log_unpackable(source.name, str(error), head=head, form=form)
    if error.lasting:
        source.never_pack(head=head, form=form)
    may_still = source.can_pack_head(skeleton) if head else can_have(source, skeleton, form)
    return replace(config, pack_experts=False) if may_still else config
