"""What rows of a model's passes by layers are padded to: measured, once for the same weights on a machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import sha256

import torch
import transformers
from torch import Tensor

from localmoe import __version__
from localmoe.core.remembered import Remembered
from localmoe.core.types import ExpertKey
from localmoe.engine.planning import MAX_WINDOW, PreparedModel
from localmoe.experts.record_store import RecordStore
from localmoe.hardware.cpu import cpu_name_and_flags
from localmoe.kernels.rows import CANDIDATES, RowPadding, measure_row_multiple
from localmoe.model.row_check import ALIGNMENT, measure_row_padding

FILE = Remembered("row-padding.json", "localmoe row padding 3", "multiple_and_most_rows", "row padding")
_NUMBERS = 64  # of each weight, at least
_SWITCHES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_")  # environment that libraries look at
_NONE: list[int] = []  # no padding makes rows independent


def row_padding(prepared: PreparedModel, store: RecordStore) -> RowPadding | None:
    """Measured on one expert of each shape, then on the model as a whole: for the longest windows if
    possible, else for windows that one fixed number of rows holds. None: no padding makes rows independent.
    Experts that are computed in place need no padding.
    """
    skeleton, compute = prepared.skeleton, prepared.compute
    if not skeleton.can_rollback:
        return RowPadding(1, 1)  # no verify pass, and padding rows would enter the recurrent state
    layout = skeleton.experts[0].layout
    layers = [
        layer
        for layer, experts in enumerate(skeleton.experts)
        if (layer == 0 or experts.layout != layout) and not prepared.plan.in_place
    ]
    views = [view for layer in layers for view in store.weights(ExpertKey(layer, 0))]
    matrices = [view.to(device=compute.device, dtype=compute.dtype) for view in views]
    situation = _what_decides(prepared, matrices)
    known = FILE.read().get(situation)
    if known == _NONE:
        return None
    if isinstance(known, list) and _can_be(known):
        return RowPadding(*known)
    found = _measure(prepared, matrices, transposed=layout.transposed)
    FILE.keep(situation, _NONE if found is None else [found.multiple, found.max_rows])
    return found


def _can_be(known: list[object]) -> bool:
    """Whether it may have been measured: a file can be damaged and still be JSON, and rows by the billion
    would fill the memory."""
    if len(known) != 2 or not all(type(rows) is int for rows in known):
        return False
    return known[0] in CANDIDATES and known[1] in range(1, MAX_WINDOW + 1)


def _measure(prepared: PreparedModel, matrices: Sequence[Tensor], *, transposed: bool) -> RowPadding | None:
    for max_rows in (MAX_WINDOW, CANDIDATES[-1]):
        with torch.inference_mode():
            multiple = measure_row_multiple(matrices, max_rows, transposed=transposed)
        if multiple is not None:
            for_experts = RowPadding(multiple, max_rows)
            padding = measure_row_padding(
                prepared.skeleton, prepared.compute.device, for_experts,
                own_attention=prepared.plan.in_place and prepared.compute.dtype == torch.float32,
            )  # fmt: skip
            if padding is not None:
                return padding
    return None


def _what_decides(prepared: PreparedModel, matrices: Sequence[Tensor]) -> str:
    """A name of all on which it depends: which operations run, by which libraries, on which processor and how
    many threads, and where the weights lie. Numbers from all over each weight too: other weights show other
    differences."""
    device, dtype = prepared.compute.device, prepared.compute.dtype
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    environment = sorted(item for item in os.environ.items() if item[0].startswith(_SWITCHES))
    versions = torch.__version__, transformers.__version__, __version__
    switches = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.get_num_threads()
    machine = cpu_name_and_flags(), gpu, versions, switches, environment
    config = {**prepared.skeleton.config.to_dict(), "_name_or_path": ""}  # wherever it lies
    digest = sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr((dtype, machine)).encode())
    for weight in (*prepared.skeleton.model.parameters(), *matrices):
        if weight.is_meta:  # the routed experts', which lie in the store
            continue
        numbers = weight.detach().reshape(-1)[:: max(1, weight.numel() // _NUMBERS)]
        lies = tuple(weight.shape), weight.dtype, weight.data_ptr() % ALIGNMENT
        digest.update(repr(lies).encode())
        digest.update(numbers.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()
