"""Holds a draft against the 16-bit model that it is to draft for. Reads both, changes neither, and does not
judge how well the draft will do.

A draft that localmoe built says which weights it was made of. A ready-made checkpoint does not: its config is
compared with the model's, and a few of its experts with the model's own. That tells a quantisation of these
weights from one of unrelated weights; one of a close relative, as a base model is of its chat model, may
pass. Drafts only propose, so the answers are the target's all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localmoe.core.errors import DraftError
from localmoe.kernels.codes import CodeMatrix, dequantize
from localmoe.quant.builder import ExpertSource
from localmoe.quant.draft_checkpoint import DraftCheckpoint
from localmoe.quant.expert_names import ExpertNaming

# Correlation <W, Q> / (|W| |Q|) that a quantisation of the model's own weights has at least, by bits. The
# relative error would not tell: where inputs are strongly correlated, GPTQ in 2 bits moves weights by up to
# three times their norm. Measured over Gaussian to heavy-tailed weights, ill-conditioned inputs, groups of
# 128 to whole rows and both orders: at least 0.24, 0.37, 0.57, 0.99. Matrices of other experts or models: at
# most 0.03.
_LEAST_CORRELATION = {2: 0.15, 3: 0.25, 4: 0.4, 8: 0.9}
_SAMPLED_ROWS = 256  # of each matrix, evenly spread
_SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DraftBase:
    """The model that a draft is to draft for.

    Attributes:
        revision: of the Hub snapshot; "" if unknown.
        config: its config.json.
        experts: its 16-bit weights.
    """

    name: str
    fingerprint: str
    revision: str
    config: Mapping[str, Any]
    experts: ExpertSource


def check_draft(draft: DraftCheckpoint, base: DraftBase, naming: ExpertNaming) -> None:
    """Hold a draft against its model: by its provenance, or, without one, by configs and weights.

    Args:
        naming: of the experts in the draft.

    Raises:
        DraftError: it belongs to another model.
    """
    draft.check_base(base.fingerprint, base.name, base.revision)
    if draft.provenance is None:
        _check_config(draft, base)
        _check_weights(draft, base, naming)


def _check_config(draft: DraftCheckpoint, base: DraftBase) -> None:
    found, wanted = _text_part(draft.config), _text_part(base.config)
    names = ("model_type", *(name for name in _SIZES if name in wanted and name in found))
    wrong = [name for name in names if found.get(name) != wanted.get(name)]
    if wrong:
        differences = ", ".join(f"{name} {found.get(name)} instead of {wanted.get(name)}" for name in wrong)
        raise DraftError(
            f"The checkpoint in {draft.folder} is of another model than {base.name} ({differences}): choose "
            f"a GPTQ checkpoint of this model, or build a draft with 'localmoe draft {base.name}'."
        )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _check_weights(draft: DraftCheckpoint, base: DraftBase, naming: ExpertNaming) -> None:
    limit = _LEAST_CORRELATION[draft.bits]
    source = base.experts
    for layer in sorted({0, source.num_layers // 2, source.num_layers - 1}):
        decoder_layer = source.decoder_layer(layer)
        for expert in sorted({0, source.num_experts - 1}):
            weights = source.matrices(layer, expert)
            if len(weights) != len(naming.projections):
                raise DraftError(
                    f"The checkpoint in {draft.folder} is no quantisation of {base.name}: its experts have "
                    f"{len(naming.projections)} matrices each, the model's {len(weights)}; choose a GPTQ "
                    f"checkpoint of this model, or build a draft with 'localmoe draft {base.name}'."
                )
            for projection, weight in zip(naming.projections, weights, strict=True):
                shape = (weight.shape[0], weight.shape[1])
                matrix = draft.matrix(naming, decoder_layer, expert, projection, shape)
                found = correlation(matrix, weight)
                if not found >= limit:
                    name = naming.module(decoder_layer, expert, projection)
                    raise DraftError(
                        f"The checkpoint in {draft.folder} is no quantisation of {base.name}: its {name} has "
                        f"a correlation of {found:.2f} with the model's, where {draft.bits} bits have at "
                        f"least {limit}: choose a GPTQ checkpoint of this model, or build a draft with "
                        f"'localmoe draft {base.name}'."
                    )


def correlation(matrix: CodeMatrix, weight: Tensor) -> float:
    """<W, Q> / (|W| |Q|) over some rows of a 16-bit matrix (N, K) and its quantisation: 1 where both are 0,
    and 0 where one is."""
    step = max(1, weight.shape[0] // _SAMPLED_ROWS)
    codes, scales = matrix.codes[::step].contiguous(), matrix.scales[::step].contiguous()
    quantised = dequantize(replace(matrix, codes=codes, scales=scales), torch.float32).double()
    original = weight[::step].to("cpu", torch.float64)
    norms = float(quantised.norm()), float(original.norm())
    if 0 in norms:
        return float(norms == (0, 0))
    return float((quantised * original).sum()) / (norms[0] * norms[1])
