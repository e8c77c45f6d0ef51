"""Device code by which grouping plans that a split expert is completed (copy_rest does it). Decides neither
what is split nor where it lands.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rests_under_way(words, layer):
    """Words that this pass has planned to copy, and those of them that are still to come; before the first
    layer all of the last pass's are there. By an atomic operation, so that all threads see the same."""
    copied = tl.atomic_add(words + 1, 0, sem="relaxed", scope="gpu")
    planned = tl.where(layer == 0, copied, tl.load(words))
    return planned, tl.maximum(planned - copied, 0)


@triton.jit
def may_complete(share, rates, I: tl.constexpr):
    """Which experts, of which the CPU computes `share` columns, are worth the link's time for the rest."""
    return (share > 0) & (share.to(tl.float32) / I * tl.load(rates + 3) <= tl.load(rates + 4))


@triton.jit
def plan_rest(words, job, completed, share, address, landing, planned, quantum_words, Q: tl.constexpr):
    """Leave the job for the one expert, if any, that is `completed`. address, landing: of host record and
    slot."""
    tl.store(job, tl.sum(tl.where(completed, address, 0), 0))
    tl.store(job + 1, tl.sum(tl.where(completed, landing, 0), 0))
    columns = tl.sum(tl.where(completed, share, 0), 0).to(tl.int64)
    tl.store(job + 2, columns)
    tl.store(words, planned + columns // Q * quantum_words)
