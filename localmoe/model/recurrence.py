"""Whether a model's recurrent layers go on from their state in passes of several tokens: some of
transformers' do so for single tokens alone and begin anew in longer passes. Runs none but to find out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.model.cached_pass import cached_pass
from localmoe.model.runner import RecurrentState
from localmoe.model.skeleton import Skeleton
from localmoe.model.takeover import take_over

_STATES = ("conv_states", "recurrent_states")  # what transformers' caches call them
_TOKENS = 4  # of a pass, from all over the vocabulary: some of its vectors may be zero


def recurrent_state(skeleton: Skeleton, device: torch.device) -> RecurrentState:
    """An empty state, which knows how the model reads it. The weights have to be there.

    Leaves the model's experts handed to a stand-in: take over again before use.
    """
    take_over(skeleton, [_stand_in] * len(skeleton.experts), attention=None)
    goes_on = all(_is_read(skeleton, device, name) for name in _STATES)
    return RecurrentState(skeleton.text_config, goes_on=goes_on)


@torch.inference_mode()
def _is_read(skeleton: Skeleton, device: torch.device, name: str) -> bool:
    """Whether a pass of several tokens gives something else after other states of this name, or there are
    none."""
    logits = []
    for value in (0.0, 1.0):
        state = RecurrentState(skeleton.text_config)
        _pass(skeleton, state, device)
        held = [tensors for layer in state.layers if (tensors := getattr(layer, name, None))]
        found = [tensor for tensors in held for tensor in tensors.values() if tensor is not None]
        if not found:
            return True
        for tensor in found:
            tensor.fill_(value)
        logits.append(_pass(skeleton, state, device))
    return not torch.equal(*logits)


def _pass(skeleton: Skeleton, state: RecurrentState, device: torch.device) -> Tensor:
    places = torch.arange(_TOKENS, device=device)[None]
    tokens = (2 * places + 1) * int(skeleton.text_config.vocab_size) // (2 * _TOKENS)
    return cached_pass(skeleton.model, tokens, state.length + places, state)


def _stand_in(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return torch.zeros_like(hidden)
