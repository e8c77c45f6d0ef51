"""The layer that a model was trained with to predict one token more (multi-token prediction, MTP): where its
tensors lie among a checkpoint's, which has it in one of two ways. Reads no weights.

DeepSeek-V3 and GLM have it as a decoder layer behind the last one, Qwen3-Next and Qwen3.5 under a name of its
own. transformers leaves it out when it loads a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from localmoe.hub.checkpoint import Checkpoint, TensorHeader

# of a weight in codes, too, as an index names it
_BEHIND = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(?=eh_proj\.(?:q?weight|weight_packed)$)")
_BESIDE = re.compile(r"^(?:.*\.)?(?=pre_fc_norm_hidden\.weight$)")
# what lies behind such a prefix, and what it is; what begins with none of these is the decoder layer's
_PARTS_BEHIND = {"enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj."}
_PARTS_BESIDE = {"pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "fc.": "eh_proj."}
_SHARED = ("shared_head.head.", "embed_tokens.")  # the model's own


@dataclass(frozen=True, slots=True)
class MtpPaths:
    """What a model of this one layer calls its parts.

    Attributes:
        fusion: the module that joins a hidden state and the embedding of the token after it.
        layer: the decoder layer.
        norm: behind it.
    """

    fusion: str
    layer: str
    norm: str


def mtp_tensors(checkpoint: Checkpoint, paths: MtpPaths) -> Checkpoint | None:
    """The checkpoint with the first such layer's tensors alone, named after `paths`; None if it has none."""
    found = dict(_renamed(checkpoint.tensors, paths))
    if not found:
        return None
    tensors = {name: replace(header, name=name) for name, header in found.items()}
    num_bytes = sum(header.num_bytes for header in tensors.values())
    return replace(checkpoint, tensors=MappingProxyType(tensors), total_bytes=num_bytes)


def has_mtp(names: Mapping[str, object]) -> bool:
    """Whether tensors of these names have such a layer."""
    return any(_BEHIND.match(name) or _BESIDE.match(name) for name in names)


def _renamed(tensors: Mapping[str, TensorHeader], paths: MtpPaths) -> Iterator[tuple[str, TensorHeader]]:
    behind = {int(match[1]): match[0] for name in tensors if (match := _BEHIND.match(name))}
    beside = sorted(match[0] for name in tensors if (match := _BESIDE.match(name)))
    if behind:
        prefix, parts, norm, block = behind[min(behind)], _PARTS_BEHIND, "shared_head.norm.", ""
    elif beside:
        prefix, parts, norm, block = beside[0], _PARTS_BESIDE, "norm.", "layers.0."
    else:
        return
    for name, header in tensors.items():
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        part = next((part for part in parts if rest.startswith(part)), None)
        if part is not None:
            yield f"{paths.fusion}.{parts[part]}{rest.removeprefix(part)}", header
        elif rest.startswith(norm):
            yield f"{paths.norm}.{rest.removeprefix(norm)}", header
        elif rest.startswith(block) and not rest.startswith(_SHARED):
            yield f"{paths.layer}.{rest.removeprefix(block)}", header
