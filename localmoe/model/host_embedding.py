"""An input embedding whose table stays in the host's memory, in the checkpoint's dtype: a pass reads one row
a token of it, for which it need not take a GPU's memory, nor twice its own where a CPU computes in 32 bits.
Decides which models have one that may stay; not whether it does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localmoe.experts.record_store import RecordStore
from localmoe.model.packed_head import read_packed_rows
from localmoe.model.skeleton import Skeleton
from localmoe.model.tying import input_embedding, path_of_own_weight


def own_embedding(model: Any) -> str | None:
    """Path of a model's input embedding; None if something else uses its table too, such as a head that is
    tied to it, if its forward does more than look rows up, or if the architecture keeps it in float32."""
    module = input_embedding(model)
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return None
    return path_of_own_weight(model, module)


def embedding_params(model: Any) -> int:
    """Weights of such an embedding; 0 without one."""
    path = own_embedding(model)
    return 0 if path is None else model.get_submodule(path).weight.numel()


def look_rows_up(skeleton: Skeleton, store: RecordStore, dtype: torch.dtype, *, by_kernel: bool) -> None:
    """Let a model whose weights are loaded look up its rows where they are: in the store's table if that has
    it, in a packed head that is the same weight, or in its own table.

    Args:
        dtype: that passes compute in.
        by_kernel: the GPU's reads the store's; else PyTorch.
    """
    read_packed_rows(skeleton)
    if skeleton.host_embedding is None:
        return
    module = skeleton.model.get_submodule(skeleton.host_embedding)
    # no parameter of the model: it says neither where nor in what passes compute
    module._parameters.pop("weight")
    module.forward = HostEmbedding(store, dtype, by_kernel=by_kernel)


class HostEmbedding:
    """The forward of the embedding."""

    def __init__(self, store: RecordStore, dtype: torch.dtype, *, by_kernel: bool) -> None:
        self._store = store
        self._dtype = dtype
        self._by_kernel = by_kernel

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 (..., T) -> (..., T, H)."""
        table = self._store.embedding
        assert table is not None, "the model is closed"
        if not self._by_kernel:
            return F.embedding(ids, table).to(self._dtype)
        from localmoe.kernels.gpu.embedding import read_rows

        assert table.dtype == self._dtype, "kernels read the table as it is"
        rows, columns = table.shape
        out = read_rows(ids.reshape(-1), self._store.embedding_address, rows, columns, self._dtype)
        return out.view(*ids.shape, columns)
