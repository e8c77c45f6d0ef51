"""What decides which kernels a model's passes launch, as the name of a stamp in Triton's cache. Compiles
nothing."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from localmoe.core.draft_config import DraftForm
from localmoe.kernels.gpu.compiled_stamp import CompiledStamp
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.synthetic import SyntheticModel

# of a config: what names things, and what is read on the host only
_OF_NO_MATTER = ("architectures", "transformers_version", "id2label", "label2id", "use_cache")


def stamp_of(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    context: int,
    draft: DraftForm | None,
    form: WeightForm,
    lane: bool,
    synthetic: SyntheticModel | None,
    packed: int = 0,
    mtp: bool = False,
) -> CompiledStamp:
    """The stamp of a model's passes on a device.

    Args:
        config: of transformers.
        dtype: that passes compute in.
        context: positions of the cache.
        draft: form of the low-bit draft; None without one.
        form: of the experts' records.
        lane: whether the CPU computes experts.
        synthetic: routes in the routers' place, from tensors of other strides.
        packed: 1 where the output head is, 2 where it is the input embedding too.
        mtp: whether the model's MTP layer drafts.
    """
    text = config.get_text_config().to_dict()
    kind = {
        "config": {key: value for key, value in text.items() if _matters(key)},
        "transformers": transformers.__version__,
        "dtype": str(dtype),
        "context": context,
        "draft": None if draft is None else [draft.bits, draft.group_size, draft.codebook],
        "form": form.value,
        "lane": lane,
        "packed": packed,
        "mtp": mtp,
        "routed": synthetic is not None and synthetic.settings.routing is not None,
    }
    return CompiledStamp(kind, device)


def _matters(key: str) -> bool:
    return not key.startswith("_") and not key.endswith("_token_id") and key not in _OF_NO_MATTER


def form_of(draft: list[LowBitExperts] | None) -> DraftForm | None:
    """Of a loaded draft."""
    if not draft:
        return None
    return DraftForm(draft[0].bits, draft[0].group_size, draft[0].gate_up.codebooks is not None)
