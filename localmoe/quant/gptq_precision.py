"""Full float32 products for the length of a call. Decides nothing else about precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32() -> Iterator[None]:
    """Products of float32 matrices keep 24 bits inside, whatever the program has chosen; afterwards its
    choice is back.

    TF32 keeps 11 bits of each factor: a Hessian so summed is soon not positive definite. torch has this
    switch for the whole process only, so products that other threads issue meanwhile are exact too.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    chosen = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, chosen, strict=True):
            backend.fp32_precision = precision
