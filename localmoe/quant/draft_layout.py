"""Which file format a draft's matrices have, by its provenance or its config. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localmoe.quant.draft_format import DraftProvenance
from localmoe.quant.gptq_layout import GptqLayout, read_layout
from localmoe.quant.matrix_layout import MatrixLayout
from localmoe.quant.nf4_layout import METHOD, Nf4Layout, read_nf4_layout


def layout_of(provenance: DraftProvenance) -> MatrixLayout:
    """The format of a draft that localmoe writes: bitsandbytes' for NF4, else GPTQ's."""
    if provenance.method == "nf4":
        assert (provenance.bits, provenance.group_size) == (4, Nf4Layout().group_size)
        return Nf4Layout(str(provenance.settings["dtype"]))
    return GptqLayout(provenance.bits, provenance.group_size)


def read_draft_layout(folder: Path, config: Mapping[str, Any], *, ready_made: bool = True) -> MatrixLayout:
    """What a draft's config says; see gptq_layout.read_layout for checkpoints without a quantization config.

    Raises:
        DraftError: the weights are in no format that this version reads.
    """
    values = config.get("quantization_config")
    if isinstance(values, dict) and values.get("quant_method") == METHOD:
        return read_nf4_layout(folder, values)
    return read_layout(folder, config, ready_made=ready_made)
