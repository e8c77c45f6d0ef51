"""Which weights of a model are one where its files say otherwise than its config: what transformers'
from_pretrained makes of them, told before anything is loaded. Loads no weights.

Two tensors with different values are not tied, whatever the config says; where the one that others are tied
to is missing, they are tied to the one that is there.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from localmoe.hub.checkpoint import Checkpoint, TensorHeader
from localmoe.model.materialise import float32_names
from localmoe.model.weight_reader import WeightReader, stored_dtype

_COMPARED = 4 << 20  # elements read at once


def tied_weights(model: Any) -> dict[str, str]:
    """Name of a weight -> name of the one that it is."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def input_embedding(model: Any) -> nn.Module | None:
    """None where transformers does not know which it is."""
    try:
        found: nn.Module = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def path_of_own_weight(model: Any, module: nn.Module) -> str | None:
    """Path of a module whose weight nothing else uses and the architecture does not keep in float32; None for
    any other."""
    paths = _paths_of_one_weight(model, module)
    return None if paths is None else paths[0]


def paths_of_pair(model: Any, module: nn.Module, other: nn.Module) -> tuple[str, str] | None:
    """Paths of two modules that are tied, likewise."""
    paths = _paths_of_one_weight(model, module, other)
    return None if paths is None else (paths[0], paths[1])


def _paths_of_one_weight(model: Any, *modules: nn.Module) -> list[str] | None:
    """Of modules that share a weight which nothing else uses and which may have 16 bits."""
    names = {id(module): name for name, module in model.named_modules()}
    if not all(id(module) in names for module in modules):
        return None
    paths = [names[id(module)] for module in modules]
    keys, float32 = {f"{path}.weight" for path in paths}, float32_names(model)
    ties = [{name, other} for name, other in tied_weights(model).items() if keys & {name, other}]
    users = {name for name, p in model.named_parameters(remove_duplicate=False) if p is modules[0].weight}
    if ties != ([keys] if len(keys) > 1 else []) or users != keys:
        return None
    return None if float32 is not None and any(map(float32.search, keys)) else paths


def settle_ties(model: Any, checkpoint: Checkpoint) -> None:
    """In a model without weights, untie what its files have as two, and tie the rest to what is there.

    Raises:
        CheckpointError: two tensors have to be compared, and one cannot be read.
    """
    tied = tied_weights(model)
    if not tied:
        return
    there = _stored(model, checkpoint, {*tied, *tied.values()})
    settled: dict[str, str] = {}
    for source in dict.fromkeys(tied.values()):
        names = [source, *(name for name, other in tied.items() if other == source)]
        kept = next((name for name in names if name in there), source)
        for name in names:
            if name != kept and (name not in there or _same(there[name], there[kept])):
                settled[name] = kept
    _apply(model, tied, settled)


def untie_named(model: Any, stored: Container[str]) -> None:
    """In a model without weights, untie what an index names as two tensors: that they have the same values is
    seen when they are here."""
    tied = tied_weights(model)
    _apply(
        model, tied, {name: kept for name, kept in tied.items() if not (name in stored and kept in stored)}
    )


def share_ties(model: Any, other: Any) -> None:
    """Tie in `model`, which has no weights, what is tied in `other`, of the same architecture."""
    _apply(model, tied_weights(model), tied_weights(other))


def untie(model: Any) -> None:
    """In a model without weights, let each be its own."""
    _apply(model, tied_weights(model), {})


def _apply(model: Any, tied: dict[str, str], settled: dict[str, str]) -> None:
    for name in tied.keys() - settled.keys() - set(settled.values()):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        own = torch.empty_like(getattr(module, leaf))
        module._parameters[leaf] = nn.Parameter(own, requires_grad=False)
    if settled != tied:
        model.all_tied_weights_keys = settled


def _stored(model: Any, checkpoint: Checkpoint, wanted: set[str]) -> dict[str, TensorHeader]:
    """The tensors of these weights, by the weights' names."""
    meta = model.state_dict()
    shapes = {tuple(meta[name].shape) for name in wanted if name in meta}
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found = {}
    for header in checkpoint.tensors.values():
        if tuple(header.shape) in shapes:  # few are; matching names takes long
            key, _ = rename_source_key(header.name, renamings, converters, model.base_model_prefix, meta)
            found[header.name if key not in meta else key] = header
    return {name: header for name, header in found.items() if name in wanted}


def _same(a: TensorHeader, b: TensorHeader) -> bool:
    """Whether two tensors of the same shape have the same values; reads up to the first difference."""
    size = torch.Size(a.shape).numel()
    with WeightReader() as one, WeightReader() as two:
        for first in range(0, size, _COMPARED):
            count = min(_COMPARED, size - first)
            parts = []
            for reader, header in ((one, a), (two, b)):
                part = torch.empty(count, dtype=stored_dtype(header))
                reader.read_part(header, first, part)
                parts.append(part)
            if not torch.equal(parts[0].float(), parts[1].float()):
                return False
    return True
