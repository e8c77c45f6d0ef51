"""Which models' steps can run whole on a GPU, in localmoe's kernels, and which experts those of the CPU can
compute. Assembles nothing; see device_parts and in_place."""

from __future__ import annotations

import importlib.util

import torch

from localmoe.kernels.activations import detect_activation
from localmoe.model.head_widths import head_widths
from localmoe.model.recurrent_nets import keeps_known_state
from localmoe.model.skeleton import Skeleton, keeps_recurrent_state

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_GRANULE = 16  # both dimensions of an expert are multiples of it: a tensor-core tile's depth
_SOME_GATES = "its experts have a gate in some layers only"
_WIDEST_HEAD = 512  # kernels.gpu.attention.WIDEST_HEAD, which needs Triton to be imported


def why_not_on_device(skeleton: Skeleton, device: torch.device, dtype: torch.dtype) -> str:
    """Why a model's steps cannot run whole on the GPU; "" if they can."""
    if device.type != "cuda":
        return "there is no GPU"
    if dtype not in _KERNEL_DTYPES:
        return f"the kernels multiply 16-bit numbers, not {str(dtype).removeprefix('torch.')}"
    return why_no_kernels() or why_not_in_kernels(skeleton)


def why_no_kernels() -> str:
    """Why this installation has no kernels for a GPU; "" if it has."""
    return "" if importlib.util.find_spec("triton") is not None else "Triton is not installed"


def why_not_in_kernels(skeleton: Skeleton) -> str:
    """What of the architecture the kernels do not know; "" if they know all."""
    text = skeleton.text_config
    if not skeleton.can_rollback and not keeps_known_state(skeleton):
        recurrent = keeps_recurrent_state(text)
        return "it keeps recurrent state" if recurrent else "it keeps more than keys and values"
    if getattr(text, "attention_chunk_size", None):
        return "its attention is cut into chunks"
    widest = max(head_widths(skeleton))
    if widest > _WIDEST_HEAD:
        return f"its attention heads are {widest} wide"
    for experts in skeleton.experts:
        if any(size % _GRANULE for size in (*experts.layout.gate_up_shape, *experts.layout.down_shape)):
            return f"its experts are no multiples of {_GRANULE}"
    if _gates_differ(skeleton):
        return _SOME_GATES
    if detect_activation(skeleton.experts[0].module) is None:
        return "its experts' activation is not known"
    return ""


def why_not_in_place(skeleton: Skeleton) -> str:
    """What of the experts the CPU's kernels do not know; "" if they know all."""
    if _gates_differ(skeleton):
        return _SOME_GATES
    if len({experts.layout.hidden for experts in skeleton.experts}) > 1:
        return "layers differ in width"
    if detect_activation(skeleton.experts[0].module) is None:
        return "its experts' activation is not known"
    return ""


def _gates_differ(skeleton: Skeleton) -> bool:
    return len({experts.layout.gated for experts in skeleton.experts}) > 1
