"""Rotary embeddings of a transformers model. Some depend on how long the text is (longrope, dynamic scaling):
for an engine they are those of its context, for every token alike, since a pass sees a part of a text only.
Up to the length that a model was trained with, that is what transformers computes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


def rotary_embeddings(model: nn.Module) -> Iterator[Any]:
    """The modules that give angles for positions."""
    return (module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding"))


def angles_per_token(model: nn.Module) -> int:
    """Numbers of 16 bits, or half as many of 32, in the tables of `tabulate`: cosine and sine, each for both
    halves of what is turned."""
    buffers = (item for module in rotary_embeddings(model) for item in module.named_buffers(recurse=False))
    return sum(
        4 * buffer.numel() for name, buffer in buffers if name.endswith("inv_freq") and "original" not in name
    )


def trained_context(model: nn.Module) -> int:
    """Tokens up to which angles that depend on the length are those that the model was trained with; 0: none
    do. With a longer context short texts have other angles too."""
    lengths = []
    for module in filter(_depends_on_length, rotary_embeddings(model)):
        given = dict(module.config.rope_parameters)
        kinds = [given, *(kind for kind in given.values() if isinstance(kind, dict))]
        named = [kind.get("original_max_position_embeddings") for kind in kinds]
        lengths.append(min(filter(None, named), default=module.config.max_position_embeddings))
    return int(min(lengths, default=0))


def freeze_length(model: nn.Module, context: int) -> None:
    """Where angles depend on the length of the text, let it be that of the context. The model has to have its
    buffers."""
    for module in rotary_embeddings(model):
        if _depends_on_length(module):
            module.forward = partial(_as_long_as, module.forward, context)


def tabulate(module: nn.Module, context: int, dtype: torch.dtype) -> None:
    """The same by angles of all positions, which are computed once."""
    module.forward = TabulatedAngles(module, context, dtype)


def tabulate_all(model: nn.Module, context: int, dtype: torch.dtype) -> None:
    """Likewise for all that a model has."""
    for module in rotary_embeddings(model):
        tabulate(module, context, dtype)


def place_angles(model: nn.Module, coordinates: NDArray[np.int64] | None) -> None:
    """Turn the tokens of the text that passes are of next by these places, where embeddings are tabulated and
    know more than one (M-RoPE): int64 (3, T) of its first tokens; behind them all three count on. None: each
    token by its place in the text."""
    for module in rotary_embeddings(model):
        if isinstance(module.forward, TabulatedAngles):
            module.forward.place(coordinates)


class TabulatedAngles:
    """The forward of a rotary embedding."""

    def __init__(self, module: nn.Module, context: int, dtype: torch.dtype) -> None:
        """context: positions. dtype: of the tables."""
        self._on_host: Any = copy.deepcopy(module).cpu()  # as of routers
        self._context, self._dtype = context, dtype
        self._tables: dict[tuple[Any, ...], Any] = {}
        self._asked: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # what each is of besides
        self._places = torch.arange(context)
        self._first_moved = context  # from there on a text's tokens are turned by other places than their own

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        coordinates = position_ids.shape[:-1]  # of a place, and the batch; those of a pass are all alike
        key = (x.device, coordinates, *args, *sorted(kwargs.items()))
        if key not in self._tables:
            self._asked[key] = args, kwargs
            found = self._computed(key, 0)
            self._tables[key] = _each(found, lambda part: part.to(x.device))
        places = position_ids.reshape(-1, position_ids.shape[-1])[0]
        return _each(self._tables[key], lambda part: part.index_select(1, places))

    @torch.inference_mode()
    def place(self, coordinates: NDArray[np.int64] | None) -> None:
        """See place_angles. Tables change where they lie: captured passes read them there."""
        places, first = torch.arange(self._context), self._context
        if coordinates is not None:
            count = min(coordinates.shape[1], self._context)
            behind = int(coordinates.max()) + 1 + torch.arange(self._context - count)
            known = torch.from_numpy(coordinates[:, :count])
            moved = torch.cat((known, behind.expand(len(known), -1)), dim=1)
            others = (moved != places).any(dim=0).nonzero()
            places, first = moved, int(others[0]) if len(others) else self._context
        changed = min(first, self._first_moved)
        self._places, self._first_moved = places, first
        if changed == self._context:
            return
        for key, tables in self._tables.items():
            if len(key[1]) > 1:
                for table, rows in zip(_parts(tables), _parts(self._computed(key, changed)), strict=True):
                    table[:, changed:].copy_(rows)

    def _computed(self, key: tuple[Any, ...], first: int) -> Any:
        """Angles of all tokens from `first` on, on the host."""
        coordinates: tuple[int, ...] = key[1]
        places = self._places[..., first:]
        if len(coordinates) == 1 and places.dim() > 1:  # it knows one place of each token
            places = torch.arange(first, self._context)
        elif places.dim() > 1:
            assert coordinates[0] == len(places), f"{coordinates} coordinates"
            places = places[:, None]
        args, kwargs = self._asked[key]
        shape = (*coordinates, self._context - first)
        return self._on_host(torch.empty(0, dtype=self._dtype), places.expand(shape), *args, **kwargs)


@contextmanager
def measured_on_host(model: nn.Module) -> Iterator[None]:
    """Within, passes of a model without weights get angles from embeddings that have numbers: some look at
    the positions that they are given."""
    changed = []
    try:
        for module in rotary_embeddings(model):
            if _depends_on_length(module):
                with torch.device("cpu"):
                    real = type(module)(module.config)
                module.forward = partial(_without_numbers, real)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _as_long_as(
    forward: Any, context: int, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    last = position_ids.new_full((*position_ids.shape[:-1], 1), context - 1)
    found = forward(x, torch.cat((position_ids, last), dim=-1), *args, **kwargs)
    return _each(found, lambda part: part[:, :-1])


def _without_numbers(real: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    places = torch.zeros(position_ids.shape, dtype=position_ids.dtype)
    found = real(torch.empty(0, dtype=x.dtype), places, *args, **kwargs)
    return _each(found, lambda part: part.to(x.device))


def _each(found: Any, change: Any) -> Any:
    """Of one tensor or of several."""
    return tuple(map(change, found)) if isinstance(found, tuple) else change(found)


def _parts(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _depends_on_length(module: Any) -> bool:
    """Of a module that has one type, or one for each kind of layer."""
    kinds = getattr(module, "rope_type", None) or "default"
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)
