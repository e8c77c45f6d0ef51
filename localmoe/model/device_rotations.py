"""Rotary embeddings of queries and keys, as attention modules look them up by name: each is replaced by the
first form of the kernel that gives what it gives on a trial. Knows no architecture by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from localmoe.kernels.gpu.rope import RopeForm, apply_rope, rotate
from localmoe.model.device_trials import TRIAL_ROWS, Trial, all_close, close, random_like
from localmoe.model.rebound import looked_up, rebind

_FORMS: tuple[RopeForm, ...] = get_args(RopeForm)
_BY_ANGLES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
_BY_COMPLEX = "apply_rotary_emb"


def rope_trials(module: Any) -> list[Trial]:
    """Of an attention module, for each rotation that its forward looks up; it finds the kernel there. Some
    rotate queries and keys together, some one after the other."""
    dim = getattr(module, "qk_rope_head_dim", None) or getattr(module, "head_dim", None)
    like = next(module.parameters(recurse=True), None)
    if not isinstance(dim, int) or like is None or like.is_meta:
        return []
    found = []
    for name in (*_BY_ANGLES, _BY_COMPLEX):
        original = looked_up(module, name)
        try:
            trial = None if original is None else _trial(original, dim, like, name == _BY_COMPLEX)
        except (RuntimeError, TypeError, IndexError):  # a rotation of another form, e.g. of part of a head
            continue
        if trial is not None:
            found.append(Trial(*trial, partial(_adopt, module, name)))
    return found


def _trial(original: Any, dim: int, like: Tensor, is_complex: bool) -> tuple[Any, Any, Any] | None:
    """Kernels, run and agrees of a Trial."""
    q, k = (random_like((1, heads, TRIAL_ROWS, dim), like) for heads in (3, 2))
    cos, sin = random_like((1, TRIAL_ROWS, dim), like), random_like((1, TRIAL_ROWS, dim), like).flip(1)
    if is_complex:
        turns = torch.complex(cos[..., : dim // 2].float(), sin[..., : dim // 2].float())
        wanted = original(q, k, turns)
        by_complex = [partial(_rope_by_complex, form=form) for form in _FORMS[:0:-1]]
        return by_complex, lambda kernel: kernel(q, k, turns), partial(all_close, wanted=wanted)
    if next(iter(inspect.signature(original).parameters)) == "x":
        turned = original(q, cos, sin)
        of_one = [partial(_rope_of_one, original, form=form) for form in _FORMS]
        return of_one, lambda kernel: kernel(q, cos, sin), partial(close, wanted=turned)
    wanted = original(q, k, cos, sin)
    kernels = [partial(_rope, original, form=form) for form in _FORMS]
    return kernels, lambda kernel: kernel(q, k, cos, sin), partial(all_close, wanted=wanted)


def _adopt(module: Any, name: str, kernel: Callable[..., Any]) -> None:
    rebind(module, name, kernel)


def _rope(
    original: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    form: RopeForm,
) -> tuple[Tensor, Tensor]:
    assert unsqueeze_dim == 1, "heads come before tokens"
    if cos.dtype != q.dtype:  # a model that rotates in 32 bits, which nothing told while it was tried
        return original(q, k, cos, sin)
    return apply_rope(q, k, cos, sin, form)


def _rope_of_one(
    original: Callable[..., Tensor],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    form: RopeForm,
) -> Tensor:
    if cos.dtype != x.dtype:
        return original(x, cos, sin, unsqueeze_dim)
    if unsqueeze_dim == 1:
        return rotate(x, cos, sin, form)
    assert unsqueeze_dim == 2, "heads come before tokens, or behind"
    return rotate(x.transpose(1, 2), cos, sin, form).transpose(1, 2)


def _rope_by_complex(q: Tensor, k: Tensor, turns: Tensor, *, form: RopeForm) -> tuple[Tensor, Tensor]:
    cos, sin = torch.view_as_real(turns).unbind(-1)
    return apply_rope(q, k, cos, sin, form)
